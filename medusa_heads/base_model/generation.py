"""How an answer ends, how its tokens are drawn, and transformers' own `generate` to compare with."""

# B batch, T sequence

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel


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
