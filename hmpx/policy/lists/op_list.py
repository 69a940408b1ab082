"""An op list after reading: ops, each with the line that put it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ...errors import OpListError, OptionError
from ..decisions import OPTIONS, Decision, LowType, OutputType

if TYPE_CHECKING:
    from ...number_formats import Format

#: How many lines with a fault of one kind are kept; the others are only counted.
MOST_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list.

    Attributes:
        text: The name as written, with its prefix: ``"-mul"``.
        where: ``"my_bf16.txt:3"``.
        dtype: The low-precision type of this op alone; None for that of the list.
        accumulate_dtype: See `decisions.Decision`, as for
        output_dtype:
        weights:
        activations:
        gradients:
        rounding:
        overflow: these.
    """

    text: str
    where: str
    dtype: LowType | None = None
    accumulate_dtype: torch.dtype | None = None
    output_dtype: OutputType | None = None
    weights: Format | None = None
    activations: Format | None = None
    gradients: Format | None = None
    rounding: str | None = None
    overflow: str | None = None

    def options(self) -> tuple[Any, ...]:
        """Returns the options after the name, in the order of the fields."""
        return (self.dtype, *[getattr(self, name) for name in OPTIONS.values()])


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
        """Returns the decision of a line: that of its list, except where the line says otherwise.

        Raises:
            OpListError: What the line says does not go together.
        """
        try:
            return dataclasses.replace(
                self.decision,
                dtype=entry.dtype or self.decision.dtype,
                reason=entry.where,
                **{name: getattr(entry, name) for name in OPTIONS.values()},
            )
        except OptionError as error:
            raise OpListError(f"{entry.where}: {error}") from None
