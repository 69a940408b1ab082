"""``habana_frameworks.torch.hpu.memory``: memory of the device; on the CPU that of this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ....devices import device_type
from ...absent import unknown

#: How Habana's statistics call what torch's call so.
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
    """Returns what Habana's statistics hold, in bytes and numbers: ``Limit``, ``InUse``, ..."""
    if device_type() == "cuda":
        found = torch.cuda.memory_stats()
        limit = torch.cuda.mem_get_info()[1]
        return {"Limit": limit, **{name: int(found.get(key, 0)) for name, key in _NAMES.items()}}
    in_use, most, limit = _of_process()
    return {**dict.fromkeys(_NAMES, 0), "Limit": limit, "InUse": in_use, "MaxInUse": most}


def _of_process() -> tuple[int, int, int]:
    """Returns the bytes that this process uses, that it has used at most, and that there are.

    0 for what the system does not tell.
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
    """Returns the bytes that were in use at most."""
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device: Any = None) -> int:
    """Returns the bytes that there are: a Gaudi reserves them all."""
    return memory_stats(device)["Limit"]


max_memory_reserved = memory_cached = max_memory_cached = memory_reserved
memory_usage = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns the bytes that are free, and that there are."""
    found = memory_stats(device)
    return found["Limit"] - found["InUse"], found["Limit"]


def memory_summary(device: Any = None) -> str:
    """Returns the statistics as a table."""
    return "\n".join(f"{name:20}{value:>20,}" for name, value in memory_stats(device).items())


def reset_peak_memory_stats(device: Any = None) -> None:
    """Starts the peaks anew, on CUDA."""
    if device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Starts the counts anew, on CUDA."""
    if device_type() == "cuda":
        torch.cuda.reset_accumulated_memory_stats()


def empty_cache() -> None:
    """Gives unused memory back, on CUDA."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
