"""`--base` -> a loaded, frozen, checked model and its tokenizer."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from medusa_heads.base_model.parts import name_or_path
from medusa_heads.base_model.support import check_base, check_config
from medusa_heads.quantization import Quantization, loading_options, quantization_of, settle

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
