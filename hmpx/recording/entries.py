"""Calls that are alike, as a recorder counts them."""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

from ..observers import OpCall
from ..reports import Row
from .signatures import Shape, Signature

#: The reason of a conversion that the program itself has asked for.
OWN_CAST: Final = "the program's own cast"


class Entry:
    """Calls that are alike.

    Attributes:
        call: The first of them.
        signature: Their arguments; None if these have none.
        inputs: Shapes of the floating inputs.
        outputs: Shapes of the results.
        calls: How many.
        seconds: How long they took together.
        recorded: How many were recorded by autograd.
        backward: How many times their gradients have been computed, as far as that is folded.
        is_folded: Whether the calls themselves are.
    """

    __slots__ = (
        "backward", "call", "calls", "inputs", "is_folded", "outputs", "recorded", "seconds",
        "signature",
    )  # fmt: skip

    def __init__(
        self,
        call: OpCall,
        found: Signature | None,
        inputs: tuple[Shape, ...],
        outputs: tuple[Shape, ...],
    ) -> None:
        """Starts with no call."""
        self.call, self.signature, self.inputs, self.outputs = call, found, inputs, outputs
        self.calls = self.recorded = self.backward = 0
        self.seconds = 0.0
        self.is_folded = False


#: An entry, and how often gradients of its calls were computed.
Gradients = tuple[Entry, int]


class Thread:
    """Lives as long as a thread of the program."""


class Counts:
    """What one thread has counted.

    Attributes:
        entries: Key of a call -> calls that are alike.
        backward: ``id`` of an entry -> the entry, and how often gradients of its calls were computed.
        thread: Returns None once the thread has ended.
    """

    def __init__(self, thread: Thread) -> None:
        """Starts empty."""
        self.entries: dict[object, Entry] = {}
        self.backward: dict[int, list[Any]] = {}
        self.thread = weakref.ref(thread)


class Place(NamedTuple):
    """Where results may be unused.

    Attributes:
        op: The op.
        module: The module that called it, and
        location: the line.
    """

    op: str
    module: str
    location: str


class Unused:
    """Sums over folded calls at one place, to tell whether their results were used.

    Attributes:
        recorded: How many were recorded by autograd.
        bytes: The bytes that their casts wrote.
        backward: How many times their gradients have been computed.
    """

    def __init__(self) -> None:
        """Starts with no call."""
        self.recorded = self.bytes = self.backward = 0


class Counted(NamedTuple):
    """What all threads have counted.

    Attributes:
        entries: Entries that are kept.
        gradients: Gradients that were computed, of these and of folded ones.
        rows: Rows of what was folded, and
        places: where it was called.
    """

    entries: list[Entry]
    gradients: list[Gradients]
    rows: tuple[Row, ...]
    places: dict[Place, Unused]


def place_of(entry: Entry) -> Place:
    """Returns where the calls of an entry were made."""
    call = entry.call
    return Place(call.op, call.module, call.location)
