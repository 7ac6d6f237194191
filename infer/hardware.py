"""This machine -> what a measurement on it has to say about it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, cores this process may use, threads of torch, RAM and, on CUDA, the card. Bytes."""
    on_gpu = device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "ram_bytes": ram_bytes(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
