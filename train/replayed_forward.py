"""A forward without gradients as one CUDA graph.

Kernel by kernel the forward of a small base is over a thousand launches, for which a host can need as long as a GPU for the kernels
(LOG.md). A graph launches them all at once, and they are the same kernels.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Forward = Callable[..., Tensor]
SEEN_BEFORE = 2  # times that shapes have come before they are captured
MOST_GRAPHS = 4
MOST_OF_SPARE_MEMORY = 0.1  # may be kept by a graph
bytes_kept = 0  # by the graphs that this process has made: the memory of their forwards, which nothing else can use


@dataclass(frozen=True, slots=True)
class Graph:
    """replay: makes `result` anew from what `inputs` then hold."""

    inputs: list[Tensor]
    result: Tensor
    replay: Callable[[], None]


class ReplayedForward:
    """One forward, replayed for shapes of its inputs that come again and again; where it cannot be captured it runs as it is."""

    def __init__(self) -> None:
        self.times_seen: Counter[tuple[torch.Size, ...]] = Counter()
        self.graphs: dict[tuple[torch.Size, ...], Graph] = {}
        self.can_capture = True

    def __call__(self, forward: Forward, *inputs: Tensor) -> Tensor:
        """The result, which the next call with inputs of these shapes overwrites. forward: the same at every call, of tensors on one
        device; what it does must depend on their shapes alone."""
        shapes = tuple(tensor.shape for tensor in inputs)
        self.times_seen[shapes] += 1
        if shapes not in self.graphs and self.can_capture and self._is_frequent(shapes):
            try:
                self.graphs[shapes] = capture_graph(forward, [tensor.clone() for tensor in inputs])
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                print(f"warning: the base runs without a CUDA graph, it cannot be captured ({reason})", file=sys.stderr)
                self.can_capture = False
        if shapes not in self.graphs:
            return forward(*inputs)
        graph = self.graphs[shapes]
        for place, tensor in zip(graph.inputs, inputs, strict=True):
            place.copy_(tensor)
        graph.replay()
        return graph.result

    def _is_frequent(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Not those of the short batches at the end of an epoch."""
        times = self.times_seen[shapes]
        return times > SEEN_BEFORE and times * MOST_GRAPHS >= self.times_seen.total() and len(self.graphs) < MOST_GRAPHS


def capture_graph(forward: Forward, inputs: list[Tensor]) -> Graph:
    """Other threads, a loader's or NCCL's, may go on with what they do on the device, but for waiting for it through torch.

    Raises RuntimeError for a forward that waits for the device, which is seen before a capture breaks at it, and for one that would keep
    more memory than there is to spare beside steps like those before.
    """
    with torch.cuda.device(inputs[0].device):
        return _captured(forward, inputs)


def _captured(forward: Forward, inputs: list[Tensor]) -> Graph:
    global bytes_kept
    mode, of_a_step = torch.cuda.get_sync_debug_mode(), torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    with warnings.catch_warnings(action="ignore"):  # that not every wait is seen
        torch.cuda.set_sync_debug_mode("error")
    try:
        forward(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.empty_cache()
    before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = forward(*inputs)
    kept = torch.cuda.memory_reserved() - before
    spare = torch.cuda.mem_get_info()[0] + kept - of_a_step
    if kept > MOST_OF_SPARE_MEMORY * spare:
        raise RuntimeError(f"it keeps {kept / 1e9:.2f} GB where {spare / 1e9:.2f} are to spare")
    bytes_kept += kept
    return Graph(inputs, result, graph.replay)
