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
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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

# Further architectures, each for what the families above lack: a window from some layer on, rotation of a part of each head,
# parallel attention and MLP, experts (routed token by token), attention sinks, keys of another width than values.
NO_GROUPS = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2)
CONFIGS |= {
    "qwen2": (Qwen2Config, COMMON | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "phi3": (Phi3Config, COMMON | dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5))),
    "gpt_neox": (GPTNeoXConfig, NO_GROUPS),
    "mixtral": (MixtralConfig, COMMON | EXPERTS | dict(num_local_experts=4)),
    "qwen3_moe": (Qwen3MoeConfig, COMMON | EXPERTS | dict(head_dim=16, num_experts=8, moe_intermediate_size=16)),
    "gpt_oss": (
        GptOssConfig,
        COMMON
        | EXPERTS
        | dict(head_dim=8, num_local_experts=4, sliding_window=WINDOW, rope_parameters=dict(rope_type="default", rope_theta=10_000.0)),
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        NO_GROUPS
        | EXPERTS
        | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6)
        | dict(n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1),
    ),
}
ARCHITECTURES = tuple(name for name in CONFIGS if name not in FAMILIES)


@functools.cache
def _built(family: str, seed: int, vocab_size: int, attention: str | None, width: int) -> PreTrainedModel:
    kind, options = CONFIGS[family]
    if width != SIZES["hidden_size"]:
        sizes = dict(hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // 8, n_embd=width)
        options = options | {name: size for name, size in sizes.items() if name in options}
    config = kind(**copy.deepcopy(options), vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        if family in ARCHITECTURES:  # biases start as zeros, which would hide an error in them
            for weight in model.parameters():
                if not weight.any():
                    weight.data.normal_(std=0.3)
    for name, weight in model.named_parameters():
        if "post_" in name and family.startswith("gemma"):  # tied embeddings would only repeat the last token
            weight.data.add_(4.0)
    return model.eval().requires_grad_(False)


def tiny_model(
    family: str, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, attention: str | None = None, width: int = 32
) -> PreTrainedModel:
    """A random float32 model of one of FAMILIES or ARCHITECTURES, frozen, in eval mode; the same seed gives the same weights.

    Hidden size `width`, 2 layers, grouped-query attention; windows are 8 tokens; GPT-2 has 64 positions,
    the others 512. attention: `sdpa` or `eager`; None takes sdpa, and eager for models that have no other.
    Every call returns a model of its own.
    """
    return copy.deepcopy(_built(family, seed, vocab_size, attention, width))


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
