"""Scales: their shapes, and checks of them, of what shares one, and of histories of amaxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ... import arguments
from ...arguments import is_a
from ...errors import OptionError, shown
from ...tensors import CAST, SPARSE
from ..layouts import Layout
from ..modes import MOST_STEPS
from .number_format import check_int, hint, listed

if TYPE_CHECKING:
    from .scaled import Scaled

Granularity: TypeAlias = "Literal['tensor', 'row', 'column'] | int | tuple[int, int]"
AmaxRule: TypeAlias = Literal["max", "most_recent"]

#: Which amax of a history scales.
_AMAX_RULES: Final[tuple[AmaxRule, ...]] = ("max", "most_recent")

#: The largest margin.
_MOST_MARGIN: Final = 64

_GRANULARITIES: Final = ("tensor", "row", "column")
_MOST_SIZE: Final = 65536


def check_floating(x: object, function: str) -> None:
    """Checks that a tensor can be rounded.

    Raises:
        OptionError: It is not a dense tensor of a floating type that `quantize` takes.
    """
    if not isinstance(x, Tensor):
        raise OptionError(f"{function} takes a tensor, not {type(x).__name__}")
    if x.dtype not in CAST or x.layout in SPARSE:
        what = x.layout if x.layout in SPARSE else x.dtype
        raise OptionError(
            f"{function} takes dense tensors of {', '.join(map(str, CAST))}, not of {what}"
        )


def check_scales(scales: object, shape: tuple[int, ...], name: str) -> Tensor:
    """Returns scales in float32.

    Raises:
        OptionError: They are not a floating tensor of that shape.
    """
    if not isinstance(scales, Tensor) or not scales.is_floating_point():
        what = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise OptionError(f"format {name}: scales must be a floating tensor, not {what}")
    check_shape(scales, shape, name)
    return CAST[torch.float32](scales)


def check_shape(scales: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Checks the shape of scales.

    Raises:
        OptionError: It is another.
    """
    if tuple(scales.shape) != shape:
        raise OptionError(
            f"format {name}: scales must be of shape {shape}, not {tuple(scales.shape)}"
        )


def scales_shape(shape: Sequence[int], layout: Layout, granularity: Granularity) -> tuple[int, ...]:
    """Returns the shape of the scales of a layout, for values of a shape."""
    if layout.kind == "whole" or not shape:
        return ()
    layout.check(shape)
    axis, found = layout.axis, list(shape)
    if layout.kind == "columns":
        found = [1] * len(found)
        found[axis] = shape[axis]
        return tuple(found)
    tile = granularity if isinstance(granularity, tuple) else (1, granularity)
    found[axis] = 1 if isinstance(tile[1], str) else -(-shape[axis] // tile[1])
    if layout.kind == "tiles" and len(shape) > 1:
        other = layout.other(len(shape))
        found[other] = -(-shape[other] // tile[0])
    return tuple(found)


def checked_history(format: Scaled) -> AmaxRule | None:
    """Returns which amax of its history a format scales by, checked; None if it has no history.

    Raises:
        OptionError: Its fields ``history``, ``amax_rule`` and ``margin`` have values that they can't have.
    """
    what = f"format {format.name}"
    rule: AmaxRule | None = None
    if format.amax_rule is not None:
        rule = arguments.choice(f"{what}: amax_rule", format.amax_rule, _AMAX_RULES)
    check_int(format.name, "margin", format.margin, 0, _MOST_MARGIN)
    if format.history is None:
        for field in ("amax_rule", "margin"):
            if getattr(format, field):
                raise OptionError(f"{what}: {field} is for a history; add history=16, say")
        return None
    check_int(format.name, "history", format.history, 1, MOST_STEPS)
    if format.granularity != "tensor" or format.tensor_scale:
        have = (
            "a scale beside blocks'"
            if format.tensor_scale
            else f"granularity {format.granularity!r}"
        )
        raise OptionError(
            f"{what}: history is for one scale a tensor, granularity 'tensor', not for {have}; "
            "leave history out, for scales by the tensor at hand"
        )
    return rule or "max"


def checked_granularity(what: str, value: object) -> Granularity:
    """Returns what shares a scale, checked.

    Raises:
        OptionError: It is nothing that can.
    """
    if is_a(value, str) and str.__str__(value) in _GRANULARITIES:
        return str.__str__(value)  # type: ignore[return-value]  # one of these
    if is_a(value, (tuple, list)):
        sizes: tuple[int, int] = tuple(value)  # type: ignore[arg-type, assignment]  # checked below
        if len(sizes) == 2 and all(map(_is_size, sizes)):
            return sizes
    elif _is_size(value):
        return value  # type: ignore[return-value]  # checked
    raise OptionError(
        f"{what}: granularity must be one of {listed(_GRANULARITIES)}, a size from 1 to {_MOST_SIZE}, "
        f"or a pair of sizes, not {shown(value)}{hint(value, _GRANULARITIES)}"
    )


def _is_size(value: object) -> bool:
    return is_a(value, int) and not is_a(value, bool) and 1 <= value <= _MOST_SIZE  # type: ignore[operator]
