"""The base model's own greedy decoding made fast the standard way: static cache, compiled step.

Prefill is eager; the single-token step is one torch.compile graph over a cache of fixed length, on
CUDA replayed as a CUDA graph. One graph and one cache per batch size and cache length.
"""

# B batch, T new tokens, S cache length, D hidden

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from infer.bench_rows import BatchAnswer, cut_answer, plain_stats
from medusa_heads import base_model

SMALLEST_CACHE = 256
MAX_GRAPHS = 64  # more than cache lengths (powers of two) times batch sizes can ever be
NUM_WARM_UP_TOKENS = 5  # compiles at the first step; CUDA graphs are recorded at the second and third


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What one graph reads and writes in place, at fixed addresses."""

    cache: Cache
    slot_S: Tensor  # 0 .. S - 1
    slot: Tensor  # scalar: the cache slot the next token is written to
    pad_B: Tensor  # left padding of every row


class CompiledBase:
    """The bench row `base_compiled`."""

    name = "base_compiled"

    def __init__(self, model: PreTrainedModel, *, max_new_tokens: int, eos_ids: Sequence[int]) -> None:
        self.model, self.max_new_tokens, self.eos_ids = model, max_new_tokens, frozenset(eos_ids)
        self.mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        self.compiled_step = torch.compile(decode_step, dynamic=False, fullgraph=True, mode=self.mode)
        self.buffers: dict[tuple[int, int], _Buffers] = {}

    def warm_up(self, batches: Iterable[Sequence[Sequence[int]]]) -> None:
        """Compiles for every batch size and cache length that `batches` need. Raises RuntimeError
        when there is no working compiler."""
        for batch in batches:
            if (len(batch), self._capacity(batch)) not in self.buffers:
                self._decode(batch, NUM_WARM_UP_TOKENS)

    def answer(self, batch: Sequence[Sequence[int]]) -> BatchAnswer:
        return self._decode(batch, self.max_new_tokens)

    def _capacity(self, batch: Sequence[Sequence[int]]) -> int:
        capacity = SMALLEST_CACHE
        while capacity < max(map(len, batch)) + self.max_new_tokens:
            capacity *= 2
        return capacity

    @torch.no_grad()
    def _decode(self, batch: Sequence[Sequence[int]], max_new_tokens: int) -> BatchAnswer:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            base_model.synchronize(self.model)
            start = time.perf_counter()
            buffers, ids_BT = self._begin(batch)
            tokens_B1 = decode_step(self.model, ids_BT, buffers)
            columns = [tokens_B1[:, 0].tolist()]
            first_token_s = time.perf_counter() - start
            buffers.slot.add_(ids_BT.shape[1])
            ended = [token in self.eos_ids for token in columns[0]]
            while len(columns) < max_new_tokens and not all(ended):
                # A CUDA graph's output lives in memory that the next replay writes over.
                tokens_B1 = self.compiled_step(self.model, tokens_B1, buffers).clone()
                buffers.slot.add_(1)
                columns.append(tokens_B1[:, 0].tolist())
                ended = [done or token in self.eos_ids for done, token in zip(ended, columns[-1], strict=True)]
            total_s = time.perf_counter() - start
        answers = [cut_answer(row, self.eos_ids) for row in zip(*columns, strict=True)]
        return BatchAnswer(answers, [[1] * len(answer) for answer in answers], [plain_stats(a) for a in answers], first_token_s, total_s)

    def _begin(self, batch: Sequence[Sequence[int]]) -> tuple[_Buffers, Tensor]:
        """Empty buffers and the left-padded prompts [B, T]."""
        device, longest = self.model.device, max(map(len, batch))
        key = len(batch), self._capacity(batch)
        if key not in self.buffers:
            cache = base_model.static_cache(self.model, key[1])
            self.buffers[key] = _Buffers(
                cache,
                torch.arange(key[1], device=device),
                torch.zeros((), dtype=torch.long, device=device),
                torch.zeros_like(_pads(batch, device)),
            )
        buffers = self.buffers[key]
        buffers.cache.reset()
        buffers.slot.zero_()
        buffers.pad_B.copy_(_pads(batch, device))
        return buffers, torch.tensor([[0] * (longest - len(row)) + list(row) for row in batch], device=device)


def _pads(batch: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, batch))
    return torch.tensor([longest - len(row) for row in batch], device=device)


def decode_step(model: PreTrainedModel, tokens_BT: Tensor, buffers: _Buffers) -> Tensor:
    """One forward over T new tokens written to the cache from `buffers.slot` on. Returns the next tokens [B, 1].

    Positions and masks come from the slot and the left padding alone, so that no shape ever changes.
    """
    slot_S, pad_B = buffers.slot_S, buffers.pad_B
    slot_T = buffers.slot + torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    allowed_BTS = (slot_S <= slot_T[:, None])[None] & (slot_S >= pad_B[:, None])[:, None]
    position_BT = (slot_T[None] - pad_B[:, None]).clamp(min=0)
    mask = base_model.additive_masks(model, allowed_BTS, position_BT, slot_S[None] - pad_B[:, None])
    hidden_BTD = base_model.forward_hidden(model, tokens_BT, attention_mask=mask, position_ids=position_BT, cache=buffers.cache)
    return base_model.compute_logits(model, hidden_BTD[:, -1:]).argmax(-1)
