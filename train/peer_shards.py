"""Shards of a frozen base that every GPU of a host reads by itself: FSDP2's all-gather by copy engines.

NCCL gathers a layer by a kernel, on multiprocessors that it takes from the products of the layer before; copies take none, which was 6 % of
a step of a 7B-sized base on two H200 (LOG.md). A frozen base never changes, so nobody waits for anybody, and the others read each shard
where FSDP2 keeps it. (What it has to pad it keeps a second time: weights whose first dimension the processes do not divide.)
"""

# S elements of a unit's shard, padding included, W processes

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import DistError, ProcessGroup, ReduceOp, all_gather_into_tensor, all_reduce
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

T = TypeVar("T")
bytes_shared = 0  # by this process, outside of PyTorch's caching allocator


class Memory(Protocol):
    """What several processes can read."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def exchange(self, own_S: Tensor, group: ProcessGroup) -> list[Tensor]:
        """Every process's tensor [S], this one's own as it is. All of the group call it."""


class SymmetricMemory:
    """CUDA memory that is mapped into all processes of a host."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        from torch.distributed import _symmetric_memory

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # which copies do not use
        return _symmetric_memory.empty(numel, dtype=dtype, device=device)

    def exchange(self, own_S: Tensor, group: ProcessGroup) -> list[Tensor]:
        from torch.distributed import _symmetric_memory

        handle = _symmetric_memory.rendezvous(own_S, group.group_name)  # the mapping lives as long as own_S does
        ranks = range(group.size())
        return [own_S if rank == group.rank() else handle.get_buffer(rank, tuple(own_S.shape), own_S.dtype) for rank in ranks]


class PeerGather:
    """Gathers one unit, in place of FSDP2's own all-gather (`FSDPModule.set_custom_all_gather`)."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        """shards: of every process, [S], in the order in which FSDP2 lays out the unit's parameters."""
        self.shards: Sequence[Tensor] | None = shards
        self.is_checked = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """output_tensor: [W * S], in which this process's part, input_tensor, is already in place."""
        if not self.is_checked:
            self._check(output_tensor, input_tensor, group)
        if self.shards is None:
            return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        self._copy(output_tensor, group)
        return None

    def _copy(self, output_tensor: Tensor, group: ProcessGroup) -> None:
        assert self.shards is not None
        own, parts_WS = group.rank(), output_tensor.view(len(self.shards), -1)
        for step in range(1, len(self.shards)):  # each begins with its neighbour, so that no two read from one at once
            rank = (own + step) % len(self.shards)
            parts_WS[rank].copy_(self.shards[rank], non_blocking=True)

    def _check(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup) -> None:
        """Once, against a collective: where a copy is not what it gives, in any process, the unit is gathered by collectives. FSDP2's
        layout is its own affair, and another one than expected would be seen here."""
        expected = torch.empty_like(output_tensor)
        all_gather_into_tensor(expected, input_tensor, group=group)
        self._copy(output_tensor, group)
        equal = torch.tensor(int(torch.equal(output_tensor, expected)), device=output_tensor.device)
        all_reduce(equal, ReduceOp.MIN, group=group)
        if not equal.item():
            self.shards = None
            if group.rank() == 0:
                print("warning: copies between GPUs give other weights than NCCL, which gathers them then", file=sys.stderr)
        self.is_checked = True


def share_shards(accelerator: Accelerator, model: nn.Module, *, memory: Memory | None = None) -> None:
    """Lets FSDP2 gather the frozen units of a model, fresh from `prepare`, by copies where the GPUs of one host reach each other's memory;
    elsewhere all stays as it is. Every process calls it. memory: by default CUDA's symmetric memory."""
    global bytes_shared
    if not hasattr(FSDPModule, "set_custom_all_gather") or (memory is None and not _peers_are_reached(accelerator)):
        return
    memory = memory or SymmetricMemory()
    for unit in [unit for unit in model.modules() if isinstance(unit, FSDPModule)]:
        parameters = list(_own_parameters(unit))
        if not _can_share(parameters):
            continue
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()  # the memory to come is not the caching allocator's
        group, numel = parameters[0].device_mesh.get_group(), sum(_padded_numel(parameter) for parameter in parameters)
        own_S = _together(accelerator, partial(memory.allocate, numel, parameters[0].dtype, accelerator.device))
        shards = None if own_S is None else _together(accelerator, partial(memory.exchange, own_S, group))
        if own_S is None or shards is None or not _together(accelerator, partial(_move, parameters, own_S)):
            return
        unit.load_state_dict({}, strict=False)  # at which FSDP2 looks where its parameters lie, and lets go of the old places
        unit.set_custom_all_gather(PeerGather(shards))  # type: ignore[arg-type]  # AllGather, the protocol, is not exported
        bytes_shared += own_S.nbytes
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(accelerator.device)  # while they were moved shards counted there


def _together(accelerator: Accelerator, attempt: Callable[[], T]) -> T | None:
    """What it returns, or None where it failed in any process: all go the same way."""
    result, problem = None, None
    try:
        result = attempt()
    except DistError:  # a process is lost
        raise
    except (ImportError, AttributeError, RuntimeError) as error:  # a container that forbids it, no room, another torch
        problem = error
    if problem is not None:
        print(f"warning: NCCL gathers the base, its shards cannot be shared between GPUs ({problem})", file=sys.stderr)
    return result if _in_all(accelerator, problem is None) else None


def _in_all(accelerator: Accelerator, is_so: bool) -> bool:
    count = accelerator.reduce(torch.tensor(int(is_so), device=accelerator.device), reduction="sum")
    return bool(count == accelerator.num_processes)


def _peers_are_reached(accelerator: Accelerator) -> bool:
    """Several processes are all on this host, each with a GPU that the others reach."""
    device, num_here = accelerator.device, int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if device.type != "cuda" or num_here < 2 or num_here != accelerator.num_processes:
        return False
    peers = [index for index in range(torch.cuda.device_count()) if index != device.index]
    reached = len(peers) >= num_here - 1 and all(torch.cuda.can_device_access_peer(device.index, peer) for peer in peers)
    return _in_all(accelerator, reached)


def _can_share(parameters: Sequence[DTensor]) -> bool:
    """Frozen, of one type, and sharded over the processes of one group."""
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
    """Elements of a shard [rows, ..]: FSDP2 pads the first dimension to the same number of rows in every process."""
    rows, processes = parameter.shape[0], parameter.device_mesh.size()
    return -(-rows // processes) * prod(parameter.shape[1:])


@torch.no_grad()
def _move(parameters: Sequence[DTensor], own_S: Tensor) -> bool:
    """Puts this process's part of every parameter into the memory, one after the other; what FSDP2 pads is 0."""
    own_S.zero_()
    start = 0
    for parameter in parameters:
        local = parameter.to_local()
        place = own_S[start : start + local.numel()].view(local.shape)
        place.copy_(local)
        start += _padded_numel(parameter)
        mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
        moved = DTensor.from_local(place, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
        torch.utils.swap_tensors(parameter, nn.Parameter(moved, requires_grad=False))  # wherever the base, or FSDP2, holds it
    if own_S.is_cuda:
        torch.cuda.synchronize(own_S.device)  # before others read it
    return True
