"""What is known about a set of heads -> the README.md of its checkpoint, with Hugging Face front matter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from medusa_heads.config import HeadsConfig

TAGS = ("medusa", "speculative-decoding", "draft-heads")
NUM_IDS_PER_LINE = 20


def model_card(
    config: HeadsConfig,
    *,
    base_license: str | None,
    data: Mapping[str, Any],
    recipe: Mapping[str, Any],
    measured: Mapping[str, Any],
    validation_ids: Sequence[str] = (),
    limits: str = "",
    tuned: bool = False,
) -> str:
    """The card, as Markdown. Says only what it is given; an empty part is named as not recorded.

    data: files, counts, licence; recipe: settings; measured: the figures, and how, when and on
    which hardware. In each, a number or text becomes a line, a mapping or a list of rows a table.
    validation_ids: rows held out of training. limits: a sentence added to the general ones.
    tuned: the heads belong to the base with the adapter beside them merged in.
    """
    parts = [
        _front_matter(config, base_license),
        f"# Draft heads for {config.base_model or 'a base model'}",
        _what(config),
        "## Use",
        _merge_first(config) + _use(replace(config, base_model="MERGED")) if tuned else _use(config),
        "## Lossless with respect to",
        _lossless_tuned(config) if tuned else _lossless(config),
        "## Training data",
        _sections(data) or "Not recorded.",
        "## Recipe",
        _sections(recipe) or "Not recorded.",
        "## Measured acceptance",
        _sections(measured) or "Not measured.",
        "## Limits",
        " ".join(filter(None, [LIMITS, limits])),
    ]
    if validation_ids:
        parts += ["## Held-out validation rows", _id_lines(validation_ids)]
    return "\n\n".join(parts) + "\n"


LIMITS = (
    "The heads work on no other weights, a fine-tuned or differently quantised form of the base included: loading them there is refused "
    "(of a quantised base as far as its norms, biases and LM head tell). "
    "They change how fast the base model answers, never what: its own limits hold. "
    "Acceptance falls on text unlike the training data."
)


def _front_matter(config: HeadsConfig, base_license: str | None) -> str:
    # A JSON string is a YAML string with every special character quoted.
    lines = [f"base_model: {json.dumps(config.base_model)}"] if config.base_model else []
    lines += ["tags:", *(f"- {tag}" for tag in TAGS)]
    lines += [f"license: {json.dumps(base_license)}"] if base_license else []
    return "\n".join(["---", *lines, "library_name: medusa-heads", "---"])


def _what(config: HeadsConfig) -> str:
    matrix = "an output matrix of their own" if config.own_lm_head else "the base model's own frozen lm_head"
    layers = "one residual block" if config.num_layers == 1 else f"{config.num_layers} residual blocks"
    return (
        f"{config.num_heads} `{config.architecture}` heads ({layers} each, hidden size {config.hidden_size}, vocabulary "
        f"{config.vocab_size}, {matrix}). From one hidden state of the base model they propose the {config.num_heads} tokens after "
        "its next one; the base model verifies a tree of these proposals in one forward and keeps what it would have written itself."
    )


def _use(config: HeadsConfig) -> str:
    base = config.base_model or "BASE"
    packed = config.base_quantization != "none"
    loading = f', quantization="{config.base_quantization}"' if packed else ""
    option = f" --base-quantization {config.base_quantization}" if packed else ""
    if config.base_revision:
        loading, option = f'{loading}, revision="{config.base_revision}"', f"{option} --revision {config.base_revision}"
    return f"""```python
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree_spec import BeamTree
from medusa_heads.base_model import load_base
from medusa_heads.checkpoint import load_heads

model, tokenizer = load_base("{base}"{loading})
heads = load_heads("PATH/TO/THIS/FOLDER", model)
generator = Generator(model, HeadsDrafter.from_checkpoint(model, heads, BeamTree(16)), tokenizer=tokenizer)
prompt = tokenizer.apply_chat_template([{{"role": "user", "content": "Hello"}}], add_generation_prompt=True, return_dict=False)
print(generator.generate([prompt])[0].text)
```

```
medusa-heads generate --base {base}{option} --heads PATH/TO/THIS/FOLDER --prompt "Hello"
```"""


def _lossless(config: HeadsConfig) -> str:
    revision = f", revision `{config.base_revision}`" if config.base_revision else ""
    packed = f", packed into {config.base_quantization} by bitsandbytes" if config.base_quantization != "none" else ""
    return (
        f"Greedy text is that of `{config.base_model or 'the base model'}`{revision}{packed}, weights with fingerprint "
        f"`{config.base_fingerprint or 'not recorded'}` (SHA-256 over config fields and sampled weight rows; checked on loading)."
    )


def _merge_first(config: HeadsConfig) -> str:
    revision = f" --revision {config.base_revision}" if config.base_revision else ""
    return f"""First write the tuned base, once:

```
medusa-heads merge --base {config.base_model or "BASE"}{revision} --adapter PATH/TO/THIS/FOLDER/adapter --output MERGED
```

"""


def _lossless_tuned(config: HeadsConfig) -> str:
    revision = f", revision `{config.base_revision}`" if config.base_revision else ""
    return (
        f"The tuned base alone: `{config.base_model or 'the base model'}`{revision} with the LoRA adapter in `adapter` merged in, "
        f"weights with fingerprint `{config.base_fingerprint or 'not recorded'}` (SHA-256 over config fields and sampled weight rows; "
        "checked on loading). Greedy text is that of these weights, not that of the untouched base, which answers a little differently."
    )


def _sections(values: Mapping[str, Any]) -> str:
    """Scalars as one list, then a table for each mapping or list of rows; empty values are left out."""
    values = {name: value for name, value in values.items() if value not in (None, "", [], (), {})}
    scalars = {name: value for name, value in values.items() if not _is_table(value)}
    parts = ["\n".join(f"- {_words(name)}: {_cell(value)}" for name, value in scalars.items())] if scalars else []
    for name, value in values.items():
        if name not in scalars:
            parts.append(f"**{_words(name)}**\n\n{_value_table(value)}")
    return "\n\n".join(parts)


def _is_table(value: Any) -> bool:
    """A mapping, or a list of mappings or of lists; other lists fit on a line."""
    rows = value if isinstance(value, (list, tuple)) else ()
    kinds = (Mapping, (list, tuple))
    return isinstance(value, Mapping) or any(bool(rows) and all(isinstance(row, kind) for row in rows) for kind in kinds)


def _value_table(value: Mapping[Any, Any] | Sequence[Any]) -> str:
    if isinstance(value, Mapping):
        return _table(("", "value"), value.items())
    if all(isinstance(row, Mapping) for row in value):
        names = list(dict.fromkeys(name for row in value for name in row))
        return _table(tuple(map(_words, names)), ([row.get(name, "") for name in names] for row in value))
    width = max(map(len, value))
    return _table(("", *map(str, range(1, width + 1))), ([i, *row, *[""] * (width - len(row))] for i, row in enumerate(value, 1)))


def _table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _words(name: Any) -> str:
    return str(name).replace("_", " ")


def _id_lines(ids: Sequence[str]) -> str:
    rows = [", ".join(map(str, ids[start : start + NUM_IDS_PER_LINE])) for start in range(0, len(ids), NUM_IDS_PER_LINE)]
    return f"{len(ids)} rows held out of training:\n\n" + "\n".join(rows)
