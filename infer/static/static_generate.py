"""Prompts -> answers in bulk: a fixed number of slots, refilled as answers end.

Every slot holds one answer in progress and every step feeds one token in all of them. Finished slots
idle until enough are free for a batched prefill of new prompts. The host looks only once every few
steps, so the device never waits for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from infer.static.grouped_attention import grouped_attention
from infer.static.sampling import Sampling, uniform_numbers
from infer.static.static_step import STEPS_PER_LOOK, SlotDecoder
from medusa_heads import base_model

REFILL_SHARE = 8  # refill once 1/8 of the slots is free
PREFILL_TOKENS = 32768  # padded tokens of one prefill forward
MAX_SLOTS_GPU, MAX_SLOTS_CPU = 1024, 32


@dataclass(frozen=True, slots=True)
class Answer:
    """token_ids: new tokens, the end token included; finish_reason: `eos` or `length`."""

    key: Hashable
    token_ids: list[int]
    finish_reason: str


@dataclass(slots=True)
class Row:
    """One answer in progress, as the host knows it."""

    key: Hashable
    prompt_ids: list[int]
    limit: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, tokens: Sequence[int], eos_ids: frozenset[int]) -> int:
        """Takes tokens until the answer ends; returns how many."""
        for count, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            if token in eos_ids:
                self.finish_reason = "eos"
            elif len(self.token_ids) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count
        return len(tokens)


class StaticGenerator:
    """Answers prompts in a fixed number of slots; `add` prompts, then iterate over `run()`.

    The answer to a prompt depends on the prompt, its key and the seed alone, not on what shares the
    batch (up to rounding).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        batch_size: int,
        capacity: int,
        sampling: Sampling | None = None,
    ) -> None:
        """capacity: tokens of prompt and answer a slot has room for; the model's context caps it.

        Raises ValueError when a size is below 1.
        """
        for name, value in (("--max-new-tokens", max_new_tokens), ("--batch-size", batch_size), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.model, self.batch_size, self.max_new_tokens = model, batch_size, max_new_tokens
        self.sampling, self.eos_ids = sampling or Sampling(), frozenset(eos_ids)
        self.room = min(capacity, base_model.max_length(model))
        self.attention = ""  # the attention in use, once running
        self.num_tokens = 0  # new tokens so far
        self._queue: list[tuple[int, int, Row]] = []
        self._num_added = 0
        self._rows: list[Row | None] = []

    def add(self, key: Hashable, prompt_ids: Sequence[int]) -> None:
        """Queues a prompt; allowed while `run` is being iterated. `str(key)` seeds its random numbers.

        Raises ValueError when the prompt is empty or leaves no room for an answer.
        """
        limit = min(self.max_new_tokens, self.room - len(prompt_ids))
        if not prompt_ids or limit < 1:
            raise ValueError(f"prompt {key!r} has {len(prompt_ids)} tokens; 1 to {self.room - 1} leave room for an answer")
        # The longest first: what runs out of memory does so at once, and the last rows to run are short.
        heapq.heappush(self._queue, (-len(prompt_ids), self._num_added, Row(key, list(prompt_ids), limit)))
        self._num_added += 1

    @torch.inference_mode()
    def run(self) -> Iterator[Answer]:
        """Yields answers as they finish, until no prompt is left."""
        if not self._queue:
            return
        num_slots = min(self.batch_size, len(self._queue))
        self._rows = [None] * num_slots
        with grouped_attention(self.model, batch_size=num_slots, key_length=self.room) as self.attention:
            decoder = SlotDecoder(
                self.model,
                num_slots=num_slots,
                capacity=self.room,
                max_new_tokens=self.max_new_tokens,
                eos_ids=sorted(self.eos_ids),
                sampling=self.sampling,
            )
            while self._queue or any(self._rows):
                self._refill(decoder)
                yield from self._finished()
                if any(self._rows):
                    self._shrink(decoder)
                    self._advance(decoder)
                    yield from self._finished()

    def _finished(self) -> Iterator[Answer]:
        for slot, row in enumerate(self._rows):
            if row is not None and row.finish_reason is not None:
                self._rows[slot] = None
                yield Answer(row.key, row.token_ids, row.finish_reason)

    def _refill(self, decoder: SlotDecoder) -> None:
        """Prefills queued prompts into the free slots, once enough are free."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        if len(free) < max(1, len(self._rows) // REFILL_SHARE):
            return
        while free and self._queue:
            count = max(1, min(len(free), len(self._queue), PREFILL_TOKENS // -self._queue[0][0]))
            slots, free = free[:count], free[count:]
            rows = [heapq.heappop(self._queue)[2] for _ in slots]
            uniform_RN = torch.stack([uniform_numbers(self.sampling, row.key, self.max_new_tokens) for row in rows])
            first = decoder.prefill(slots, [row.prompt_ids for row in rows], limits=[row.limit for row in rows], uniform_RN=uniform_RN)
            for slot, row, token in zip(slots, rows, first, strict=True):
                self._rows[slot] = row
                self.num_tokens += row.take([token], self.eos_ids)

    def _shrink(self, decoder: SlotDecoder) -> None:
        """Drops idle slots once the queue is empty and half of them idle; a graph's shapes must stay."""
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        if not decoder.use_graphs and not self._queue and len(live) <= len(self._rows) // 2:
            decoder.shrink(live)
            self._rows = [self._rows[slot] for slot in live]

    def _advance(self, decoder: SlotDecoder) -> None:
        live = [row for row in self._rows if row is not None]
        num_steps = min(STEPS_PER_LOOK, max(row.limit - len(row.token_ids) for row in live))
        longest = max(len(row.prompt_ids) + len(row.token_ids) for row in live)
        for row, tokens in zip(self._rows, decoder.steps(num_steps, longest=longest), strict=True):
            if row is not None:
                self.num_tokens += row.take(tokens, self.eos_ids)


def generate_many(
    model: PreTrainedModel,
    rows: Iterable[tuple[Hashable, Sequence[int]]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    batch_size: int,
    sampling: Sampling | None = None,
) -> Iterator[Answer]:
    """Answers (key, prompt token ids) rows; answers come as they finish, in no order.

    Raises ValueError on a prompt that is empty or fills the model's context.
    """
    rows = list(rows)
    longest = max((len(ids) for _, ids in rows), default=1)
    generator = StaticGenerator(
        model, max_new_tokens=max_new_tokens, eos_ids=eos_ids, batch_size=batch_size, capacity=longest + max_new_tokens, sampling=sampling
    )
    for key, ids in rows:
        generator.add(key, ids)
    yield from generator.run()


def default_batch_size(model: PreTrainedModel, capacity: int) -> int:
    """How many slots of `capacity` tokens to use: 1024 where a GPU's free memory allows, 32 on a CPU."""
    if model.device.type != "cuda":
        return MAX_SLOTS_CPU
    torch.cuda.empty_cache()
    per_token = sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in base_model.cache_layer_shapes(model))
    logits = base_model.vocab_size(model) * 32  # bytes: logits, probabilities and their cumulative sum
    free, _ = torch.cuda.mem_get_info(model.device)
    fitting = int(0.7 * free / (capacity * per_token * model.dtype.itemsize + logits))
    return max(1, min(MAX_SLOTS_GPU, fitting))
