"""Reports which calls compute in fp32, and which inputs the mode ``"fast"`` leaves unrounded."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Final

from torch import Tensor

from ...torch_internals import run_when_traced

#: Called with the name of an op and the inputs that it left unrounded.
Note = Callable[[str, list[Tensor]], None]

_watcher: Final = contextvars.ContextVar[Note | None]("hmpx_watcher", default=None)


@contextlib.contextmanager
def watched_rounding(note: Note) -> Iterator[None]:
    """Calls ``note`` wherever the mode ``"fast"`` leaves inputs unrounded, inside the block.

    Whether it does depends on a call's size, and on whether gradients are recorded. Inside the block
    every call is computed like those that leave inputs unrounded, so whatever is rounded there is
    rounded in all calls.
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
    """Reports that ``op`` uses ``inputs`` unrounded that other modes would round."""
    note = _watcher.get()
    if note is not None:
        note(op, inputs)


run_when_traced(is_watched)  # compiled code is never watched


class _Here(threading.local):
    """What a thread has computed.

    Attributes:
        is_legalized: In fp32, with inputs and results in low precision; whoever reads it resets it.
    """

    is_legalized = False


COMPUTED: Final = _Here()


def note_legalized() -> None:
    """Notes that a call with low-precision inputs or results computes in fp32."""
    COMPUTED.is_legalized = True


run_when_traced(note_legalized)
