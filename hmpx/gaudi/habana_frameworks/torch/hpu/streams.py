"""``habana_frameworks.torch.hpu.streams``: CUDA's streams and events; the CPU runs all synchronously."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from ....devices import device_type
from ...absent import unknown


class _CpuEvent:
    """An event on the CPU, which is complete as soon as it is recorded."""

    def __init__(self) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Records the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True."""
        return True

    def elapsed_time(self, end_event: _CpuEvent) -> float:
        """Returns the milliseconds until ``end_event``.

        Raises:
            RuntimeError: One of them was not recorded.
        """
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("an event was not recorded; call record() on both first")
        return 1000 * (end_event._recorded_s - self._recorded_s)


class _CpuStream:
    """The CPU's only stream, on which all work is already complete."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Records ``event``, a new one if None, and returns it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Does nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CpuStream)

    def __hash__(self) -> int:
        return hash(_CpuStream)


def Event(enable_timing: bool = False, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  # Habana's name
    """Returns a new event."""
    if device_type() == "cuda":
        return torch.cuda.Event(enable_timing)  # type: ignore[no-untyped-call]
    return _CpuEvent()


def Stream(device: Any = None, priority: int = 0, **kwargs: Any) -> Any:  # noqa: N802  # Habana's name
    """Returns a new stream."""
    if device_type() == "cuda":
        return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    return _CpuStream()


def stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Selects a stream for a block; None selects none."""
    if device_type() == "cuda":
        return torch.cuda.stream(stream)
    return contextlib.nullcontext(stream)


StreamContext = stream


def set_stream(stream: Any) -> None:
    """Selects a stream."""
    if device_type() == "cuda" and stream is not None:
        torch.cuda.set_stream(stream)


def current_stream(device: Any = None) -> Any:
    """Returns the stream in use."""
    return torch.cuda.current_stream() if device_type() == "cuda" else _CpuStream()


def default_stream(device: Any = None) -> Any:
    """Returns the stream that is current initially."""
    return torch.cuda.default_stream() if device_type() == "cuda" else _CpuStream()


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
