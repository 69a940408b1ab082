"""``habana_frameworks.torch.hpu.memory``: the device's memory; on the CPU, that of this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ....devices import device_type
from ...absent import unknown

#: Names in Habana's statistics for those in torch's.
_NAMES = {
    "InUse": "allocated_bytes.all.current",
    "MaxInUse": "allocated_bytes.all.peak",
    "NumAllocs": "allocation.all.allocated",
    "NumFrees": "allocation.all.freed",
    "ActiveAllocs": "active.all.current",
    "MaxAllocSize": "requested_bytes.all.peak",
    "TotalSystemAllocs": "segment.all.allocated",
    "TotalSystemFrees": "segment.all.freed",
    "TotalActiveAllocs": "segment.all.current",
}


def memory_stats(device: Any = None) -> dict[str, int]:
    """Returns Habana's statistics, in bytes and counts: ``Limit``, ``InUse``, ..."""
    if device_type() == "cuda":
        found = torch.cuda.memory_stats()
        limit = torch.cuda.mem_get_info()[1]
        return {"Limit": limit, **{name: int(found.get(key, 0)) for name, key in _NAMES.items()}}
    in_use, most, limit = _of_process()
    return {**dict.fromkeys(_NAMES, 0), "Limit": limit, "InUse": in_use, "MaxInUse": most}


def _of_process() -> tuple[int, int, int]:
    """Returns this process's memory use, its peak, and the total memory, in bytes.

    Values that the system does not report are 0.
    """
    try:
        import os
        import resource
    except ImportError:  # not on Windows
        return 0, 0, 0
    page, unit = os.sysconf("SC_PAGE_SIZE"), 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    limit = page * os.sysconf("SC_PHYS_PAGES")
    statistics = Path("/proc/self/statm")
    in_use = page * int(statistics.read_text().split()[1]) if statistics.exists() else most
    return in_use, max(most, in_use), limit


def memory_allocated(device: Any = None) -> int:
    """Returns the bytes in use."""
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    """Returns the peak number of bytes in use."""
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device: Any = None) -> int:
    """Returns the total number of bytes: a Gaudi reserves them all."""
    return memory_stats(device)["Limit"]


max_memory_reserved = memory_cached = max_memory_cached = memory_reserved
memory_usage = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns the number of free bytes, and the total."""
    found = memory_stats(device)
    return found["Limit"] - found["InUse"], found["Limit"]


def memory_summary(device: Any = None) -> str:
    """Returns the statistics as a table."""
    return "\n".join(f"{name:20}{value:>20,}" for name, value in memory_stats(device).items())


def reset_peak_memory_stats(device: Any = None) -> None:
    """Resets the peaks, on CUDA."""
    if device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Resets the counts, on CUDA."""
    if device_type() == "cuda":
        torch.cuda.reset_accumulated_memory_stats()


def empty_cache() -> None:
    """Frees unused cached memory, on CUDA."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
