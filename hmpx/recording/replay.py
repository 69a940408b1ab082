"""What a ledger has noted, played again: sums by kind at each moment, and those at the peaks."""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..reports import Memory, Moment


class What(enum.Enum):
    """What has happened to some memory."""

    MADE = enum.auto()
    FREED = enum.auto()
    HELD = enum.auto()
    RELEASED = enum.auto()


class Stored:
    """The memory of one tensor and its views.

    Attributes:
        bytes: Its size.
        dtype: Name of the dtype of the tensor that it was first seen by.
        kind: One of `reports.KINDS`; ``""`` where it may be saved, or is something other.
        cast_of: What it is a cast of, if it was made by one.
        memory: A weak reference.
    """

    __slots__ = ("bytes", "cast_of", "dtype", "kind", "memory")

    def __init__(self, size_bytes: int, dtype: str) -> None:
        """Starts without a kind."""
        self.bytes, self.dtype, self.kind = size_bytes, dtype, ""
        self.cast_of: Stored | None = None
        self.memory: weakref.ref[Any] | None = None

    def resized(self, size_bytes: int) -> Stored:
        """Returns what stands for it after its size has changed."""
        found = Stored(size_bytes, self.dtype)
        found.kind, found.cast_of = self.kind, self.cast_of
        return found

    @property
    def is_weight_cast(self) -> bool:
        """Whether it was made by a cast of a parameter to another dtype."""
        source = self.cast_of
        return source is not None and source.kind == "parameters" and source.dtype != self.dtype


#: What has happened, to what, and for memory that was made the phase.
Event = tuple[What, Stored, str]

#: Kinds of memory that is there from one step to the next: it counts from the start.
_LASTING = ("parameters", "buffers", "optimizer state")


class Replay:
    """Plays events again."""

    def __init__(self, events: Iterable[Event]) -> None:
        """Plays all of them."""
        self._events = list(events)
        self._live: dict[Stored, int] = {}  # 1, or 0 once it is freed
        self._held: Counter[Stored] = Counter()
        self._sums: Counter[str] = Counter()
        self._saved: Counter[tuple[str, bool]] = Counter()
        self._most_saved: Counter[tuple[str, bool]] = Counter()
        self._most_of: Counter[str] = Counter()
        self._phases: dict[str, Moment] = {}
        self._play()

    def memory(self) -> Memory:
        """Returns the sums."""
        saved = {
            dtype: count
            for (dtype, is_cast), count in sorted(self._most_saved.items())
            if count and not is_cast
        }
        return Memory(
            parameter_bytes=self._most_of["parameters"],
            buffer_bytes=self._most_of["buffers"],
            gradient_bytes=self._most_of["gradients"],
            optimizer_bytes=self._most_of["optimizer state"],
            saved=saved,
            weight_cast_bytes=sum(n for (_, is_cast), n in self._most_saved.items() if is_cast),
            peak=max(self._phases.values(), key=lambda each: each.bytes, default=Moment("", {})),
            phases=tuple(self._phases.values()),
        )

    def _play(self) -> None:
        lasting = [
            stored
            for what, stored, _ in self._events
            if what is What.MADE and stored.kind in _LASTING
        ]
        for stored in lasting:
            self._add(stored)
        for what, stored, phase in self._events:
            if what is What.MADE:
                if stored.kind not in _LASTING:
                    self._add(stored)
                self._note_moment(phase)
            elif what is What.FREED:
                self._remove(stored)
            elif what is What.HELD:
                self._hold(stored)
            else:
                self._release(stored)

    def _note_moment(self, phase: str) -> None:
        known = self._phases.get(phase)
        if known is None or sum(self._sums.values()) > known.bytes:
            kinds = {kind: count for kind, count in self._sums.items() if count}
            self._phases[phase] = Moment(phase, kinds)

    def _add(self, stored: Stored) -> None:
        self._live[stored] = 1
        self._change(self._kind(stored), stored.bytes)

    def _remove(self, stored: Stored) -> None:
        if self._live.pop(stored, 0):
            self._change(self._kind(stored), -stored.bytes)

    def _hold(self, stored: Stored) -> None:
        if stored.kind in ("parameters", "buffers"):
            return
        before = self._kind(stored)
        self._held[stored] += 1
        if self._held[stored] == 1:
            self._moved(stored, before)
            self._saved[stored.dtype, stored.is_weight_cast] += stored.bytes
            if sum(self._saved.values()) > sum(self._most_saved.values()):
                self._most_saved = Counter(self._saved)

    def _release(self, stored: Stored) -> None:
        if self._held[stored] == 0:
            return
        before = self._kind(stored)
        self._held[stored] -= 1
        if not self._held[stored]:
            del self._held[stored]
            self._moved(stored, before)
            self._saved[stored.dtype, stored.is_weight_cast] -= stored.bytes

    def _moved(self, stored: Stored, before: str) -> None:
        if self._live.get(stored):
            self._change(before, -stored.bytes)
            self._change(self._kind(stored), stored.bytes)

    def _change(self, kind: str, count: int) -> None:
        self._sums[kind] += count
        self._most_of[kind] = max(self._most_of[kind], self._sums[kind])

    def _kind(self, stored: Stored) -> str:
        if stored.kind in ("parameters", "buffers"):
            return stored.kind
        if self._held.get(stored):
            return "weight casts" if stored.is_weight_cast else "saved"
        return stored.kind or "other"
