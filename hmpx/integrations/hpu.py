"""``torch.hpu``: the device that stands in for a Gaudi. Names missing here are `torch.cuda`'s."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .devices import GaudiError, device_type, is_hpu


def is_available() -> bool:
    """Returns True: another device stands in."""
    return True


is_initialized = is_available


def get_device_name(device: Any = None) -> str:
    """Returns the device's name, which says that it is a stand-in."""
    return f"{device_type()} (for hpu)"


setDeterministic = torch.use_deterministic_algorithms  # noqa: N816  # Habana's name


def wrap_in_hpu_graph(module: Any, *args: object, **kwargs: object) -> Any:
    """Returns ``module`` as it is."""
    return module


def make_graphed_callables(
    callables: Any, sample_args: Any, *args: object, **kwargs: object
) -> Any:
    """Returns ``callables`` as they are."""
    return callables


def ModuleCacher(max_graphs: int = 10) -> Callable[..., Any]:  # noqa: N802  # Habana's name
    """Returns a function that returns its ``model`` as it is."""
    return lambda model, *args, **kwargs: model


def HPUGraph() -> Any:  # noqa: N802  # Habana's name
    """Returns a new graph of CUDA's."""
    if device_type() == "cuda":
        return torch.cuda.CUDAGraph()
    raise GaudiError(
        "torch.hpu.HPUGraph() needs a Gaudi or CUDA; call the model itself, or leave out the script's "
        "switch for graphs"
    )


def graph(hpu_graph: Any, stream: Any = None, *args: object, **kwargs: object) -> Any:
    """Captures the work in a block."""
    return torch.cuda.graph(hpu_graph, stream=stream)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Returns Habana's statistics, in bytes; on the CPU, those of this process."""
    if device_type() == "cuda":
        used, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        limit = torch.cuda.mem_get_info()[1]
    else:
        used, most, limit = _of_process()
    return {"Limit": limit, "InUse": used, "MaxInUse": most}


def _of_process() -> tuple[int, int, int]:
    """Returns this process's memory use, its peak, and the total memory, in bytes; 0 for unknown values."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0, 0, 0
    page, unit = os.sysconf("SC_PAGE_SIZE"), 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return most, most, page * os.sysconf("SC_PHYS_PAGES")


def memory_reserved(device: Any = None) -> int:
    """Returns the total number of bytes: a Gaudi reserves them all."""
    return memory_stats(device)["Limit"]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns the number of free bytes, and the total."""
    found = memory_stats(device)
    return found["Limit"] - found["InUse"], found["Limit"]


def _nothing(*args: object, **kwargs: object) -> None:
    """Does nothing."""


class _CompletedWork:
    """A stream or an event of the CPU, on which all work is already complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded_s: float | None = None

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def record_event(self, event: Any = None) -> Any:
        event = _CompletedWork() if event is None else event
        event.record()
        return event

    def elapsed_time(self, end_event: _CompletedWork) -> float:
        """Returns the milliseconds until ``end_event``."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("an event was not recorded; call record() on both first")
        return 1000 * (end_event._recorded_s - self._recorded_s)

    synchronize = wait = wait_event = wait_stream = _nothing


_STREAM: Final = _CompletedWork()

_ON_CPU: Final[Mapping[str, Any]] = {
    **dict.fromkeys(["init", "set_device", "set_stream", "synchronize", "empty_cache"], _nothing),
    **dict.fromkeys(["reset_peak_memory_stats", "reset_accumulated_memory_stats"], _nothing),
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    **dict.fromkeys(["Stream", "current_stream", "default_stream"], lambda *_, **__: _STREAM),
    **dict.fromkeys(["device", "stream", "StreamContext"], contextlib.nullcontext),
    "Event": _CompletedWork,
    **dict.fromkeys(["manual_seed", "manual_seed_all"], lambda seed: torch.manual_seed(int(seed))),
    **dict.fromkeys(["seed", "seed_all"], torch.seed),
    "initial_seed": torch.initial_seed,
    "memory_allocated": lambda device=None: memory_stats()["InUse"],
    "max_memory_allocated": lambda device=None: memory_stats()["MaxInUse"],
    "get_rng_state": lambda device="hpu": torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state": lambda new_state, device="hpu": torch.set_rng_state(new_state),
    "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[-1]),
}


def __getattr__(name: str) -> Any:
    if device_type() != "cuda":
        found = _ON_CPU.get(name)
    else:
        found = None if name.startswith("_") else getattr(torch.cuda, name, None)
        found = _by_index(found) if callable(found) else found
    if found is None:
        raise AttributeError(name)
    return found


def _by_index(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``function`` of `torch.cuda` take Habana's devices: it gets their indices."""

    def indexed(value: Any) -> Any:
        if not is_hpu(value):
            return value
        index = torch.device(value).index
        return torch.cuda.current_device() if index is None else index

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: indexed(value) for name, value in kwargs.items()}
        return function(*map(indexed, args), **named)

    return call
