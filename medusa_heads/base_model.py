"""A transformers causal LM -> hidden states and logits: the only file that knows transformers' internals.

Everything else in this project passes a `PreTrainedModel` to the functions below and never touches
its attributes, so that a release of transformers that moves something is answered here alone.
"""

# B batch, T sequence, S key length, D hidden, V vocabulary

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, StaticLayer

from medusa_heads.quantization import Quantization, loading_options, quantization_of, settle

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

AttentionMask = Tensor | dict[str, Tensor]
TREE_ATTENTION = "grouped_tree"  # the name of infer/engine/tree_attention.py among transformers' attention functions


def parse_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16` -> the torch dtype. Raises ValueError otherwise."""
    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_base(
    base: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    quantization: Quantization = "none",
) -> tuple[PreTrainedModel, Any]:
    """Loads a base model, frozen and in eval mode, and its tokenizer.

    base: `embedded`, `twin` (the same function at a 7B model's cost: cost_twin.py), a local folder, or a hub id
    (HF_HUB_OFFLINE=1 keeps transformers offline).
    dtype: None keeps the checkpoint's own. quantization: packs the weights of all layers, but for embeddings and LM head, into 8 or
    4 bits; `none` leaves them as the files hold them, which may be quantised already.
    Raises ValueError naming what is missing when the model cannot be loaded.
    """
    if base == "twin":
        from medusa_heads.cost_twin import load_twin

        if quantization != "none":
            raise ValueError("--base twin: the cost twin has the cost of a 16-bit model; leave --base-quantization out")
        return load_twin(dtype=dtype, device=device)
    if base == "embedded":
        from medusa_heads.embedded import embedded_model_path

        base = str(embedded_model_path())
    check_exists(base)
    try:
        config = AutoConfig.from_pretrained(base, revision=revision)
        check_config(config)
        packed = loading_options(config, quantization, device=device)
        tokenizer = AutoTokenizer.from_pretrained(base, revision=revision)
        options: dict[str, Any] = {"revision": revision, "dtype": dtype or "auto", "output_loading_info": True} | packed
        found: Any = AutoModelForCausalLM.from_pretrained(base, **options)
        model: PreTrainedModel = found[0]
        missing = sorted(found[1]["missing_keys"])  # transformers fills them with random numbers
    except (OSError, RuntimeError, ImportError) as error:
        raise ValueError(f"--base {base!r} could not be loaded: {_why_not_loaded(base, error)}") from error
    except ValueError as error:
        raise ValueError(f"--base {base!r}: {_one_line(error)}") from error
    except Exception as error:  # safetensors raises its own type for a truncated file
        if type(error).__name__ == "SafetensorError":
            raise ValueError(f"--base {base!r}: a weight file is damaged or truncated ({error}); copy or download it again") from error
        kind = type(error).__name__  # a file of another kind than its name says raises what its reader happens to
        raise ValueError(f"--base {base!r}: its files cannot be read ({kind}: {_one_line(error)}); copy or download them again") from error
    if missing:
        names = ", ".join(missing[:3]) + " ..." * (len(missing) > 3)
        raise ValueError(f"--base {base!r}: its files hold no {names}: give a whole causal language model, or copy or download it again")
    model = model.eval() if packed else model.to(device).eval()  # type: ignore[arg-type]
    model.requires_grad_(False)
    settle(model)
    try:
        check_base(model)
    except (RuntimeError, TypeError, AttributeError) as error:
        if not packed:
            name = model.config.model_type
            raise ValueError(f"--base {base!r}: {name} does not run as a plain decoder ({_one_line(error)})") from error
        raise ValueError(
            f"--base {base!r}: layers in {quantization_of(model.config)} do not compute on {model.device} here ({_one_line(error)}): "
            "choose another device, or give the model unquantised"
        ) from error
    return model, tokenizer


def load_tokenizer(base: str, *, revision: str | None = None) -> Any:
    """The tokenizer of a base model alone. Raises ValueError naming --base when there is none."""
    try:
        return AutoTokenizer.from_pretrained(base_path(base), revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"--base {base!r}: its tokenizer could not be loaded: {_why_not_loaded(base, error)}") from error


def check_exists(base: str) -> None:
    """Raises ValueError for what is neither a folder nor looks like the name of a model."""
    if not os.path.isdir(base) and not _may_be_hub_id(base):
        raise ValueError(f"--base {base!r}: no such folder; give a local folder, a hub id (owner/name) or `embedded`")
    if os.path.isdir(base) and not os.path.exists(os.path.join(base, "config.json")):
        raise ValueError(f"--base {base!r}: no config.json in this folder: give the folder of a model, a hub id or `embedded`")


def _may_be_hub_id(base: str) -> bool:
    return not base.startswith((".", "/", "~")) and base.count("/") <= 1


def _why_not_loaded(base: str, error: Exception) -> str:
    """The reason in one line; for a hub id that offline mode keeps from being fetched, with the ways out."""
    if isinstance(error, OSError) and constants.HF_HUB_OFFLINE and _may_be_hub_id(base) and not os.path.isdir(base):
        return (
            "it is no local folder, not (wholly) in the cache of hub models, and HF_HUB_OFFLINE keeps it from being fetched: run "
            f"`hf download {base}` on the network first, unset HF_HUB_OFFLINE, or give a local folder"
        )
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def stored_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same model loaded again in the type its files hold, on the CPU; `model` itself where there are no files."""
    try:
        return AutoModelForCausalLM.from_pretrained(name_or_path(model), revision=getattr(model.config, "_commit_hash", None), dtype="auto")
    except (OSError, ValueError):
        return model


def base_path(base: str) -> str:
    """The folder or hub id behind `--base`: resolves `embedded`, whose tokenizer `twin` shares."""
    if base in ("embedded", "twin"):
        from medusa_heads.embedded import embedded_model_path

        return str(embedded_model_path())
    return base


# ---------------------------------------------------------------- which models can work


def check_config(config: Any) -> None:
    """Raises ValueError with the reason when a model of this config cannot carry draft heads."""
    name = getattr(config, "model_type", "this model")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; draft heads need a decoder-only causal language model")
    text = config.get_text_config()
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise ValueError(
            f"{name} cuts its local attention by places in the cache, not by positions: trees and batches would read other tokens"
        )
    if getattr(text, "keep_window_size", None):
        raise ValueError(
            f"{name} keeps those keys of its cache that score highest: what it sees of a text would depend on the tree beside it"
        )
    stateful = sorted({t for t in getattr(text, "layer_types", None) or () if t not in ("full_attention", "sliding_attention")})
    if stateful:
        raise ValueError(
            f"{name} has layers of type {', '.join(stateful)}: their state cannot branch over a tree of candidates, "
            "so several continuations cannot be verified in one forward; choose a model whose layers are all attention"
        )


def check_base(model: PreTrainedModel) -> None:
    """Raises ValueError with the reason when `model` cannot be used: flash attention, no LM head,
    logits that this adapter does not reproduce from the last hidden state."""
    check_config(model.config)
    name = model.config.model_type
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager", TREE_ATTENTION):
        raise ValueError(
            f"attention implementation {attention!r} cannot take the mask of a candidate tree; "
            "load the base model with attn_implementation='sdpa' (or 'eager')"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output embeddings (lm_head): load it with AutoModelForCausalLM")
    _check_lm_head(model)
    forward = inspect.signature(decoder(model).forward).parameters
    if _cache_keyword(model) not in forward or "position_ids" not in forward:
        raise ValueError(f"{name}'s forward takes no key-value cache and position_ids: its state cannot branch over a tree of candidates")
    probe = torch.tensor([[1, 2, 3, 5]], device=model.device) % vocab_size(model)
    with torch.no_grad():
        expected = model(input_ids=probe, use_cache=False).logits
        found = compute_logits(model, forward_hidden(model, probe))
    if not bool(expected.isfinite().all()):
        raise ValueError(
            f"{name} gives logits that are not finite: its weights are damaged, or overflow in {expected.dtype}: try another --dtype"
        )
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.05
    if found.shape != expected.shape or not torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max())
    ):
        raise ValueError(
            f"{name} computes its logits from something other than its last hidden state and the scalings known here "
            "(final_logit_softcapping, logit_scale, logits_scaling): draft heads cannot share its lm_head"
        )


def _check_lm_head(model: PreTrainedModel) -> None:
    """Raises ValueError where the LM head, which heads share and losses read, is packed."""
    module = lm_head(model)
    weight = getattr(module, "weight", None)
    of_packed_kind = type(module).__module__.startswith("bitsandbytes")  # whatever its weight: one tied to the embedding is plain
    if of_packed_kind or weight is None or not weight.is_floating_point():
        raise ValueError(
            f"the LM head of this {model.config.model_type} is quantised ({quantization_of(model.config)}), and draft heads need its plain "
            "weight: quantise the model again without it, as transformers does unless told otherwise (llm_int8_skip_modules=['lm_head'])"
        )


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its LM head."""
    return model.get_decoder()


def _cache_keyword(model: PreTrainedModel) -> str:
    """`cache` from transformers 5.24, `past_key_values` before; read from the signature."""
    return "cache" if "cache" in inspect.signature(decoder(model).forward).parameters else "past_key_values"


# ---------------------------------------------------------------- shapes


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for each token: heads x key_dim and heads x value_dim."""

    num_heads: int
    key_dim: int
    value_dim: int


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def name_or_path(model: PreTrainedModel) -> str:
    """The hub id or folder the model was loaded from, or an empty string."""
    return str(getattr(model, "name_or_path", "") or "")


def hidden_size(model: PreTrainedModel) -> int:
    """D, the width of the last hidden state (the input of lm_head)."""
    return lm_head(model).in_features  # type: ignore[return-value]


def vocab_size(model: PreTrainedModel) -> int:
    """V, the number of logits."""
    return lm_head(model).out_features  # type: ignore[return-value]


def max_length(model: PreTrainedModel) -> int:
    """The longest sequence the model's positions allow, in tokens.

    For LongRoPE, where it changes its frequencies: beyond, the longest row of a forward decides how every
    row's positions are rotated, so that chunks, batches and trees would differ from plain decoding.
    """
    config = text_config(model)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limit = next((int(value) for name in names if (value := getattr(config, name, None))), 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = (rope, *(part for part in rope.values() if isinstance(part, dict)))  # one for all layers, or one for each of their types
    return min(limit, *(int(r["original_max_position_embeddings"]) for r in ropes if r.get("rope_type") == "longrope"), 1 << 30)


def sliding_windows(model: PreTrainedModel) -> tuple[dict[str, int | None], bool]:
    """The attention windows of the layers.

    Returns ({layer type: window in tokens or None for full attention}, whether forward wants one
    mask per layer type).
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not types:
        return {"sliding_attention": window} if window else {"full_attention": None}, False
    windows = {t: (window if t == "sliding_attention" else None) for t in types}
    return windows, len(types) > 1


@torch.no_grad()
def cache_layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """The key-value shape of every layer, read from the cache of a one-token forward.

    Raises ValueError when a layer stores something other than keys and values of its own.
    """
    cache = DynamicCache()
    forward_hidden(model, torch.ones(1, 1, dtype=torch.long, device=model.device), cache=cache)
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 1:
            raise ValueError(
                f"layer {index} of {model.config.model_type} keeps no plain keys and values in its cache: "
                "its state cannot branch over a tree of candidates"
            )
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return shapes


# ---------------------------------------------------------------- forward


def forward_hidden(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention_mask: AttentionMask | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """One forward of the base without its LM head.

    input_ids: [B, T]; attention_mask: None (causal), or additive [B, 1, T, S], or one such mask per
    layer type (see `additive_masks`); position_ids: [B, T].
    Returns the last hidden state after the final norm, [B, T, D].
    """
    keywords: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        keywords[_cache_keyword(model)] = cache
    if attention_mask is not None:
        keywords["attention_mask"] = attention_mask
    if position_ids is not None:
        keywords["position_ids"] = position_ids
    return decoder(model)(input_ids=input_ids, **keywords).last_hidden_state


def lm_head(model: PreTrainedModel) -> nn.Module:
    """The output embedding module, [D] -> [V]."""
    return model.get_output_embeddings()  # type: ignore[return-value]


def lm_head_parameters(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """The weight [V, D] and bias [V] or None of the output embedding."""
    module = lm_head(model)
    return module.weight, getattr(module, "bias", None)  # type: ignore[return-value]


def logit_transform(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """What the model does to its logits after the LM head: the identity for most.

    Multiplied by `logit_scale` (Cohere), divided by `logits_scaling` (Granite), or
    cap * tanh(logits / cap) with cap = `final_logit_softcapping` (Gemma).
    """
    config = text_config(model)
    scale = getattr(config, "logit_scale", None)
    division = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def transform(logits: Tensor) -> Tensor:
        if scale is not None:
            logits = logits * scale
        if division is not None:
            logits = logits / division
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return transform


def logit_scale_and_cap(model: PreTrainedModel) -> tuple[float, float | None]:
    """What `logit_transform` does, as numbers: (factor on the logits, soft cap or None)."""
    config = text_config(model)
    scale = getattr(config, "logit_scale", None)
    division = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)
    return (1.0 if scale is None else float(scale)) / (1.0 if division is None else float(division)), cap


def compute_logits(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Last hidden states [..., D] -> the model's logits [..., V], every scaling included."""
    return logit_transform(model)(lm_head(model)(hidden_states))


def float32_logits(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Like `compute_logits`, the LM head in float32 whatever the model's dtype: [..., D] -> [..., V]."""
    weight, bias = lm_head_parameters(model)
    logits = nn.functional.linear(hidden_states.float(), weight.float(), None if bias is None else bias.float())
    return logit_transform(model)(logits)


def static_cache(model: PreTrainedModel, capacity: int) -> Cache:
    """A cache of `capacity` tokens in every layer, at addresses that never move: what torch.compile
    and CUDA graphs need. Layers are full ones; sliding windows are cut by the mask."""
    return Cache(layers=[StaticLayer(max_cache_len=capacity) for _ in cache_layer_shapes(model)])


def generate_plainly(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
    on_token: Callable[[], None],
    generation_config: GenerationConfig | None = None,
) -> Tensor:
    """transformers' own `generate`, for comparison: the most likely tokens and nothing else, or under a generation_config.

    input_ids [B, T], left-padded; on_token is called after every step.
    Returns prompt and answer [B, T + new tokens], ended rows filled with pad_id.
    """

    def after_step(ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        on_token()
        return torch.zeros(ids_BT.shape[0], dtype=torch.bool, device=ids_BT.device)

    settings = {"do_sample": False} if generation_config is None else generation_config.to_diff_dict()
    settings.pop("transformers_version", None)
    own = model.generation_config
    if generation_config is None:
        model.generation_config = GenerationConfig()  # penalties or beams of its own would come in
    try:
        return model.generate(  # type: ignore[operator,return-value]
            input_ids=input_ids,
            attention_mask=attention_mask,
            **settings | {"max_new_tokens": max_new_tokens, "eos_token_id": list(eos_ids) or None, "pad_token_id": pad_id},
            stopping_criteria=[after_step],
        )
    finally:
        model.generation_config = own


def additive_masks(model: PreTrainedModel, allowed_BTS: Tensor, query_positions_BT: Tensor, key_positions_BS: Tensor) -> AttentionMask:
    """Boolean attention -> the additive mask(s) the model's forward takes.

    allowed_BTS: True where query t may see key s, windows aside; positions are token positions in
    the text, from which sliding windows are cut (a key is visible while query - key < window).
    Additive in the model's dtype because eager attention silently adds a boolean mask as 0 / 1.
    """
    windows, per_type = sliding_windows(model)
    dtype = model.dtype

    def additive(window: int | None) -> Tensor:
        visible = allowed_BTS
        if window is not None:
            visible = visible & (query_positions_BT[:, :, None] - key_positions_BS[:, None, :] < window)
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    masks = {layer_type: additive(window) for layer_type, window in windows.items()}
    return masks if per_type else next(iter(masks.values()))


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: Any | None = None) -> tuple[int, ...]:
    """The token ids that end an answer, from the generation config, else the tokenizer."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


# Settings that are not a law of the next token given the text, and the values that switch them off.
UNSUPPORTED_GENERATION: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "token_healing": (None, False),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


def logits_processors(
    model: PreTrainedModel, generation_config: GenerationConfig, *, prompt_length: int, max_new_tokens: int, eos_ids: Sequence[int]
) -> tuple[LogitsProcessorList, bool]:
    """The processors that `generate` would run for one prompt under these settings, and whether it would sample.

    What `generation_config` leaves open comes from the model's own, then from transformers' defaults.
    Raises ValueError naming a setting that decoding over a tree cannot honour, or one that transformers refuses.
    """
    config, _ = model._prepare_generation_config(generation_config)  # type: ignore[operator]
    for name, neutral in UNSUPPORTED_GENERATION.items():
        if (value := getattr(config, name, None)) not in neutral:
            raise ValueError(
                f"generation_config.{name} = {value!r} cannot be honoured when several tokens are decoded at once; leave it out"
            )
    config.max_length = prompt_length + max_new_tokens
    config._eos_token_tensor = torch.tensor(list(eos_ids), device=model.device) if eos_ids else None
    try:
        processors = model._get_logits_processor(config, input_ids_seq_length=prompt_length, device=model.device)  # type: ignore[operator]
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"generation settings: {error}") from error
    return processors, bool(config.do_sample)


def synchronize(model: PreTrainedModel) -> None:
    """Waits until the model's device has finished what it was given; for timing."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers, in order: the longest module list of the decoder."""
    return max((list(m) for m in decoder(model).modules() if isinstance(m, nn.ModuleList)), key=len)


def weight_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Named weights of the base, tied ones once, and what unpacks packed ones; an adapter in it, which trains, is none of them."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    if quantization_of(model.config):
        known = {id(weight) for weight in weights.values()}
        weights |= {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) not in known}
    return {name: weight for name, weight in weights.items() if ".lora_" not in name}


def load_whole() -> None:
    """Keeps transformers from sharing out weights as it loads them, which it does where it knows of DeepSpeed's ZeRO-3."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def quiet_transformers() -> None:
    """Keeps transformers' progress bars and advice out of our own output."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("transformers", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
