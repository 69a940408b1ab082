"""Reports which inputs decide by their dtype what becomes of a call, beside being cast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from torch import Tensor

#: Called with the name of an op and the inputs whose dtype decides.
Note = Callable[[str, list[Tensor]], None]

#: Those called now. Calls ask whether there are any, which costs less than a context variable; so calls in
#: other threads are reported, too.
DECIDING_WATCHERS: Final[list[Note]] = []


@contextlib.contextmanager
def watched_deciding(note: Note) -> Iterator[None]:
    """Calls ``note``, in the block, with inputs that would have a call come out otherwise in another dtype."""
    DECIDING_WATCHERS.append(note)
    try:
        yield
    finally:
        DECIDING_WATCHERS.remove(note)


def note_deciding(op: str, inputs: list[Tensor]) -> None:
    """Reports that the dtype of ``inputs`` decides what ``op`` makes of them."""
    for note in DECIDING_WATCHERS:
        note(op, inputs)
