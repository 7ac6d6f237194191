"""A heads checkpoint -> a folder in another engine's format, reloaded and compared before it takes its name."""

# R rows (positions in the text), K heads, D hidden, V vocabulary

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, resolve_heads
from medusa_heads.formats import Format, Probe, medusa_v1, medusa_v2, vllm
from medusa_heads.heads import MedusaHeads
from medusa_heads.json_text import parse_json
from medusa_heads.quantization import Quantization
from medusa_heads.replacing import replacing_folder

TARGETS: dict[str, Format] = {"medusa-v1": medusa_v1, "medusa-v2": medusa_v2, "vllm": vllm}
PROBE_TEXT = "The river rises in the hills, runs past three small towns and meets the sea 41.5 km north. def area(r): return 3.14 * r"
NUM_RANDOM_ROWS = 16
TOLERANCE = 1e-4  # of the largest logit: both sides run in float32 on the same stored numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Write heads in another engine's format."""

    base: str = "embedded"
    """Base model the heads were trained on: `embedded`, a folder or a hub id."""
    heads: str
    """Heads checkpoint: a folder, or `pretrained`."""
    to: Literal["medusa-v1", "medusa-v2", "vllm"]
    """Format to write."""
    output: Path
    """Folder to write; an earlier export there is replaced."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number type of the written weights: the one the engine serves in."""
    base_quantization: Quantization = "none"
    """Packs the base's weights into 8bit or 4bit (nf4), by bitsandbytes; heads serve the form that they were trained on."""
    revision: str | None = None
    """Revision of the base model on the hub."""

    def run(self) -> None:
        check_output(self.output)
        resolve_heads(self.heads)  # before the base is loaded, which may take minutes
        model, tokenizer = base_model.load_base(self.base, revision=self.revision, quantization=self.base_quantization)
        checkpoint = load_heads(self.heads, model, dtype=torch.float32)
        if checkpoint.draft_vocabulary is not None:
            num_tokens = len(checkpoint.draft_vocabulary)
            print(f"note: here these heads propose the {num_tokens:,} tokens that they were trained on, there any of the vocabulary")
        for line in export(checkpoint.heads, model, self.output, to=self.to, dtype=base_model.parse_dtype(self.dtype), tokenizer=tokenizer):
            print(line)


def export(
    heads: MedusaHeads, model: PreTrainedModel, output: Path, *, to: str, dtype: torch.dtype, tokenizer: Any | None = None
) -> list[str]:
    """Writes `heads` to `output` in format `to` and returns lines for the user.

    tokenizer: adds hidden states of a real text to the random ones of the comparison. Raises
    ValueError when the format cannot hold these heads, `output` holds something else, or the
    written files do not give the logits of the heads; nothing is left at `output` then.
    """
    target = TARGETS[to]
    if reason := target.refusal(heads, model):
        raise ValueError(f"--to {to}: {reason}")
    check_output(output)
    with replacing_folder(output) as work:
        target.export_heads(heads, model, work, dtype=dtype)
        found = compare(heads, model, target, work, dtype=dtype, hidden_RD=probe_hidden_states(model, tokenizer))
    notes = target.notes(heads, model) + logit_notes(heads, model, target)
    return [f"wrote {output} ({', '.join(target.FILES)})", found, *(f"note: {note}" for note in notes)]


def check_output(folder: Path) -> None:
    """Raises ValueError unless `folder` is absent, empty or an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"--output {folder} is a file: choose a folder")
    names = {path.name for path in folder.iterdir()}
    known = {name for target in TARGETS.values() for name in target.FILES}
    if names and not (names <= known and _is_export(folder / "config.json")):
        foreign = ", ".join(sorted(names - known)[:5] or sorted(names))
        raise ValueError(f"--output {folder} holds files that are not an earlier export ({foreign}): choose a new folder")


def _is_export(config: Path) -> bool:
    try:
        values = parse_json(config.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and (values.get("model_type") == "medusa" or "medusa_num_heads" in values)


@torch.no_grad()
def probe_hidden_states(model: PreTrainedModel, tokenizer: Any | None) -> Tensor:
    """Hidden states [R, D], float32 on the CPU: of PROBE_TEXT, and random ones of the same spread."""
    if tokenizer is None:
        ids = torch.arange(1, 33) % base_model.vocab_size(model)
    else:
        ids = torch.tensor(tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids[:64])
    real_RD = base_model.forward_hidden(model, ids[None].to(model.device))[0].float().cpu()
    noise_RD = torch.randn(NUM_RANDOM_ROWS, real_RD.shape[1], generator=torch.Generator().manual_seed(0))
    return torch.cat([real_RD, noise_RD * real_RD.std()])


@torch.no_grad()
def compare(heads: MedusaHeads, model: PreTrainedModel, target: Format, folder: Path, *, dtype: torch.dtype, hidden_RD: Tensor) -> str:
    """Compares the files in `folder`, read as their engine reads them, with our heads; returns a line for the user.

    The files must give the logits of our heads rounded to `dtype`, up to float32 summation order.
    Raises ValueError with the largest difference otherwise.
    """
    expected_RKV = own_logits(heads, model, hidden_RD, dtype=dtype)
    found_RKV = engine_logits(target.read_probe(folder, model), heads, model, target, hidden_RD)
    if found_RKV.shape != expected_RKV.shape:
        raise ValueError(f"export check failed: the files give logits of shape {list(found_RKV.shape)}, not {list(expected_RKV.shape)}")
    difference = float((found_RKV - expected_RKV).abs().max())
    if not difference <= TOLERANCE * float(expected_RKV.abs().max()):  # also false for NaN
        raise ValueError(f"export check failed: logits read back from the files differ by {difference:.3g}; nothing was written")
    exact_RKV = own_logits(heads, model, hidden_RD, dtype=torch.float32)
    agreement = float((found_RKV.argmax(-1) == exact_RKV.argmax(-1)).float().mean())
    return (
        f"reloaded and compared on {len(hidden_RD)} hidden states: logits differ by at most {difference:.2g} from those written in "
        f"{str(dtype).split('.')[-1]}; first choice as in the checkpoint for {agreement:.1%} of {exact_RKV[..., 0].numel()}"
    )


def own_logits(heads: MedusaHeads, model: PreTrainedModel, hidden_RD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Our heads' logits [R, K, V] in float32, from weights rounded to `dtype`."""
    rounded = copy.deepcopy(heads).cpu().to(dtype).float()
    states_RKD = rounded.draft_states(hidden_RD)
    own_RKV = rounded.own_logits(states_RKD)
    if own_RKV is not None:
        return own_RKV
    weight_VD, bias_V = (None if p is None else p.detach().to(dtype).float().cpu() for p in base_model.lm_head_parameters(model))
    assert weight_VD is not None
    return base_model.logit_transform(model)(F.linear(states_RKD, weight_VD, bias_V))


def engine_logits(probe: Probe, heads: MedusaHeads, model: PreTrainedModel, target: Format, hidden_RD: Tensor) -> Tensor:
    """The engine's logits, followed by those of the base model's scalings that the engine leaves out of drafting."""
    logits_RKV = probe(hidden_RD)
    if heads.lm_head is not None:
        return logits_RKV
    scale, cap = base_model.logit_scale_and_cap(model)
    if not target.APPLIES_LOGIT_SCALE:
        logits_RKV = logits_RKV * scale
    return logits_RKV if cap is None else torch.tanh(logits_RKV / cap) * cap


def logit_notes(heads: MedusaHeads, model: PreTrainedModel, target: Format) -> list[str]:
    """Which scalings of the base's logits the engine leaves out of drafting."""
    scale, cap = base_model.logit_scale_and_cap(model)
    left_out = [f"factor {scale:g}"] if scale != 1.0 and not target.APPLIES_LOGIT_SCALE else []
    left_out += [] if cap is None else [f"soft cap {cap:g}"]
    if heads.lm_head is not None or not left_out:
        return []
    return [
        f"the base model's logits have a {' and a '.join(left_out)}, which this format does not apply to drafts; "
        "it is monotone, so the order of the drafted tokens is unchanged"
    ]
