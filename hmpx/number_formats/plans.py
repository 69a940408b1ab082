"""How values of one binary type are rounded to one format and coded, in torch ops or by a kernel."""

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
    """How to round to one format: exact, on any device, and traceable.

    Made once for a format, a rounding mode and a binary type to compute in. Families derive frozen
    dataclasses whose fields are numbers, strings, tuples of them, and other plans. They work on the
    bits, since compilers elide round-trip casts.

    Attributes:
        kernel: The name of the compiled kernel in ``rounding_kernels.c``; None if it has none.
        kernel_binaries: The types that it is compiled for.
        is_by_row: How a value is rounded depends on its neighbours in the last dimension.
        is_whole: It may depend on all other values.
    """

    kernel: ClassVar[str | None] = None
    kernel_binaries: ClassVar[tuple[Binary, ...]] = (FP32, FP64)
    is_by_row: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False

    if TYPE_CHECKING:  # else the fields of the dataclasses would take these for their defaults

        @property
        def binary(self) -> Binary:
            """The type that it computes in."""

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
        """As `round`, by given scales in float32, laid out as ``x`` is; for plans that have scales."""
        raise NotImplementedError

    @property
    def has_one_scale(self) -> bool:
        """Whether `round_by` is given one scale of the whole tensor, which the kernel takes, too."""
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

    def kernel_spec(self, grid: Grid = NO_GRID) -> Any:
        """Returns the ctypes object that the kernel reads, for a tensor's grid; None if it can't do it."""
        raise NotImplementedError

    @functools.cached_property
    def compiled(self) -> calls.Kernel | None:
        """The kernel that rounds; None if there is none."""
        return calls.kernel(self)

    def constants(self) -> tuple[Any, ...]:
        """Returns the plan as numbers, strings and tuples, which compilers take for constants."""
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return type(self).__name__, *map(_constant, values)


def _constant(value: Any) -> Any:
    if isinstance(value, Binary):
        return value.mantissa
    return value.constants() if isinstance(value, Plan) else value


def plan_of(kind: str, mantissa: int, *rest: Any) -> Plan:
    """Returns the plan whose `Plan.constants` these are."""
    made = [
        plan_of(*each) if isinstance(each, tuple) and each[0] in _PLANS else each for each in rest
    ]
    return _PLANS[kind](FP32 if mantissa == 23 else FP64, *made)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Coding:
    """How kernels make codes of values of one binary type, or values of codes.

    Attributes:
        kernel: The kind of codes, by whose name the decoding kernel goes.
        spec: The kernel's ``KIND_codes``.
        can_encode: Whether there is a kernel that makes such codes.
        can_decode: Whether there is one that reads them.
        memory: What the spec points to.
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
    """Returns numbers as kernels take them; those beyond 63 bits are taken for their lowest 64."""
    return (ctypes.c_int64 * len(numbers))(*(ctypes.c_int64(number).value for number in numbers))
