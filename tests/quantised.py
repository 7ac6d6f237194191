"""Tiny bases in 8 or 4 bits, where bitsandbytes is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.tiny_models import tiny_model, tiny_tokenizer

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
QUANTIZATIONS = ("8bit", "4bit")


def save_tiny_base(folder: Path, family: str = "llama", *, width: int = 64) -> str:
    """width: a multiple of 64 unless rows of another length are what is tested; bitsandbytes may refuse those."""
    tiny_model(family, width=width).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def save_quantised(base: str, folder: Path, quantization: str, **options: Any) -> str:
    """The base in `base` as transformers itself quantises and saves it."""
    settings: dict[str, Any] = {"load_in_8bit": True}
    if quantization == "4bit":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(**settings, **options)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map={"": "cpu"}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
