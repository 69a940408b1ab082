"""Memory of this process: on CUDA what torch's allocator gave out, else resident memory and heap.

Resident memory is read from Linux's /proc, but for pages of files: the code of a kernel gets
resident when it first runs. The heap is glibc's. On other systems the figures are None.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # codespell:ignore


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def settle() -> None:
    """Frees what nobody refers to, and gives free memory back to the system where that works."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def used_bytes(device: str) -> int | None:
    """Returns what the process holds now: its tensors on CUDA, else its resident memory."""
    return torch.cuda.memory_allocated() if device == "cuda" else _status_bytes("RssAnon")


def live_bytes(device: str) -> int | None:
    """Returns what is allocated and not freed: exact, unlike resident memory, which lags."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    mallinfo = getattr(_libc(), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def reset_peak(device: str) -> None:
    """Lets `peak_bytes` start anew from what is in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (clear := Path("/proc/self/clear_refs")).exists():
        clear.write_text("5", encoding="ascii")  # proc_pid_clear_refs(5): resets VmHWM


def peak_bytes(device: str) -> int | None:
    """Returns the most that `used_bytes` was since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux keeps no peak without files; their share hardly changes once everything has run.
    return difference(_status_bytes("VmHWM"), _status_bytes("RssFile"))


def difference(after: int | None, before: int | None) -> int | None:
    """Returns ``after - before``, or None where one is missing."""
    return None if after is None or before is None else after - before


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _status_bytes(field: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024  # "VmRSS:   123 kB"
    return None
