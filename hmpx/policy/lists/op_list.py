"""An op list after reading: ops, each with the line that put it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ..decisions import Decision, LowType, OutputType

#: Of lines with a fault so many are kept; the others are counted.
MOST_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list.

    Attributes:
        text: The name as written, with what stands before it: ``"-mul"``.
        where: ``"my_bf16.txt:3"``.
        dtype: The low-precision type of this op alone; None for that of the list.
        accumulate_dtype: See `decisions.Decision`, and
        output_dtype: there.
    """

    text: str
    where: str
    dtype: LowType | None = None
    accumulate_dtype: torch.dtype | None = None
    output_dtype: OutputType | None = None

    def options(self) -> tuple[LowType | str | None, ...]:
        """Returns what stands after the name."""
        return self.dtype, self.accumulate_dtype, self.output_dtype


@dataclass(frozen=True)
class OpList:
    """A list after reading.

    Attributes:
        ops: Op name -> the line that put it there.
        unknown: Lines whose name is no op of the installed torch: the first of them.
        unknown_count: How many there are.
        repeated: (line, earlier line) pairs that hold the same text: the first of them.
        repeated_count: How many there are.
        removed: Ops removed by a ``-`` line, also operators of ops that are in the list.
        everything: The ``*`` line, if there is one.
        is_shipped: The list comes with hmpx.
    """

    ops: Mapping[str, Entry]
    unknown: tuple[Entry, ...] = ()
    unknown_count: int = 0
    repeated: tuple[tuple[Entry, Entry], ...] = ()
    repeated_count: int = 0
    removed: frozenset[str] = frozenset()
    everything: Entry | None = None
    is_shipped: bool = False


NOTHING: Final = OpList({})


class Listed(NamedTuple):
    """A list, and what is decided for the ops in it.

    Attributes:
        op_list: The list.
        decision: That of a line that says nothing else.
    """

    op_list: OpList
    decision: Decision

    def decided(self, entry: Entry) -> Decision:
        """Returns the decision of a line: that of its list, except where the line says otherwise."""
        return dataclasses.replace(
            self.decision,
            dtype=entry.dtype or self.decision.dtype,
            accumulate_dtype=entry.accumulate_dtype,
            output_dtype=entry.output_dtype,
            reason=entry.where,
        )
