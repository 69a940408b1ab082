"""What is noted of calls and of gradients while a program runs, without any of its tensors."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from ..observers import OpCall
from .slots import Extremes, exact

#: What a tensor holds beside finite values.
NAN, POSITIVE, NEGATIVE = 4, 2, 1


class Cell:
    """What is known of the values that a tensor had at one time.

    Attributes:
        slot: Number of its slot; None once ``extremes`` were read from it, and where it has none.
        extremes: The smallest and the largest value; None while unknown.
        origin: Where non-finite values in it come from, once that is known.
        maker: Name of the autograd node that made the tensor, if no observed call did; ``""`` for
            data; None where an observed call did, or its backward.
        is_hooked: The tensor's autograd node has been seen, if it has one.
        sources: Those that it was computed from, if no observed call made it.
    """

    __slots__ = ("extremes", "is_hooked", "maker", "origin", "slot", "sources")

    def __init__(
        self, slot: int | None, maker: str | None = None, *, is_hooked: bool = True
    ) -> None:
        """Starts with what is written to ``slot``."""
        self.slot, self.maker, self.is_hooked = slot, maker, is_hooked
        self.extremes: Extremes | None = (0.0, 0.0) if slot is None else None
        self.origin: Any = None
        self.sources: list[Cell] = []

    @property
    def bits(self) -> int | None:
        """Which non-finite values there are; None if that is unknown."""
        return None if self.extremes is None else bits_of(self.extremes)


class Leaf(Cell):
    """What is known of a parameter, or another leaf: it is looked at only if something is wrong.

    Attributes:
        reference: The parameter, while it is alive.
        version: Its version when it was used.
        holder: The module whose forward used it, while that is alive; None outside of any.
        path: Qualified name of that module.
    """

    __slots__ = ("holder", "path", "reference", "version")

    def __init__(
        self, tensor: torch.Tensor, version: int, holder: nn.Module | None = None, path: str = ""
    ) -> None:
        """Starts without looking at ``tensor``, which is at ``version``."""
        self.holder, self.path = None if holder is None else weakref.ref(holder), path
        self.slot, self.maker, self.is_hooked = None, "", True
        self.extremes, self.origin, self.sources = None, None, []
        self.reference, self.version = weakref.ref(tensor), version

    def look(self) -> None:
        """Reads the parameter, unless it was written to since."""
        if self.extremes is None:
            tensor = alive(self.reference)
            if tensor is not None and version_of(tensor) == self.version:
                self.extremes = exact(tensor)

    @property
    def bits(self) -> int | None:
        """Which non-finite values the parameter has; None if it was written to since."""
        self.look()
        return super().bits

    @property
    def name(self) -> str:
        """The parameter's qualified name; ``""`` if no module that is known holds it."""
        tensor = self.reference()
        holder = None if self.holder is None else self.holder()
        if tensor is None or holder is None:
            return ""
        found = next((name for name, each in holder.named_parameters() if each is tensor), "")
        return f"{self.path}.{found}" if found and self.path else found


def alive(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Returns the tensor of a weak reference that is cheap to make; None if it has died."""
    tensor = reference()
    return None if tensor is None else TensorWeakRef(tensor)()


def bits_of(extremes: Extremes) -> int:
    """Returns which non-finite values a tensor of these extremes has."""
    low, high = extremes
    if math.isnan(low) or math.isnan(high):
        return NAN
    return POSITIVE * (high == math.inf) | NEGATIVE * (low == -math.inf)


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's version; -1 for one of inference mode, which counts none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


@dataclass(slots=True, eq=False)
class Input:
    """One floating-point input of a call.

    Attributes:
        cells: What is known of its memory.
        is_part: It is only a part of that.
    """

    cells: tuple[Cell, ...]
    is_part: bool


class Trial(NamedTuple):
    """What a call gives in float32.

    Attributes:
        bits: The non-finite values of its results, or of its gradients; 0 if there are none.
        where: Values of its inputs for which that was seen: ``"input 0 is -2"``; ``""`` if unknown.
        is_underflow: It is finite, but not on its inputs as rounded, some of them to zero.
        is_sure: It ran on its inputs; otherwise on one element, for the extremes of these.
    """

    bits: int
    where: str = ""
    is_underflow: bool = False
    is_sure: bool = True


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call of the forward, or of a recomputation.

    Attributes:
        call: The call.
        step: Number of the step.
        inputs: Its floating-point inputs.
        results: Its floating-point results.
        is_intended: The call was given an infinity or NaN as a number, or leaves memory as it is.
        is_unsure: Some inputs are not known.
        writes: It wrote to an argument, as far as is known.
        is_blamed: Its backward was found to make gradients non-finite.
        alive: The results, while they are alive, and their versions.
        trial: What it gave in float32, if it was tried.
        outline: Its arguments without values, if it may have to be tried on extremes.
    """

    call: OpCall
    step: int
    inputs: list[Input]
    results: list[Cell] = field(default_factory=list)
    is_intended: bool = False
    is_unsure: bool = False
    writes: bool = False
    is_blamed: bool = False
    alive: list[tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=list)
    trial: Trial | None = None
    outline: Any = None


@dataclass(slots=True, eq=False)
class GradientRecord:
    """Gradients that passed through the backward of a call.

    Attributes:
        record: The call.
        node: Name of the autograd node, where that is not the call's own; else ``""``.
        before: The gradients that arrived at its results; None at a node that only hands them out.
        after: Those that it computed.
        step: Number of the step.
        trial: What the backward gave in float32, if it was tried.
    """

    record: CallRecord
    node: str
    before: list[Cell]
    after: list[Cell]
    step: int
    trial: Trial | None = None


#: Ops whose results are whatever memory holds.
UNSET: Final = frozenset({"resize", "resize_as", "is_set_to"})
