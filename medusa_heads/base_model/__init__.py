"""A transformers causal LM -> hidden states and logits: the only package that knows transformers' internals.

Everything else in this project passes a `PreTrainedModel` to the functions below and never touches
its attributes, so that a release of transformers that moves something is answered here alone.
"""

from medusa_heads.base_model.forward import (
    additive_masks,
    cache_layer_shapes,
    compute_logits,
    float32_logits,
    forward_hidden,
    logit_scale_and_cap,
    logit_transform,
    static_cache,
    synchronize,
)
from medusa_heads.base_model.generation import end_of_sequence_ids, generate_plainly, logits_processors
from medusa_heads.base_model.loading import (
    base_path,
    check_exists,
    load_base,
    load_tokenizer,
    load_whole,
    parse_dtype,
    quiet_transformers,
    stored_weights,
)
from medusa_heads.base_model.parts import (
    LayerShape,
    decoder,
    decoder_layers,
    hidden_size,
    lm_head,
    lm_head_parameters,
    max_length,
    name_or_path,
    sliding_windows,
    text_config,
    vocab_size,
    weight_tensors,
)
from medusa_heads.base_model.support import TREE_ATTENTION, check_base, check_config

__all__ = [
    "TREE_ATTENTION",
    "LayerShape",
    "additive_masks",
    "base_path",
    "cache_layer_shapes",
    "check_base",
    "check_config",
    "check_exists",
    "compute_logits",
    "decoder",
    "decoder_layers",
    "end_of_sequence_ids",
    "float32_logits",
    "forward_hidden",
    "generate_plainly",
    "hidden_size",
    "lm_head",
    "lm_head_parameters",
    "load_base",
    "load_tokenizer",
    "load_whole",
    "logit_scale_and_cap",
    "logit_transform",
    "logits_processors",
    "max_length",
    "name_or_path",
    "parse_dtype",
    "quiet_transformers",
    "sliding_windows",
    "static_cache",
    "stored_weights",
    "synchronize",
    "text_config",
    "vocab_size",
    "weight_tensors",
]
