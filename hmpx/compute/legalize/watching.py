"""Who is told which inputs the mode ``"fast"`` leaves unrounded."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Final

from torch import Tensor

from ...torch_internals import run_when_traced

#: What is called with the name of an op and the inputs that it was not to round.
Note = Callable[[str, list[Tensor]], None]

_watcher: Final = contextvars.ContextVar[Note | None]("hmpx_watcher", default=None)


@contextlib.contextmanager
def watched_rounding(note: Note) -> Iterator[None]:
    """Calls ``note`` wherever the mode ``"fast"`` leaves inputs unrounded, inside the block.

    Whether it does depends on a call's size, and on whether gradients are recorded. In the block
    every call is computed as those that do: what is rounded there is rounded in all calls.
    """
    token = _watcher.set(note)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether the call is made in a block of `watched_rounding`."""
    return _watcher.get() is not None


def note_unrounded(op: str, inputs: list[Tensor]) -> None:
    """Passes on that ``op`` uses ``inputs`` unrounded, which otherwise would be rounded."""
    note = _watcher.get()
    if note is not None:
        note(op, inputs)


run_when_traced(is_watched)  # no compiled code is watched
