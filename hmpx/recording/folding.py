"""Folding: once too many different calls were counted, only their sums are kept.

Each shape of inputs is an entry of its own, and a model that writes text has others at each token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..reports import Row, add_up, added
from .entries import Counted, Entry, Gradients, Place, Unused, place_of
from .rows import backward_rows, rows

_T = TypeVar("_T")


class Folded:
    """Sums over calls that are not kept one by one any more.

    Attributes:
        places: Where they were called -> sums.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._sums: dict[Row, Row] = {}
        self.places: dict[Place, Unused] = {}

    def add(self, entries: list[Entry], gradients: list[Gradients], *, is_timed: bool) -> None:
        """Adds entries that are counted no further, and gradients of any."""
        found = in_own_thread(
            lambda: [*rows(entries, is_timed=is_timed), *backward_rows(gradients)]
        )
        add_up(self._sums, found)
        for entry in entries:
            sums = self._at(entry)
            sums.recorded += entry.recorded
            sums.bytes += entry.recorded * entry.call.cast_bytes
            sums.backward += entry.backward
            entry.is_folded = True
        note(gradients, self.places)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Their rows."""
        return tuple(self._sums.values())

    def _at(self, entry: Entry) -> Unused:
        return self.places.setdefault(place_of(entry), Unused())


def counted_rows(counted: Counted, *, is_timed: bool) -> tuple[Row, ...]:
    """Returns the rows of all that was counted, added up."""
    return in_own_thread(
        lambda: added(
            [
                *counted.rows,
                *rows(counted.entries, is_timed=is_timed),
                *backward_rows(counted.gradients),
            ]
        )
    )


def note(gradients: Iterable[Gradients], places: dict[Place, Unused]) -> None:
    """Notes that gradients were computed: with the entries, or where these are folded, in ``places``."""
    for entry, times in gradients:
        if entry.is_folded:
            places[place_of(entry)].backward += times
        else:
            entry.backward += times


def in_own_thread(function: Callable[[], _T]) -> _T:
    """Returns what ``function`` returns, having run it in a thread of its own.

    Torch's state is the default there: none of the program's modes, such as inference mode, transforms
    or hooks for saved tensors, sees what is computed, or changes it.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised below, where it was asked for
            errors.append(error)

    thread = threading.Thread(target=run, name="hmpx-report", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # none can be started while the interpreter ends
        return function()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
