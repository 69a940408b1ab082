"""``habana_frameworks.torch.hpu``, also `torch.hpu`: the device that stands in for a Gaudi.

Names that are missing here are looked up in `torch.cuda`, if CUDA is the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from ....devices import device_type
from ...absent import unknown, without_effect
from .graphs import (
    CachedModule,
    HPUGraph,
    ModuleCacher,
    graph,
    make_graphed_callables,
    wrap_in_hpu_graph,
    wrap_in_hpu_graph_func,
)
from .memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_summary,
    memory_usage,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from .random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    "CachedModule",
    "Event",
    "HPUGraph",
    "ModuleCacher",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "graph",
    "init",
    "initial_seed",
    "is_available",
    "is_initialized",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "memory_usage",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "sdp_kernel",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "wrap_in_hpu_graph",
    "wrap_in_hpu_graph_func",
]

HABANA_VISIBLE_MODULES_VAR: Final = "HABANA_VISIBLE_MODULES"
HLS_MODULE_ID_VAR: Final = "HLS_MODULE_ID"


def init() -> None:
    """Does nothing: torch starts its devices itself."""


def is_available() -> bool:
    """Returns True: another device stands in."""
    return True


def is_initialized() -> bool:
    """Returns True."""
    return True


def device_count() -> int:
    """Returns the number of CUDA devices, or 1 for the CPU."""
    return torch.cuda.device_count() if device_type() == "cuda" else 1


def current_device() -> int:
    """Returns the index of the device in use."""
    return torch.cuda.current_device() if device_type() == "cuda" else 0


def set_device(device: Any) -> None:
    """Selects a device."""
    if device_type() == "cuda":
        torch.cuda.set_device(_index(device))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Selects a device for a block."""
    if device_type() == "cuda":
        with torch.cuda.device(_index(device)):
            yield
    else:
        yield


def get_device_name(device: Any = None) -> str:
    """Returns the device's name, which says that it is a stand-in."""
    return f"{device_type()} (for hpu)"


def synchronize(device: Any = None) -> None:
    """Waits for everything that was started on the device."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def is_bf16_supported() -> bool:
    """Returns True: hmpx computes what the device can't."""
    return True


def is_autocast_hpu_enabled() -> bool:
    """Whether torch.autocast is on."""
    return torch.is_autocast_enabled(device_type())


def set_autocast_hpu_enabled(enabled: bool) -> None:
    """Switches torch.autocast on or off."""
    torch.set_autocast_enabled(device_type(), enabled)


def get_autocast_hpu_dtype() -> torch.dtype:
    """Returns the low-precision type of torch.autocast."""
    return torch.get_autocast_dtype(device_type())


def set_autocast_hpu_dtype(dtype: torch.dtype) -> None:
    """Sets the low-precision type of torch.autocast."""
    torch.set_autocast_dtype(device_type(), dtype)


def setDeterministic(val: bool) -> None:  # noqa: N802  # Habana's name
    """Asks torch for deterministic algorithms."""
    torch.use_deterministic_algorithms(val)


def getDeterministic() -> bool:  # noqa: N802  # Habana's name
    """Whether torch was asked for deterministic algorithms."""
    return torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def sdp_kernel(enable_recompute: bool = True) -> Iterator[dict[str, object]]:
    """Has no effect: torch chooses its kernels for attention itself."""
    yield {}


def recompute_sdp_enabled() -> bool:
    """Returns False."""
    return False


def __getattr__(name: str) -> Any:
    if name.startswith(("enable_", "disable_", "set_sync_debug_mode")):
        return without_effect(__name__, name)
    if not name.startswith("_") and device_type() == "cuda" and hasattr(torch.cuda, name):
        return getattr(torch.cuda, name)
    raise unknown(__name__, name)
