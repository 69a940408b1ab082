"""The memory that a step takes at most, beside what there was before it.

On an accelerator torch's allocator says it. On the CPU it is resident memory, read from Linux's /proc
but for pages of files; elsewhere there is no figure.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")


def peak_bytes(step: Callable[[], Any], device_type: str) -> int | None:
    """Runs one step, and returns the most memory that was in use during it, less that before it."""
    gc.collect()
    if device_type == "cpu":
        return _resident(step)
    module: Any = torch.get_device_module(device_type)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    module.synchronize()
    before: int = module.memory_allocated()
    module.reset_peak_memory_stats()
    step()
    module.synchronize()
    peak: int = module.max_memory_allocated()
    return peak - before


def _resident(step: Callable[[], Any]) -> int | None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc's
        ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("RssAnon")
    try:
        _CLEAR.write_text("5", encoding="ascii")  # proc_pid_clear_refs(5): resets VmHWM
    except OSError:
        return None
    step()
    peak, of_files = _status_bytes("VmHWM"), _status_bytes("RssFile")
    if before is None or peak is None or of_files is None:
        return None
    return max(0, peak - of_files - before)


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024  # "VmHWM:   123 kB"
    return None
