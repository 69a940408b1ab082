"""An op list after reading: ops, each with the line that put it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ..decisions import Decision, LowType, OutputType

#: How many lines with a fault of one kind are kept; the others are only counted.
MOST_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list.

    Attributes:
        text: The name as written, with its prefix: ``"-mul"``.
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
        """Returns the options after the name."""
        return self.dtype, self.accumulate_dtype, self.output_dtype


@dataclass(frozen=True)
class OpList:
    """A list after reading.

    Attributes:
        ops: Op name -> the line that put it there.
        unknown: The first lines whose name is not an op of the installed torch.
        unknown_count: How many there are.
        repeated: The first pairs (line, earlier line) with the same text.
        repeated_count: How many there are.
        removed: Ops removed by a ``-`` line, including operators of ops in the list.
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
    """A list, and the decision for the ops in it.

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
