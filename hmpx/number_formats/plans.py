"""Plans: rounding and coding of values of one binary type to one format, by torch ops or a kernel.

Layouts say which values of a tensor are rounded together.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

from ..errors import OptionError
from ..forks import CachedProperty
from . import kernels
from .bits import FP32, FP64, Binary
from .unpatched import PAD, PERMUTE
from .vocabulary import ROUNDING_MODES

Kind: TypeAlias = Literal["rows", "columns", "tiles", "whole"]


class Grid(NamedTuple):
    """A tensor's elements, or its memory without gaps, as ``[outer, rows, mid, columns]``."""

    rows: int  # values that share a scale may be in several
    mid: int  # elements between rows that belong together, in units of columns
    columns: int  # adjacent elements
    is_across: bool  # the axis of the layout is the rows', not the columns'


#: For values that are rounded separately.
NO_GRID: Final = Grid(1, 1, 1, False)


@dataclass(frozen=True)
class Layout:
    """The positions in a tensor of values that are rounded together.

    Rows are values along the axis, all of them or parts; columns are all with the same index on it. Tiles go along
    the axis and another one, the last or the second last.
    """

    kind: Kind
    axis: int = -1  # ignored for ``"whole"``
    size: int = 0  # how many values along the axis are rounded together; 0 for all
    height: int = 1  # how many along the other axis of tiles

    def check(self, shape: Sequence[int]) -> None:
        """Raises `OptionError` if tensors of a shape lack the axis."""
        if not -len(shape) <= self.axis < len(shape):
            raise OptionError(
                f"blocks lie along axis {self.axis}, which a tensor of shape {tuple(shape)} lacks"
            )

    def grid(self, x: Tensor, *, is_in_memory: bool = False) -> Grid:
        """Returns the grid of a tensor. Checks the axis.

        That of its memory, which must have no gaps, may have any order of axes if the layout `takes_strides`.
        """
        shape = x.shape
        if self.kind == "whole":
            return Grid(1, 1, x.numel(), False)
        self.check(shape or (1,))
        if not shape:
            return NO_GRID
        axis, length = self.axis % len(shape), shape[self.axis]
        if self.kind == "rows":
            if is_in_memory and length == 1:
                return Grid(1, 1, x.numel(), True)
            stride = x.stride(axis) if is_in_memory else math.prod(shape[axis + 1 :])
            return Grid(1, 1, length, False) if stride == 1 else Grid(length, 1, stride, True)
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if self.kind == "columns" and after == 1:
            return Grid(before, 1, length, True)
        if self.kind == "columns":
            return Grid(before, length, after, False)
        if axis == len(shape) - 1:
            return Grid(shape[-2] if axis else 1, 1, length, False)
        return Grid(length, after // max(shape[-1], 1), shape[-1], True)

    @property
    def takes_strides(self) -> bool:
        """Whether there is a grid for any order of the axes in memory."""
        return self.kind in ("rows", "whole")

    def tile(self, grid: Grid) -> tuple[int, int]:
        """Returns the number of rows and columns of the grid that are rounded together."""
        rows, _, columns, is_across = grid
        if self.kind == "columns":
            return rows, 1 if is_across else columns
        along = self.size or (rows if is_across else columns)
        height, width = (along, self.height) if is_across else (self.height, along)
        return height, min(width, columns)

    def places(self, grid: Grid) -> tuple[int, int, int, int]:
        """Returns the strides of outer parts, rows, mids and columns for the index of an element's noise."""
        rows, mid, columns, is_across = grid
        if is_across:
            return rows * mid * columns, 1, rows * columns, rows
        if self.kind == "columns":
            return 0, columns, rows * columns, 1
        return rows * mid * columns, mid * columns, columns, 1

    # --- for torch ops -------------------------------------------------------------------------

    def noise_index(self, index: Tensor, x: Tensor) -> Tensor:
        """Returns the indices of the noise of x's elements, from those of all elements."""
        grid = self.grid(x)
        return index.as_strided(_extent(grid, x), self.places(grid)).reshape(x.shape)

    def split(self, x: Tensor) -> Tensor:
        """Returns the values of blocks in a last dimension, padded with zeros; ``x`` must not be empty.

        The other dimensions are those of the grid, with one index for each block.
        """
        grid = self.grid(x)
        (height, width), x = self._size(grid), x.reshape(_extent(grid, x))
        missing = [0, -grid.columns % width, 0, 0, 0, -grid.rows % height]
        if any(missing):
            x = PAD(x, missing)
        outer, rows, mid, columns = x.shape
        blocks = x.reshape(outer, rows // height, height, mid, columns // width, width)
        return PERMUTE(blocks, [0, 1, 3, 4, 2, 5]).flatten(4)

    def join(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Returns blocks in the shape of ``like``: the inverse of `split`."""
        grid = self.grid(like)
        height, width = self._size(grid)
        outer, rows, mid, columns = blocks.shape[:-1]
        blocks = blocks.reshape(outer, rows, mid, columns, height, width)
        x = PERMUTE(blocks, [0, 1, 4, 2, 3, 5]).reshape(outer, rows * height, mid, columns * width)
        if x.shape != _extent(grid, like):
            x = x[:, : grid.rows, :, : grid.columns]
        return x.reshape(like.shape)

    def _size(self, grid: Grid) -> tuple[int, int]:
        """Returns the size of blocks, limited to the values present, to avoid padding."""
        height, width = self.tile(grid)
        return min(height, grid.rows), width

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape. Checks the axis."""
        if self.kind == "whole" or not shape:
            return ()
        self.check(shape)
        last, axis = len(shape) - 1, self.axis % len(shape)
        found = [1] * len(shape) if self.kind == "columns" else list(shape)
        if self.kind == "tiles" and last:
            other = last - (axis == last)
            found[other] = -(-shape[other] // self.height)
        found[axis] = -(-shape[axis] // self.size) if self.size else 1
        if self.kind == "columns":
            found[axis] = shape[axis]
        return tuple(found)


def _extent(grid: Grid, x: Tensor) -> tuple[int, ...]:
    """Returns the sizes of the grid's four dimensions."""
    rows, mid, columns, _ = grid
    return x.numel() // (rows * mid * columns), rows, mid, columns


#: The classes of plans by their names, and `Layout`.
_PARTS: Final[dict[str, Any]] = {"Layout": Layout}


@dataclass(frozen=True)
class Plan:
    """Rounds to one format: exact, on any device, and traceable.

    Created once per format, rounding mode and compute type. Families derive frozen dataclasses whose
    fields are numbers, strings, tuples of them, layouts, and other plans. They work on bits, since compilers
    elide round-trip casts.
    """

    kernel: ClassVar[str | None] = None  # its name in ``rounding_kernels.c``
    kernel_binaries: ClassVar[tuple[Binary, ...]] = (FP32, FP64)  # for which it is compiled
    kernel_fields: ClassVar[str] = ""  # the attributes that are its spec, if that is an array

    binary: Binary  # the compute type
    mode: str  # the rounding mode

    def __init_subclass__(cls) -> None:
        _PARTS[cls.__name__] = cls

    @property
    def layout(self) -> Layout | None:
        """The values that are rounded together; None if each is rounded separately."""
        return None

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns ``x``, of the plan's binary dtype, rounded; stochastic modes take random int32 of its shape."""
        raise NotImplementedError

    def round_by(self, x: Tensor, noise: Tensor | None, scale: Tensor | None) -> Tensor:
        """Like `round`, by given scales in float32; for plans with scales."""
        raise NotImplementedError

    @property
    def has_one_scale(self) -> bool:
        """Whether `round_by` gets one scale of the whole tensor, which the kernel also accepts."""
        return False

    @property
    def mode_number(self) -> int:
        """The kernels' number of the rounding mode."""
        return ROUNDING_MODES.index(self.mode)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel supports this type and mode."""
        return self.kernel is not None and self.binary in self.kernel_binaries

    @property
    def symbol(self) -> str:
        """The kernel's function in the compiled library."""
        return f"{self.kernel}_f{self.binary.width}"

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the ctypes object for the kernel, for a tensor's grid; None if unsupported."""
        return integers(*self.kernel_numbers())

    def kernel_numbers(self) -> list[int]:
        """Returns the values of `kernel_fields`; of floating ones the bits."""
        values = [getattr(self, name) for name in self.kernel_fields.split()]
        return [self.binary.bits_of(v) if isinstance(v, float) else int(v) for v in values]

    @CachedProperty
    def compiled(self) -> kernels.Kernel | None:
        """The kernel that rounds, or None."""
        return kernels.kernel(self)

    def constants(self) -> tuple[Any, ...]:
        """Returns the plan as numbers, strings and tuples, which compilers treat as constants."""
        return _constants(self)  # type: ignore[no-any-return]


def _constants(value: Any) -> Any:
    if isinstance(value, Binary):
        return value.mantissa
    if not isinstance(value, Plan | Layout):
        return value
    values = [getattr(value, field.name) for field in fields(value)]
    return type(value).__name__, *map(_constants, values)


def plan_of(kind: str, *given: Any) -> Any:
    """Returns the plan with these `Plan.constants`."""
    made = [
        plan_of(*each) if isinstance(each, tuple) and each[0] in _PARTS else each for each in given
    ]
    if kind != "Layout":
        made[0] = FP32 if made[0] == 23 else FP64
    return _PARTS[kind](*made)


@dataclass(frozen=True)
class Coding:
    """How kernels encode values of one binary type, and decode codes."""

    kernel: str  # the kind of codes, which names the decoding kernel
    spec: Any  # the kernel's ``KIND_codes``
    can_encode: bool = True
    can_decode: bool = True
    memory: Any = None  # to which the spec points


def struct(*groups: tuple[str, Any]) -> Any:
    """Returns the class of a C struct; each group is names, with blanks between, and their type."""
    fields_ = [(name, kind) for names, kind in groups for name in names.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields_})


def integers(*numbers: int) -> Any:
    """Returns numbers for kernels; of those beyond 63 bits, the lowest 64."""
    return (ctypes.c_int64 * len(numbers))(*(ctypes.c_int64(number).value for number in numbers))
