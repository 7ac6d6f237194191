"""Slots of prompts and answers in progress -> the next tokens of all of them: one step, fixed shapes, one CUDA graph per key length."""

# B slots, R refilled slots, T prompt length, S key columns, V vocabulary, W steps between two looks, N new tokens, E end tokens

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.static.sampling import Sampling, choose_tokens
from infer.static.slot_cache import SlotCache
from medusa_heads import base_model

BUCKET = 128  # key columns: a graph is captured for every multiple that occurs
STEPS_PER_LOOK = 16


@dataclass(slots=True)
class SlotState:
    """What a step reads and writes on the device, at fixed addresses."""

    tokens_B: Tensor  # the newest token of every slot, not yet in the cache
    lengths_B: Tensor  # tokens in the cache: where the newest one will be written
    produced_B: Tensor  # new tokens so far
    limits_B: Tensor  # new tokens allowed
    running_B: Tensor
    window_BW: Tensor  # tokens since the host last looked
    step_1: Tensor  # the next column of window_BW
    uniform_BN: Tensor  # the random number behind every new token (no columns when greedy)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__slots__]


class SlotDecoder:
    """The device side of bulk generation: prefills slots and advances all of them together."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, capacity: int, max_new_tokens: int, eos_ids: Sequence[int], sampling: Sampling
    ) -> None:
        """capacity: tokens of prompt and answer a slot holds; rounded up to whole buckets."""
        self.model, self.sampling, device = model, sampling, model.device
        self.use_graphs = device.type == "cuda"
        integers = lambda *size: torch.zeros(*size, dtype=torch.long, device=device)  # noqa: E731
        self.state = SlotState(
            tokens_B=integers(num_slots),
            lengths_B=integers(num_slots),
            produced_B=integers(num_slots),
            limits_B=integers(num_slots),
            running_B=integers(num_slots).bool(),
            window_BW=integers(num_slots, STEPS_PER_LOOK),
            step_1=integers(1),
            uniform_BN=integers(num_slots, max_new_tokens if sampling.temperature else 0).float(),
        )
        self.capacity = -(-capacity // BUCKET) * BUCKET
        self._cache = SlotCache(base_model.cache_layer_shapes(model), self.state.lengths_B, self.capacity, dtype=model.dtype)
        self._columns_S = torch.arange(self.capacity, device=device)
        self._eos_E = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
        self._has_windows = any(window is not None for window in base_model.sliding_windows(model)[0].values())
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.use_graphs else None

    # ------------------------------------------------------------ prefill

    def prefill(self, slots: Sequence[int], prompts: Sequence[list[int]], *, limits: Sequence[int], uniform_RN: Tensor) -> list[int]:
        """Puts prompts into slots. Returns the first new token of each."""
        device, state = self.model.device, self.state
        longest = max(map(len, prompts))
        input_ids_RT = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        lengths_R = torch.tensor([len(prompt) for prompt in prompts], device=device)
        slots_R, uniform_RN = torch.tensor(slots, device=device), uniform_RN.to(device)
        self._cache.slots_R = slots_R
        try:
            hidden_RD = self._prefill_hidden(input_ids_RT, lengths_R)
        finally:
            self._cache.slots_R = None
        logits_RV = base_model.compute_logits(self.model, hidden_RD)
        first_R = choose_tokens(logits_RV, self.sampling, uniform_RN[:, 0] if uniform_RN.shape[1] else None)
        limits_R = torch.tensor(limits, device=device)
        state.tokens_B[slots_R], state.lengths_B[slots_R], state.produced_B[slots_R] = first_R, lengths_R, torch.ones_like(first_R)
        state.limits_B[slots_R], state.uniform_BN[slots_R] = limits_R, uniform_RN
        state.running_B[slots_R] = ~self._is_end(first_R) & (limits_R > 1)
        return first_R.tolist()

    def _prefill_hidden(self, input_ids_RT: Tensor, lengths_R: Tensor) -> Tensor:
        """The hidden state of the last prompt token, [R, D]. Prompts are padded on the right, where causal
        attention never looks."""
        num_rows, length = input_ids_RT.shape
        positions_RT = torch.arange(length, device=input_ids_RT.device).expand(num_rows, length)
        masks = None
        if self._has_windows or self.model.config._attn_implementation == "eager":
            causal_RTT = (positions_RT[:, :, None] >= positions_RT[:, None, :]).contiguous()
            masks = base_model.additive_masks(self.model, causal_RTT, positions_RT, positions_RT)
        with _without_cudnn(self.model.device):
            hidden_RTD = base_model.forward_hidden(
                self.model, input_ids_RT, attention_mask=masks, position_ids=positions_RT, cache=self._cache
            )
        return hidden_RTD[torch.arange(num_rows, device=lengths_R.device), lengths_R - 1]

    # ------------------------------------------------------------ steps

    def steps(self, num_steps: int, *, longest: int) -> list[list[int]]:
        """At most W steps; `longest`: tokens in the fullest running slot. Returns the new tokens of every
        slot, of which those behind an end token or the limit mean nothing."""
        key_length = min(-(-(longest + num_steps) // BUCKET) * BUCKET, self.capacity)
        self.state.step_1.zero_()
        for _ in range(num_steps):
            self._replay(key_length)
        return self.state.window_BW[:, :num_steps].tolist()

    def shrink(self, slots: Sequence[int]) -> None:
        """Keeps only these slots, in this order: eager steps cost what their rows cost."""
        assert not self.use_graphs
        slots_R = torch.tensor(slots, device=self.model.device)
        for name in self.state.__slots__:
            if name != "step_1":
                setattr(self.state, name, getattr(self.state, name)[slots_R])
        self._cache.select(slots_R, self.state.lengths_B)

    def _step(self, key_length: int) -> None:
        """Feeds the newest token of every slot and chooses the next. No shape, address or branch here
        depends on data."""
        state, cache = self.state, self._cache
        cache.key_length = key_length
        positions_B1 = state.lengths_B[:, None]
        columns_BS = self._columns_S[:key_length].expand(len(positions_B1), key_length)
        seen_B1 = torch.where(state.running_B, state.lengths_B, 0)[:, None]  # an idle slot need not read its keys
        masks = base_model.additive_masks(self.model, (columns_BS <= seen_B1)[:, None], seen_B1, columns_BS)
        with _without_cudnn(self.model.device):
            hidden_B1D = base_model.forward_hidden(
                self.model, state.tokens_B[:, None], attention_mask=masks, position_ids=positions_B1, cache=cache
            )
        uniform_B = None
        if state.uniform_BN.shape[1]:
            index_B1 = state.produced_B.clamp(max=state.uniform_BN.shape[1] - 1)[:, None]
            uniform_B = state.uniform_BN.gather(1, index_B1)[:, 0]
        next_B = choose_tokens(base_model.compute_logits(self.model, hidden_B1D[:, -1]), self.sampling, uniform_B)
        state.window_BW.index_copy_(1, state.step_1, next_B[:, None])
        state.step_1.add_(1)
        state.tokens_B.copy_(torch.where(state.running_B, next_B, state.tokens_B))
        state.lengths_B.add_(state.running_B)
        state.produced_B.add_(state.running_B)
        state.running_B.logical_and_(~self._is_end(next_B) & (state.produced_B < state.limits_B))

    def _is_end(self, tokens_B: Tensor) -> Tensor:
        return (tokens_B[:, None] == self._eos_E).any(1)

    # ------------------------------------------------------------ CUDA graphs

    def _replay(self, key_length: int) -> None:
        if self.use_graphs and key_length not in self._graphs:
            try:
                self._graphs[key_length] = self._capture(key_length)
            except RuntimeError as error:
                warnings.warn(f"CUDA graphs are off, decoding will be slow: {error}", stacklevel=2)
                self.use_graphs = False
        if self.use_graphs:
            self._graphs[key_length].replay()
        else:
            self._step(key_length)

    def _capture(self, key_length: int) -> torch.cuda.CUDAGraph:
        """Captures one step. The state is put back, so that a capture changes no result; what its trial
        steps leave in the cache lies where the next real steps write."""
        saved = [tensor.clone() for tensor in self.state.tensors()]

        def restore() -> None:
            for tensor, copy in zip(self.state.tensors(), saved, strict=True):
                tensor.copy_(copy)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(key_length)
                restore()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(key_length)
        finally:
            restore()
        return graph


def _without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN's attention plans anew for every shape and is slow with masks; the other kernels take all cases here."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
