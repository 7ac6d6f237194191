"""Sizes of a base, of heads and of a batch -> bytes and floating-point operations of a training step: counted, nothing run."""

# B rows, T sequence, M = B * T tokens, R supervised positions, N (position, slot) pairs, K heads, L blocks per head, D hidden, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from train.losses import CHUNK_BYTES

MASTER_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8  # of one weight of the heads: float32, two moments
STRATEGIES = ("ddp", "fsdp2")
LAYERS_AT_ONCE = 2  # a sharded base: the layer that runs and the one that is gathered ahead


@dataclass(frozen=True, slots=True)
class BaseSize:
    """What a base costs. bytes: all weights as stored; layer_bytes: the largest layer; outside_bytes: what lies in no layer
    (embedding, final norm, lm_head); matmul_weights: entries of the layers' matrices; intermediate_size: width of the MLP;
    attention_width: query heads times their size; value_size: bytes of one number."""

    num_weights: int
    bytes: int
    layer_bytes: int
    outside_bytes: int
    matmul_weights: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_width: int
    vocab_size: int
    value_size: int


def count_base(model: PreTrainedModel) -> BaseSize:
    """Counts a model, which may lie on the meta device."""
    layers = base_model.decoder_layers(model)
    layer_bytes = [sum(weight.nbytes for weight in layer.parameters()) for layer in layers]
    weights = base_model.weight_tensors(model).values()
    config, hidden_size = base_model.text_config(model), base_model.hidden_size(model)
    num_query_heads = config.num_attention_heads
    return BaseSize(
        num_weights=sum(weight.numel() for weight in weights),
        bytes=sum(weight.nbytes for weight in weights),
        layer_bytes=max(layer_bytes),
        outside_bytes=sum(weight.nbytes for weight in weights) - sum(layer_bytes),
        matmul_weights=sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.dim() == 2),
        num_layers=len(layers),
        hidden_size=hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
        attention_width=num_query_heads * int(getattr(config, "head_dim", None) or hidden_size // num_query_heads),
        vocab_size=base_model.vocab_size(model),
        value_size=model.dtype.itemsize,
    )


@dataclass(frozen=True, slots=True)
class BatchSize:
    """One micro-batch: B rows of T tokens, R supervised positions, N pairs."""

    num_rows: int
    length: int
    num_positions: int
    num_pairs: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.length


@dataclass(frozen=True, slots=True)
class HeadsSize:
    """K heads of L blocks; draft_vocab_size: rows of the LM head that are trained over; has_teacher: the objective needs the base's law."""

    num_weights: int
    num_heads: int
    num_layers: int
    draft_vocab_size: int
    own_lm_head: bool
    has_teacher: bool


def count_heads(config: HeadsConfig, base: BaseSize, *, draft_vocab_size: int | None, has_teacher: bool) -> HeadsSize:
    width = base.hidden_size
    num_weights = config.num_heads * config.num_layers * width * (width + 1)
    if config.own_lm_head:
        num_weights += config.num_heads * base.vocab_size * width
    vocabulary = base.vocab_size if draft_vocab_size is None or config.own_lm_head else min(draft_vocab_size, base.vocab_size)
    return HeadsSize(num_weights, config.num_heads, config.num_layers, vocabulary, config.own_lm_head, has_teacher)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device. gathered: whole copies of sharded or exchanged weights; activations: the most that is alive in a step;
    states: hidden states held from before the first step on."""

    base: int
    heads: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    states: int = 0

    @property
    def total(self) -> int:
        return self.base + self.heads + self.gradients + self.optimizer + self.gathered + self.activations + self.states


def memory(base: BaseSize, heads: HeadsSize, *, activations: int, num_processes: int, strategy: str) -> Memory:
    """Per rank, for one of STRATEGIES, but for held states. One process is the same under all of them."""
    n, shards = heads.num_weights, num_processes
    weights, gradients, optimizer = MASTER_BYTES * n, GRADIENT_BYTES * n, ADAM_BYTES * n
    if shards == 1:
        return Memory(base.bytes, weights, gradients, optimizer, 0, activations)
    if strategy == "ddp":
        return Memory(base.bytes, weights, gradients, optimizer, gradients, activations)  # buckets of gradients on their way
    assert strategy == "fsdp2", strategy  # train/sharding.py leaves whole what trains
    layers = base.outside_bytes + LAYERS_AT_ONCE * base.layer_bytes
    return Memory(base.bytes // shards, weights, gradients, optimizer, layers, activations)


def forward_bytes(base: BaseSize, batch: BatchSize) -> int:
    """The most that the base's forward keeps alive."""
    size, width = base.value_size, base.hidden_size
    mask = batch.num_rows * batch.length * batch.length * (size + 1)
    per_token = max(3 * base.intermediate_size + 2 * width, 4 * base.attention_width + 2 * width)
    return mask + batch.num_tokens * per_token * size


def activation_bytes(base: BaseSize, heads: HeadsSize, batch: BatchSize, *, device_type: str, stored_states: bool = False) -> int:
    """The most that a step keeps alive besides weights: in the base's forward, in the loss, or in the backward pass.

    stored_states: of a step from hidden states made earlier, in which no forward of the base is.
    """
    size, width = base.value_size, base.hidden_size
    hidden = (batch.num_positions if stored_states else batch.num_tokens) * width * size
    states = batch.num_positions * heads.num_heads * width * size  # one [R, K, D]
    saved = hidden + batch.num_positions * width * size + 2 * heads.num_layers * states  # the sum and its argument of SiLU, per block
    if heads.draft_vocab_size < base.vocab_size:
        saved += heads.draft_vocab_size * width * size  # its rows of the LM head
    if size < MASTER_BYTES:
        saved += size * heads.num_weights  # autocast's copies
    if heads.own_lm_head:
        saved += (MASTER_BYTES + size) * heads.draft_vocab_size * width  # of one head: a product on its way into the gradient, a copy
    loss = 2 * batch.num_pairs * width * size + chunk_bytes(heads, batch.num_pairs, size, device_type)
    return max(0 if stored_states else forward_bytes(base, batch), saved + max(loss, 4 * states))


def chunk_bytes(heads: HeadsSize, num_pairs: int, value_size: int, device_type: str) -> int:
    """What one chunk of logits takes: the logits, their gradient, the teacher's logits; on a CPU, where nothing is fused,
    float32 arrays of the same shape besides (without a teacher, and in float32, the gradient is all); and the gradient of the chunk before.
    """
    if heads.own_lm_head:
        num_pairs = -(-num_pairs // heads.num_heads)  # slot by slot
    room = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"])
    rows = min(num_pairs, max(16, room // (4 * heads.draft_vocab_size * (2 if heads.has_teacher else 1))))
    copies = (3 if heads.has_teacher else 2) * value_size
    if device_type != "cuda":
        alone = 2 * (value_size + MASTER_BYTES) if value_size < MASTER_BYTES else value_size + MASTER_BYTES
        copies = 2 * value_size + 6 * MASTER_BYTES + 3 if heads.has_teacher else alone
    if rows < num_pairs:
        copies += value_size
    return rows * heads.draft_vocab_size * copies


def step_flops(base: BaseSize, heads: HeadsSize, batch: BatchSize) -> tuple[int, int]:
    """Floating-point operations of matrix products in a micro-batch: (the base's forward, heads and LM head both ways)."""
    width = base.hidden_size
    attention = 4 * batch.num_tokens * batch.length * base.attention_width * base.num_layers  # a mask, so every pair of tokens
    forward = 2 * batch.num_tokens * base.matmul_weights + attention
    blocks = 2 * heads.num_heads * batch.num_positions * width * width * (3 * heads.num_layers - 1)  # nothing flows on into the base
    logits = 2 * batch.num_pairs * width * heads.draft_vocab_size
    passes = 4 if heads.own_lm_head else 2
    if heads.has_teacher:
        passes += 2 if heads.own_lm_head else 1
    return forward, blocks + passes * logits


def disk_bytes(heads: HeadsSize, *, keep_checkpoints: int) -> int:
    """Checkpoints (also the best one, and one more while it replaces the oldest) and the finished heads."""
    checkpoint = (MASTER_BYTES + ADAM_BYTES) * heads.num_weights
    return (keep_checkpoints + 2) * checkpoint + MASTER_BYTES * heads.num_weights
