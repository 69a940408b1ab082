"""Plans: how values of one binary type are rounded to one format, in torch ops or by a kernel."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .bits import FP32, FP64, Binary
from .layouts import NO_GRID, Grid
from .modes import ROUNDING_MODES


class Plan:
    """How to round to one format: exact, on any device, and traceable.

    Made once for a format, a rounding mode and a binary type to compute in. Families derive frozen
    dataclasses whose fields are numbers, strings, tuples of them, and other plans. They work on the
    bits, since compilers elide round-trip casts.

    Attributes:
        kernel: The name of the compiled kernel in ``rounding_kernels.c``; None if it has none.
        kernel_binaries: The types that it is compiled for.
        has_encoder: There is a kernel that makes codes, too.
        is_by_row: How a value is rounded depends on its neighbours in the last dimension.
        is_whole: It may depend on all other values.
    """

    kernel: ClassVar[str | None] = None
    kernel_binaries: ClassVar[tuple[Binary, ...]] = (FP32, FP64)
    has_encoder: ClassVar[bool] = True
    is_by_row: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False

    if TYPE_CHECKING:  # else the fields of the dataclasses would take these for their defaults

        @property
        def binary(self) -> Binary:
            """The type that it computes in."""

        @property
        def mode(self) -> str:
            """The rounding mode."""

    def round(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the values of ``x`` rounded, as a new tensor.

        Args:
            x: Of the plan's binary dtype.
            noise: Random int32 of x's shape; only for the mode ``"stochastic"``.
        """
        raise NotImplementedError

    def round_by(self, x: Tensor, noise: Tensor | None, scale: Tensor) -> Tensor:
        """Returns the values of ``x`` rounded by scales that are given; for plans that have scales.

        Args:
            x: As for `round`.
            noise: As for `round`.
            scale: float32, laid out as ``x`` is.
        """
        raise NotImplementedError

    @property
    def has_one_scale(self) -> bool:
        """Whether what `round_by` is given is one scale of the whole tensor, which the kernel takes, too."""
        return False

    @property
    def mode_number(self) -> int:
        """The rounding mode, as the kernels take it."""
        return ROUNDING_MODES.index(self.mode)

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel for this type and mode."""
        return self.kernel is not None and self.binary in self.kernel_binaries

    @property
    def symbol(self) -> str:
        """The kernel's function in the compiled library."""
        return f"{self.kernel}_f{self.binary.width}"

    @classmethod
    def symbols(cls) -> tuple[str, ...]:
        """Returns the kernel's functions for all types."""
        if cls.kernel is None:
            return ()
        return tuple(f"{cls.kernel}_f{binary.width}" for binary in cls.kernel_binaries)

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the ctypes object that tells the kernel what to do; None if it can't do it.

        Args:
            grid: Of the tensor, for plans that round by row.
        """
        raise NotImplementedError

    def decoding_spec(self, grid: Grid) -> Any:
        """Returns the ctypes object that tells the kernel how scales are shared, given codes."""
        return self.kernel_spec(grid)

    def constants(self) -> tuple[Any, ...]:
        """Returns the plan as numbers, strings and tuples, which compilers take for constants."""
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return type(self).__name__, *map(_constant, values)

    @classmethod
    def from_constants(cls, binary: Binary, *rest: Any) -> Plan:
        """Returns the plan whose `constants` these are, after its name and its binary's mantissa."""
        return cls(binary, *rest)  # type: ignore[call-arg]


def _constant(value: Any) -> Any:
    if isinstance(value, Binary):
        return value.mantissa
    return value.constants() if isinstance(value, Plan) else value
