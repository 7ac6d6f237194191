"""Shards of a frozen base that every GPU of a host reads by itself: FSDP2's all-gather by copy engines.

NCCL gathers a layer by a kernel, on multiprocessors that it takes from the products of the layer before; copies take none, which was 6 % of
a step of a 7B-sized base on two H200 (LOG.md). A frozen base never changes, so nobody waits for anybody, and each shard lies where the
others read it: no second copy is held.
"""

# P a unit's parameters, S elements of its shard on one rank, W ranks

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_gather_into_tensor, all_reduce, barrier
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Share = Callable[[int, torch.dtype, torch.device, ProcessGroup], list[Tensor]]
"""(S, dtype, device, group) -> of every rank a tensor [S] that all ranks read; only one's own is written to."""

bytes_shared = 0  # by this process, outside of PyTorch's caching allocator


class PeerGather:
    """Gathers one unit, in place of FSDP2's own all-gather (`FSDPModule.set_custom_all_gather`)."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        """shards: of every rank, [S], in the order in which FSDP2 lays out the unit's parameters."""
        self.shards: Sequence[Tensor] | None = shards
        self.is_checked = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """output_tensor: [W * S], in which this rank's part, input_tensor, is already in place."""
        if not self.is_checked:
            self._check(input_tensor, group)
        if self.shards is None:
            return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        own, parts_WS = group.rank(), output_tensor.view(len(self.shards), -1)
        for step in range(1, len(self.shards)):  # each begins with its neighbour, so that no two read from one at once
            rank = (own + step) % len(self.shards)
            parts_WS[rank].copy_(self.shards[rank], non_blocking=True)
        return None

    def _check(self, input_tensor: Tensor, group: ProcessGroup) -> None:
        """The layout is FSDP2's own affair: where it is another than expected, on any rank, the unit is gathered as FSDP2 does it."""
        assert self.shards is not None
        own = self.shards[group.rank()]
        equal = torch.tensor(own.dtype == input_tensor.dtype and torch.equal(own, input_tensor), dtype=torch.int, device=own.device)
        all_reduce(equal, ReduceOp.MIN, group=group)
        if not equal.item():
            self.shards = None
        self.is_checked = True


def share_shards(accelerator: Accelerator, model: nn.Module, *, share: Share | None = None) -> None:
    """Lets FSDP2 gather the frozen units of a model, fresh from `prepare`, by copies where the GPUs of one host reach each other's memory;
    elsewhere all stays as it is. Every process calls it. share: how memory is shared, by default CUDA's symmetric memory."""
    global bytes_shared
    if share is None:
        if not _peers_are_reached(accelerator):
            return
        share = symmetric_memory
    for unit in [unit for unit in model.modules() if isinstance(unit, FSDPModule)]:
        parameters = list(_own_parameters(unit))
        if not _can_share(parameters):
            continue
        group = parameters[0].device_mesh.get_group()
        try:
            shards = share(sum(_padded_numel(p) for p in parameters), parameters[0].dtype, accelerator.device, group)
            own = shards[group.rank()]
            _move(parameters, own)
        except (ImportError, AttributeError, RuntimeError) as error:  # on all ranks alike: a container that forbids it, another torch
            accelerator.print(f"warning: the base is gathered by NCCL, its shards cannot be shared between GPUs ({error})", file=sys.stderr)
            return
        unit.load_state_dict({}, strict=False)  # at which FSDP2 looks where its parameters lie, and lets go of the old places
        bytes_shared += own.nbytes
        if own.is_cuda:
            torch.cuda.synchronize(own.device)
            torch.cuda.empty_cache()
        barrier(group)
        unit.set_custom_all_gather(PeerGather(shards))  # type: ignore[arg-type]  # AllGather, the protocol, is not exported


def symmetric_memory(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> list[Tensor]:
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(numel, dtype=dtype, device=device)
    handle = _symmetric_memory.rendezvous(own, group.group_name)
    others = [handle.get_buffer(rank, (numel,), dtype) for rank in range(group.size())]
    return [own if rank == group.rank() else other for rank, other in enumerate(others)]


def _peers_are_reached(accelerator: Accelerator) -> bool:
    """Several processes are all on this host, each with a GPU that the others reach."""
    device, num_here = accelerator.device, int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if device.type != "cuda" or num_here < 2 or num_here != accelerator.num_processes:
        return False
    peers = [index for index in range(torch.cuda.device_count()) if index != device.index]
    reached = len(peers) >= num_here - 1 and all(torch.cuda.can_device_access_peer(device.index, peer) for peer in peers)
    return bool(accelerator.reduce(torch.tensor(int(reached), device=device), reduction="sum") == num_here)


def _can_share(parameters: Sequence[DTensor]) -> bool:
    """Frozen, of one type, and sharded over all ranks of one group."""
    of_one_kind = len({(parameter.dtype, parameter.device_mesh) for parameter in parameters}) == 1
    return of_one_kind and parameters[0].device_mesh.ndim == 1 and not any(parameter.requires_grad for parameter in parameters)


def _own_parameters(unit: nn.Module) -> Iterator[DTensor]:
    """What a unit shards that no unit within it does, each once, in FSDP2's order: of a module after its children's."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[DTensor]:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen and not isinstance(child, FSDPModule):
                yield from walk(child)
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    return walk(unit)


def _padded_numel(parameter: DTensor) -> int:
    """Elements of a shard [rows, ..]: FSDP2 pads the first dimension to the same number of rows on every rank."""
    rows, ranks = parameter.shape[0], parameter.device_mesh.size()
    return -(-rows // ranks) * prod(parameter.shape[1:])


@torch.no_grad()
def _move(parameters: Sequence[DTensor], memory_S: Tensor) -> None:
    """Puts this rank's part of every parameter into the memory, one after the other; what FSDP2 pads is 0."""
    memory_S.zero_()
    start = 0
    for parameter in parameters:
        local = parameter.to_local()
        place = memory_S[start : start + local.numel()].view(local.shape)
        place.copy_(local)
        start += _padded_numel(parameter)
        layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
        moved = DTensor.from_local(place, parameter.device_mesh, parameter.placements, run_check=False, **layout)
        torch.utils.swap_tensors(parameter, nn.Parameter(moved, requires_grad=False))  # wherever the base, or FSDP2, holds it
