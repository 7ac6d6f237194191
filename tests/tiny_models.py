"""Tiny random base models of several families and a small tokenizer, built in code: no files, no network."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCAB_SIZE = 300
END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
WINDOW = 8
SIZES: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
CONTEXT = 512
SPECIAL_IDS: dict[str, Any] = dict(bos_token_id=TURN_START, eos_token_id=TURN_END, pad_token_id=TURN_END)
# Far larger than trained models' 0.02, so that next tokens depend on the context and near-ties are rare.
SPREAD: dict[str, Any] = dict(initializer_range=0.3)
COMMON: dict[str, Any] = SIZES | SPECIAL_IDS | SPREAD | dict(max_position_embeddings=CONTEXT)
MIXED_LAYERS = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, COMMON),
    "qwen3": (Qwen3Config, COMMON | dict(head_dim=16)),
    "mistral_window": (MistralConfig, COMMON | dict(sliding_window=WINDOW)),
    "gemma2": (
        Gemma2Config,
        COMMON | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=MIXED_LAYERS, final_logit_softcapping=5.0),
    ),
    "gemma3": (Gemma3TextConfig, COMMON | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=MIXED_LAYERS)),
    "gpt2": (GPT2Config, SPECIAL_IDS | SPREAD | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
}
FAMILIES = tuple(CONFIGS)


@functools.cache
def _built(family: str, seed: int, vocab_size: int, attention: str | None) -> PreTrainedModel:
    kind, options = CONFIGS[family]
    config = kind(**copy.deepcopy(options), vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for name, weight in model.named_parameters():
        if "post_" in name and family.startswith("gemma"):  # tied embeddings would only repeat the last token
            weight.data.add_(4.0)
    return model.eval().requires_grad_(False)


def tiny_model(family: str, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, attention: str | None = None) -> PreTrainedModel:
    """A random float32 model of one of FAMILIES, frozen, in eval mode; the same seed gives the same weights.

    Hidden size 32, 2 layers, grouped-query attention; windows are 8 tokens; GPT-2 has 64 positions,
    the others 512. attention: `sdpa` or `eager`; None takes sdpa, and eager for Gemma 2, which has no other.
    Every call returns a model of its own.
    """
    return copy.deepcopy(_built(family, seed, vocab_size, attention))


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "BODY"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_BODY = "{{ message['content'] + '<|im_end|>' + '\n' }}"
MARKED_BODY = (
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}" + PLAIN_BODY + "{% endif %}"
)
TRAINING_TEXT = (
    "the cat sat on the mat and the dog ran to the other side of the house",
    "what is the answer to the question that they asked in the morning",
    "user assistant system: hello, how are you today? I am here to help.",
)


@functools.cache
def _tokenizer_core() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TRAINING_TEXT, trainer)
    return core.to_str()


def tiny_tokenizer(*, generation_block: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens with a ChatML template; ids 0, 1, 2 are special.

    generation_block: marks the assistant's spans with `{% generation %}` in the template.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_core()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE.replace("BODY", MARKED_BODY if generation_block else PLAIN_BODY)
    return tokenizer
