"""Plans: rounding and coding of values of one binary type to one format, by torch ops or a kernel."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import Tensor

from .bits import FP32, FP64, Binary
from .kernels import calls
from .layouts import NO_GRID, Grid
from .vocabulary import ROUNDING_MODES

#: The classes of plans by their names.
_PLANS: Final[dict[str, type[Plan]]] = {}


class Plan:
    """Rounds to one format: exact, on any device, and traceable.

    Created once per format, rounding mode and compute type. Families derive frozen dataclasses whose
    fields are numbers, strings, tuples of them, and other plans. They work on bits, since compilers elide
    round-trip casts.

    Attributes:
        kernel: The name of the compiled kernel in ``rounding_kernels.c``; None if it has none.
        kernel_binaries: The types for which it is compiled.
        is_by_row: The rounding of a value depends on its neighbours in the last dimension.
        is_whole: It may depend on all other values.
    """

    kernel: ClassVar[str | None] = None
    kernel_binaries: ClassVar[tuple[Binary, ...]] = (FP32, FP64)
    is_by_row: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False

    if TYPE_CHECKING:  # else the fields of the dataclasses would take these for their defaults

        @property
        def binary(self) -> Binary:
            """The compute type."""

        @property
        def mode(self) -> str:
            """The rounding mode."""

    def __init_subclass__(cls) -> None:
        _PLANS[cls.__name__] = cls

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
        raise NotImplementedError

    @functools.cached_property
    def compiled(self) -> calls.Kernel | None:
        """The kernel that rounds, or None."""
        return calls.kernel(self)

    def constants(self) -> tuple[Any, ...]:
        """Returns the plan as numbers, strings and tuples, which compilers treat as constants."""
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return type(self).__name__, *map(_constant, values)


def _constant(value: Any) -> Any:
    if isinstance(value, Binary):
        return value.mantissa
    return value.constants() if isinstance(value, Plan) else value


def plan_of(kind: str, mantissa: int, *rest: Any) -> Plan:
    """Returns the plan with these `Plan.constants`."""
    made = [
        plan_of(*each) if isinstance(each, tuple) and each[0] in _PLANS else each for each in rest
    ]
    return _PLANS[kind](FP32 if mantissa == 23 else FP64, *made)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Coding:
    """How kernels encode values of one binary type, and decode codes.

    Attributes:
        kernel: The kind of codes, which names the decoding kernel.
        spec: The kernel's ``KIND_codes``.
        can_encode: Whether there is an encoding kernel.
        can_decode: Whether there is a decoding kernel.
        memory: The memory to which the spec points.
    """

    kernel: str
    spec: Any
    can_encode: bool = True
    can_decode: bool = True
    memory: Any = None


def struct(*groups: tuple[str, Any]) -> Any:
    """Returns the class of a C struct; each group is names, with blanks between, and their type."""
    fields_ = [(name, kind) for names, kind in groups for name in names.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields_})


def integers(*numbers: int) -> Any:
    """Returns numbers for kernels; of those beyond 63 bits, the lowest 64."""
    return (ctypes.c_int64 * len(numbers))(*(ctypes.c_int64(number).value for number in numbers))
