"""Records of calls, gradients and tensors while a program runs, without holding any of its tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeGuard

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..observers import OpCall
from ..tensors import PLAIN_TENSORS, is_dense, version_of
from ..torch_internals import (
    dispatch_modes,
    has_tangents,
    is_graph_made,
    is_jit_tracing,
    transforms,
)
from .slots import Extremes, exact

#: The non-finite values that a tensor may hold, as bits.
NAN, POSITIVE, NEGATIVE = 4, 2, 1

storage_of: Final[Callable[[Tensor], Any]] = Tensor.untyped_storage

#: Most measurements of a tensor's parts.
_MOST_PARTS: Final = 8


class Cell:
    """The state of a tensor's values at one time.

    ``maker`` is the name of the autograd node that made the tensor, if no observed call did; ``""`` for
    data; None if an observed call or its backward made it.
    """

    __slots__ = ("extremes", "is_hooked", "maker", "origin", "slot", "sources")

    def __init__(
        self, slot: int | None, maker: str | None = None, *, is_hooked: bool = True
    ) -> None:
        self.slot, self.maker, self.is_hooked = slot, maker, is_hooked
        self.extremes: Extremes | None = (0.0, 0.0) if slot is None else None  # None while unknown
        self.origin: Any = None  # where its non-finite values come from, once known
        self.sources: list[Cell] = []  # it was computed from, if no observed call made it

    @property
    def bits(self) -> int | None:
        """Which non-finite values there are; None if unknown."""
        return None if self.extremes is None else bits_of(self.extremes)


class Leaf(Cell):
    """A parameter or another leaf: its values are only read if something is wrong."""

    __slots__ = ("name", "reference", "version")

    def __init__(self, tensor: Tensor, version: int, name: str = "") -> None:
        super().__init__(None, "")
        self.extremes = None
        self.name = name  # the parameter's qualified name; "" if no known module holds it
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


class Input(NamedTuple):
    """A floating-point input of a call: the state of its memory, and whether it is only a part of it."""

    cells: tuple[Cell, ...]
    is_part: bool


class Trial(NamedTuple):
    """The outcome of a call in float32: the non-finite values of its results, or of its gradients."""

    bits: int
    where: str = ""  # the input values that caused it: "input 0 is -2"
    is_underflow: bool = False  # it is finite, but not on its rounded inputs, some of them zero
    is_sure: bool = True  # it ran on its inputs; otherwise on one element, for their extremes
    is_known: bool = True  # the calls that led to it ran, too, on the values that they were given
    causes: tuple[OpCall, ...] = ()  # finite if these earlier calls, or this one, run in float32
    is_double: bool = False  # they ran in float64, since all were in float32 already
    stopped_at: OpCall | None = None  # an earlier call that could not be repeated
    is_cast: bool = False  # the gradient is finite, but not in its input's dtype
    is_tried: bool = (
        False  # with all calls that led to it in float32, as far as known, it fails, too
    )
    loser: OpCall | None = None  # the call whose backward made all of its gradients zero


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call of the forward, or of a recomputation, with its floating-point inputs and results."""

    call: OpCall
    step: int
    own_location: str  # of the user's own files, if the call's is in an installed package
    module: str  # of the call; in the backward of the program's own function, of that one's forward
    inputs: list[Input] = field(default_factory=list)
    results: list[Cell] = field(default_factory=list)
    is_intended: bool = False  # takes NaN or infinity as a number, or leaves memory as it is
    is_metric: bool = False  # perhaps: its result is a number, or a ratio made outside of modules, without a gradient
    is_outside: bool = False  # of the forward of all modules
    is_unsure: bool = False  # some inputs are unknown
    is_check: bool = False  # looks whether its input is finite
    writes: bool = False  # to an argument, as far as known
    is_blamed: bool = False  # its backward made gradients non-finite
    alive: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)  # with versions
    trial: Trial | None = None
    given: Any = None  # its arguments, with `Held` in place of tensors, where it can run again
    outline: Any = None  # its arguments without values, if it may have to be tried on extremes

    def cells(self) -> list[Cell]:
        """Returns the cells of all inputs and results."""
        return [*self.results, *(cell for each in self.inputs for cell in each.cells)]


@dataclass(slots=True, eq=False)
class GradientRecord:
    """Gradients that passed through the backward of a call."""

    record: CallRecord
    node: str  # name of the autograd node, if not the call's own
    before: list[Cell]  # those that arrived at its results
    after: list[Cell]  # those that it computed
    trial: Trial | None = None

    def cells(self) -> list[Cell]:
        """Returns the cells of all gradients."""
        return self.before + self.after


class KnownTensors:
    """Measurements of tensors that may still be alive, by memory and version, which views share.

    By the address of a storage, which another one may have once that is freed.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], int, tuple[Cell, ...], int]] = {}

    def _in(self, storage: Any) -> tuple[weakref.ref[Any], int, tuple[Cell, ...], int] | None:
        found = self._found.get(storage._cdata)
        return found if found is not None and found[0]() is storage else None

    def find(self, tensor: Tensor, storage: Any) -> tuple[tuple[Cell, ...], bool] | None:
        """Returns the cells of ``tensor`` in memory ``storage``, and whether they cover more than it."""
        found = self._in(storage)
        if found is None or found[1] != version_of(tensor):  # -1 in inference mode
            return None
        return found[2], tensor.nbytes < found[3]

    def before(self, tensor: Tensor, storage: Any) -> tuple[Cell, ...] | None:
        """Returns the cells of ``tensor`` from before a call wrote to it; None if unknown."""
        found = self._in(storage)
        if found is None or not 0 <= version_of(tensor) - found[1] <= 1:
            return None
        return found[2]

    def add(self, tensor: Tensor, storage: Any, version: int, cell: Cell) -> None:
        """Remembers that ``cell`` holds the values of ``tensor`` at this version."""
        key = storage._cdata
        cells: tuple[Cell, ...] = (cell,)
        covered = tensor.nbytes
        found = self._in(storage)
        if version >= 0 and covered < storage.nbytes() and (found is not None or tensor._is_view()):
            # The rest is unchanged, if known. Without a view a loss leaves memory behind its result.
            if found is None or not 0 <= version - found[1] <= 1 or len(found[2]) >= _MOST_PARTS:
                self._found.pop(key, None)
                return
            cells, covered = (*found[2], cell), found[3]
        reference = found[0] if found is not None else weakref.ref(storage)
        self._found[key] = reference, version, cells, covered

    def living(self) -> Iterator[Cell]:
        """Yields the cells of memory that has not been freed."""
        for reference, _, cells, _ in self._found.values():
            if reference() is not None:
                yield from cells

    def forget(self, keeps: Callable[[Cell], bool] = lambda cell: False) -> None:
        """Forgets memory that has been freed, or of which no cell is to be kept."""
        self._found = {
            key: each
            for key, each in self._found.items()
            if any(map(keeps, each[2])) and each[0]() is not None
        }


def alive(reference: Callable[[], Tensor | None]) -> Tensor | None:
    """Returns the tensor of a weak reference that is cheap to make; None if it is gone."""
    tensor = reference()
    return None if tensor is None else TensorWeakRef(tensor)()


def bits_of(extremes: Extremes) -> int:
    """Returns which non-finite values a tensor with these extremes has."""
    low, high = extremes
    if math.isnan(low) or math.isnan(high):
        return NAN
    return POSITIVE * (high == math.inf) | NEGATIVE * (low == -math.inf)


def is_measurable(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a floating-point tensor whose values can be read."""
    if type(value) not in PLAIN_TENSORS:
        return False
    tensor: Any = value
    dtype = tensor.dtype
    return (dtype.is_floating_point or dtype.is_complex) and is_dense(tensor) and not tensor.is_meta


def is_off_limits() -> bool:
    """Whether calls made here have no values, or belong to a transform or a trace."""
    if transforms() is not None or is_jit_tracing() or has_tangents():
        return True
    return bool(dispatch_modes()) and is_graph_made()
