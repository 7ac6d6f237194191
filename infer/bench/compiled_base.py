"""The base model's own decoding made fast the standard way: static cache, compiled step.

Prefill is eager; the single-token step is one torch.compile graph over a cache of fixed length, on
CUDA replayed as a CUDA graph. One graph and one cache per batch size and cache length. The graph ends
at the logits; what chooses from them is what chooses in our own loop.
"""

# B batch, T new tokens, S cache length, D hidden, V vocabulary

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from infer.bench.rows import Batch, BatchAnswer, Decoding, cut_answer, plain_stats
from infer.drafters import NoDrafter
from infer.target import GreedyTarget, ProcessedTarget, Target
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
    is_exact = True

    def __init__(self, model: PreTrainedModel, decoding: Decoding) -> None:
        self.model, self.decoding = model, decoding
        self.mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        self.compiled_step = torch.compile(decode_step, dynamic=False, fullgraph=True, mode=self.mode)
        self.buffers: dict[tuple[int, int], _Buffers] = {}

    def warm_up(self, batches: Iterable[Batch]) -> None:
        """Compiles for every batch size and cache length that `batches` need. Raises RuntimeError
        when there is no working compiler."""
        for batch in batches:
            if (len(batch.prompts), self._capacity(batch.prompts)) not in self.buffers:
                self._decode(batch, NUM_WARM_UP_TOKENS)

    def answer(self, batch: Batch) -> BatchAnswer:
        return self._decode(batch, self.decoding.max_new_tokens)

    def _capacity(self, prompts: Sequence[Sequence[int]]) -> int:
        capacity = SMALLEST_CACHE
        while capacity < max(map(len, prompts)) + self.decoding.max_new_tokens:
            capacity *= 2
        return capacity

    @torch.no_grad()
    def _decode(self, batch: Batch, max_new_tokens: int) -> BatchAnswer:
        eos_ids = frozenset(self.decoding.eos_ids)
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            base_model.synchronize(self.model)
            start = time.perf_counter()
            target = self._target(batch)
            texts = [list(prompt) for prompt in batch.prompts]
            buffers, ids_BT = self._begin(batch.prompts)
            tokens_B = target.first(decode_step(self.model, ids_BT, buffers), texts)
            columns = [extend(texts, tokens_B)]
            first_token_s = time.perf_counter() - start
            buffers.slot.add_(ids_BT.shape[1])
            ended = [token in eos_ids for token in columns[0]]
            while len(columns) < max_new_tokens and not all(ended):
                # A CUDA graph's output lives in memory that the next replay writes over: the choice comes before it.
                running = [not done for done in ended]
                tokens_B = target.first(self.compiled_step(self.model, tokens_B[:, None], buffers), texts, running)
                buffers.slot.add_(1)
                columns.append(extend(texts, tokens_B))
                ended = [done or token in eos_ids for done, token in zip(ended, columns[-1], strict=True)]
            total_s = time.perf_counter() - start
        answers = [cut_answer(row, eos_ids) for row in zip(*columns, strict=True)]
        return BatchAnswer(answers, [[1] * len(answer) for answer in answers], [plain_stats(a) for a in answers], first_token_s, total_s)

    def _target(self, batch: Batch) -> Target:
        """The choices, and the draws, of plain decoding in our own loop."""
        if self.decoding.generation_config is None:
            return GreedyTarget()
        return ProcessedTarget(
            self.model,
            self.decoding.generation_config,
            batch.prompts,
            max_new_tokens=[self.decoding.max_new_tokens] * len(batch.prompts),
            eos_ids=self.decoding.eos_ids,
            seed=batch.seed,
            drafter=NoDrafter(),
        )

    def _begin(self, prompts: Sequence[Sequence[int]]) -> tuple[_Buffers, Tensor]:
        """Empty buffers and the left-padded prompts [B, T]."""
        device, longest = self.model.device, max(map(len, prompts))
        key = len(prompts), self._capacity(prompts)
        if key not in self.buffers:
            cache = base_model.static_cache(self.model, key[1])
            self.buffers[key] = _Buffers(
                cache,
                torch.arange(key[1], device=device),
                torch.zeros((), dtype=torch.long, device=device),
                torch.zeros_like(_pads(prompts, device)),
            )
        buffers = self.buffers[key]
        buffers.cache.reset()
        buffers.slot.zero_()
        buffers.pad_B.copy_(_pads(prompts, device))
        return buffers, torch.tensor([[0] * (longest - len(row)) + list(row) for row in prompts], device=device)


def _pads(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    return torch.tensor([longest - len(row) for row in prompts], device=device)


def extend(texts: list[list[int]], tokens_B: Tensor) -> list[int]:
    """The new tokens, each put behind its text."""
    tokens = [int(token) for token in tokens_B.tolist()]
    for text, token in zip(texts, tokens, strict=True):
        text.append(token)
    return tokens


def decode_step(model: PreTrainedModel, tokens_BT: Tensor, buffers: _Buffers) -> Tensor:
    """One forward over T new tokens written to the cache from `buffers.slot` on. Returns logits [B, V] after the last.

    Positions and masks come from the slot and the left padding alone, so that no shape ever changes.
    """
    slot_S, pad_B = buffers.slot_S, buffers.pad_B
    slot_T = buffers.slot + torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    allowed_BTS = (slot_S <= slot_T[:, None])[None] & (slot_S >= pad_B[:, None])[:, None]
    position_BT = (slot_T[None] - pad_B[:, None]).clamp(min=0)
    mask = base_model.additive_masks(model, allowed_BTS, position_BT, slot_S[None] - pad_B[:, None])
    hidden_BTD = base_model.forward_hidden(model, tokens_BT, attention_mask=mask, position_ids=position_BT, cache=buffers.cache)
    return base_model.compute_logits(model, hidden_BTD[:, -1])
