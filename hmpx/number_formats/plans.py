"""Plans: rounding and coding of values of one binary type to one format, by torch ops or a kernel.

Layouts say which values of a tensor are rounded together.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

from ..errors import OptionError
from . import kernels
from .bits import FP32, FP64, Binary
from .unpatched import PAD, PERMUTE
from .vocabulary import ROUNDING_MODES

Kind: TypeAlias = Literal["rows", "columns", "tiles", "whole"]


class Grid(NamedTuple):
    """The memory layout of a tensor without gaps: ``[..., rows, mid, columns]``."""

    rows: int  # values that share a scale may be in several
    mid: int  # elements between rows that belong together, in units of columns
    columns: int  # adjacent elements
    is_across: bool  # the axis of the layout is the rows', not the columns'


#: For values that are rounded separately.
NO_GRID: Final = Grid(1, 1, 1, False)


@dataclass(frozen=True)
class Layout:
    """The positions in a tensor of values that are rounded together.

    Attributes:
        kind: ``"rows"``: along the axis, all of it or parts. ``"columns"``: all with the same index on the
            axis. ``"tiles"``: along the axis and another one, the last or the second last. ``"whole"``: all.
        axis: The axis; ignored for ``"whole"``.
        size: How many values along the axis are rounded together; 0 for all.
        height: How many along the other axis of tiles.
    """

    kind: Kind
    axis: int = -1
    size: int = 0
    height: int = 1

    def check(self, shape: Sequence[int]) -> None:
        """Raises `OptionError` if tensors of a shape lack the axis."""
        if not -len(shape) <= self.axis < len(shape):
            raise OptionError(
                f"blocks lie along axis {self.axis}, which a tensor of shape {tuple(shape)} lacks"
            )

    # --- as torch ops see it -------------------------------------------------------------------

    def to_rows(self, x: Tensor) -> Tensor:
        """Returns ``x`` with the axis last, or first for columns; may be a view. Checks the axis."""
        if self.kind == "whole":
            return x.reshape(-1)
        if x.dim() == 0:
            x = x.view(1)
        self.check(x.shape)
        return PERMUTE(x, self._order(x.dim()))

    def from_rows(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns rows as a tensor of the original shape; may be a view."""
        if not shape or self.kind == "whole":
            return rows.reshape(shape)
        order = self._order(len(shape))
        return PERMUTE(rows, [order.index(dim) for dim in range(len(order))])

    def _order(self, dims: int) -> list[int]:
        axis = self.axis % dims
        if self.kind == "columns":
            return [axis, *[dim for dim in range(dims) if dim != axis]]
        last = [axis]
        if self.kind == "tiles" and dims > 1:
            last = [dims - 1 - (axis == dims - 1), axis]
        return [*[dim for dim in range(dims) if dim not in last], *last]

    def _sizes(self, shape: Sequence[int]) -> list[int]:
        """Returns the sizes of a block of rows, limited to the values present, to avoid padding."""
        full = [max(size, 1) for size in shape]
        if self.kind == "whole":
            return full
        if self.kind == "columns":
            return [1, *full[1:]]
        found = [*[1] * (len(full) - 1), min(self.size or full[-1], full[-1])]
        if self.kind == "tiles" and len(full) > 1:
            found[-2] = min(self.height, full[-2])
        return found

    def split(self, rows: Tensor) -> Tensor:
        """Returns rows in blocks, padded with zeros: a dimension more, for the values of a block."""
        sizes, dims = self._sizes(rows.shape), rows.dim()
        missing = [-length % size for length, size in zip(rows.shape, sizes, strict=True)]
        if any(missing):
            rows = PAD(rows, [each for more in reversed(missing) for each in (0, more)])
        pairs = [(n // size, size) for n, size in zip(rows.shape, sizes, strict=True)]
        blocks = rows.reshape([each for pair in pairs for each in pair])
        return PERMUTE(blocks, [*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]).flatten(dims)

    def join(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Returns blocks as rows again: the inverse of `split`."""
        sizes, dims = self._sizes(like.shape), like.dim()
        counts = blocks.shape[:-1]
        order = [each for dim in range(dims) for each in (dim, dims + dim)]
        rows = PERMUTE(blocks.reshape(*counts, *sizes), order)
        rows = rows.reshape([n * size for n, size in zip(counts, sizes, strict=True)])
        return rows if rows.shape == like.shape else rows[tuple([slice(n) for n in like.shape])]

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape. Checks the axis."""
        if self.kind == "whole" or not shape:
            return ()
        self.check(shape)
        found, order = list(shape), self._order(len(shape))
        sizes = self._sizes([shape[dim] for dim in order])
        whole = len(order) if self.size else 1 if self.kind == "columns" else len(order) - 1
        for place, (dim, size) in enumerate(zip(order, sizes, strict=True)):
            found[dim] = 1 if place >= whole else -(-shape[dim] // size)
        return tuple(found)

    # --- as kernels see it ---------------------------------------------------------------------

    @property
    def takes_strides(self) -> bool:
        """Whether there is a grid for any order of the axes in memory."""
        return self.kind in ("rows", "whole")

    def grid(self, x: Tensor) -> Grid:
        """Returns the grid of a tensor without gaps in memory. Checks the axis.

        It must be contiguous, unless the layout `takes_strides`.
        """
        shape = x.shape
        if self.kind == "whole":
            return Grid(1, 1, x.numel(), False)
        self.check(shape or (1,))
        if not shape:
            return NO_GRID
        axis, length = self.axis % len(shape), shape[self.axis]
        if self.kind == "rows":
            if length == 1:
                return Grid(1, 1, x.numel(), True)
            stride = x.stride(axis)
            return Grid(1, 1, length, False) if stride == 1 else Grid(length, 1, stride, True)
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if self.kind == "columns" and after == 1:
            return Grid(before, 1, length, True)
        if self.kind == "columns":
            return Grid(before, length, after, False)
        if axis == len(shape) - 1:
            return Grid(shape[-2] if axis else 1, 1, length, False)
        return Grid(length, after // max(shape[-1], 1), shape[-1], True)

    def tile(self, grid: Grid) -> tuple[int, int]:
        """Returns the number of rows and columns of the grid that are rounded together."""
        rows, _, columns, is_across = grid
        if self.kind == "columns":
            return rows, 1 if is_across else columns
        along = self.size or (rows if is_across else columns)
        height, width = (along, self.height) if is_across else (self.height, along)
        return height, min(width, columns)

    def places(self, grid: Grid) -> tuple[int, int, int, int]:
        """Returns the strides of outer parts, rows, mids and columns in the result of `to_rows`."""
        rows, mid, columns, is_across = grid
        if is_across:
            return rows * mid * columns, 1, rows * columns, rows
        if self.kind == "columns":
            return 0, columns, rows * columns, 1
        return rows * mid * columns, mid * columns, columns, 1


#: The classes of plans by their names, and `Layout`.
_PARTS: Final[dict[str, Any]] = {"Layout": Layout}


@dataclass(frozen=True)
class Plan:
    """Rounds to one format: exact, on any device, and traceable.

    Created once per format, rounding mode and compute type. Families derive frozen dataclasses whose
    fields are numbers, strings, tuples of them, layouts, and other plans. They work on bits, since compilers
    elide round-trip casts.

    Attributes:
        kernel: The name of the compiled kernel in ``rounding_kernels.c``; None if it has none.
        kernel_binaries: The types for which it is compiled.
        kernel_fields: The attributes whose values are its spec, if that is an array.
        is_by_row: The rounding of a value depends on its neighbours in the last dimension.
        is_whole: It may depend on all other values.
    """

    kernel: ClassVar[str | None] = None
    kernel_binaries: ClassVar[tuple[Binary, ...]] = (FP32, FP64)
    kernel_fields: ClassVar[str] = ""
    is_by_row: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False

    binary: Binary  # the compute type
    mode: str  # the rounding mode

    def __init_subclass__(cls) -> None:
        _PARTS[cls.__name__] = cls

    @property
    def layout(self) -> Layout | None:
        """The values that are rounded together; None if each is rounded separately."""
        return None

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded, as a new tensor.

        Args:
            x: Of the plan's binary dtype.
            noise: Random int32 of x's shape; only for the mode ``"stochastic"``.
        """
        raise NotImplementedError

    def round_by(self, x: Tensor, noise: Tensor | None, scale: Tensor | None) -> Tensor:
        """Like `round`, by given scales in float32, in the layout of ``x``; for plans with scales."""
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

    @functools.cached_property
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
