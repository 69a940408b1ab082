"""What `monitor` counts of a tensor, on the tensor's device without waiting, and the figures that follow."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..compute import nodes_in_use
from ..number_formats import Float, Format, quantize
from ..tensors import CAST, is_low

#: A dtype of torch, or a number format.
Type = torch.dtype | Format


class Counts(NamedTuple):
    """Sums over a row's tensors; all add up, but for the two ends.

    Attributes:
        values: How many values.
        nonfinite: Infinite ones and NaN, which the others leave out.
        zeros: Zeros before a cast.
        near: Beyond a quarter of the type's largest number, without
        most: those that are at least as large, which are often masks, or saturated.
        lost: Values that a cast made zero, and
        overflown: infinite or NaN.
        subnormal: Subnormal ones, after a cast.
        error: Squares of the rounding errors of a cast.
        rounding: Squares of the rounding errors, those of a stored type estimated.
        norm: Squares of the values.
        spread: Squares of their distances from the mean of the last dimension.
        unchanged: Values with a gradient that a step has not changed, of those that
        moving: have a gradient.
        least: The smallest magnitude but zero, and
        amax: the largest one.
    """

    values: float
    nonfinite: float = 0.0
    zeros: float = 0.0
    near: float = 0.0
    most: float = 0.0
    lost: float = 0.0
    overflown: float = 0.0
    subnormal: float = 0.0
    error: float = 0.0
    rounding: float = 0.0
    norm: float = 0.0
    spread: float = 0.0
    unchanged: float = 0.0
    moving: float = 0.0
    least: float = math.inf
    amax: float = 0.0


class TypeLimits(NamedTuple):
    """The largest number of a type, its smallest normal one, and its epsilon; inf, 0 and 0 where it has none."""

    most: float
    least: float
    epsilon: float


@functools.cache
def limits(of: Type) -> TypeLimits:
    """Returns the limits of a type."""
    if isinstance(of, torch.dtype):
        found = torch.finfo(of)
        return TypeLimits(found.max, found.smallest_normal, found.eps)
    return TypeLimits(
        getattr(of, "max", math.inf),
        getattr(of, "smallest_normal", 0.0),
        getattr(of, "epsilon", 0.0),
    )


def measured(tensor: Tensor, cast: Type | None = None) -> Tensor:
    """Returns the `Counts` of a tensor as a vector on its device: as it is, or as a cast to a type rounds it."""
    if (kernel := _kernel(tensor, cast)) is not None:
        row = tensor.shape[-1] if tensor.dim() and tensor.shape[-1] > 1 else tensor.numel()
        saturates = getattr(cast, "overflow", None) == "saturate"
        of = limits(cast or tensor.dtype)
        counted: Tensor = kernel(tensor.contiguous(), row, cast is not None, *of, saturates)
        return counted
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    x = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    limit = limits(cast or tensor.dtype)
    size = x.abs()
    is_finite = size <= torch.finfo(x.dtype).max
    x, size = x.where(is_finite, 0), size.where(is_finite, 0)
    rows = x if x.dim() and x.shape[-1] > 1 else x.reshape(1, -1)
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=wide).square()
    means = rows.sum(-1, dtype=wide).square() / rows.shape[-1]
    norm, spread = norms.sum(), (norms - means).clamp(min=0).sum()
    finite, nonzero, most = is_finite.sum(), size.count_nonzero(), (size >= limit.most).sum()
    lost = overflown = error = rounding = size.new_zeros(())
    after = size
    if cast is not None:
        low = CAST[cast](x).to(x.dtype) if isinstance(cast, torch.dtype) else quantize(x, cast)
        after = low.abs()
        is_held = after <= torch.finfo(x.dtype).max
        after = after.where(is_held, size)
        overflown, lost = finite - (is_held & is_finite).sum(), nonzero - after.count_nonzero()
        error = rounding = _square((low - x).where(is_held, 0), wide)
    elif tensor.itemsize < 4:
        rounding = norm * (limit.epsilon / 4) ** 2
    subnormal = (after < limit.least).sum() - (after.numel() - after.count_nonzero())
    found = [
        finite * 0 + tensor.numel(), tensor.numel() - finite, finite - nonzero,
        (size > limit.most / 4).sum() - most, most, lost, overflown, subnormal,
        error, rounding, norm, spread, finite * 0, finite * 0,
        size.where(size > 0, math.inf).amin(), size.amax(),
    ]  # fmt: skip
    return torch.stack([each.to(wide) for each in found])


#: The dtypes that the kernel reads.
_COUNTED: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _kernel(tensor: Tensor, cast: Type | None) -> Any:
    """Returns the compiled kernel that measures a tensor, that of `compute.nodes`; None if there is none for it."""
    is_plain = cast is None or is_low(cast) or (isinstance(cast, Float) and cast.subnormals)
    is_read = is_plain and tensor.is_cpu and tensor.dtype in _COUNTED
    return getattr(nodes_in_use().module, "count", None) if is_read else None


Row = TypeVar("Row")


def fold(measured: Iterable[tuple[Row, Tensor]]) -> Iterator[tuple[list[Row], Tensor]]:
    """Yields for each device rows and their vectors, one for all of a row."""
    by_device: dict[torch.device, list[tuple[Row, Tensor]]] = {}
    for row, vector in measured:
        by_device.setdefault(vector.device, []).append((row, vector))
    for found in by_device.values():
        yield _merged([row for row, _ in found], torch.stack([vector for _, vector in found]))


def gather(
    measured: Iterable[tuple[Row, Tensor]], device: torch.device
) -> tuple[list[Row], Tensor]:
    """Returns rows and their vectors on a device, which gets one copy from each of the others."""
    rows, parts = list[Row](), [torch.empty(0, len(Counts._fields), dtype=torch.float64)]
    for own, vectors in fold(measured):
        rows += own
        parts.append(vectors)
    return _merged(rows, torch.cat([each.to(device, torch.float64) for each in parts]))


def _merged(rows: Sequence[Row], vectors: Tensor) -> tuple[list[Row], Tensor]:
    places: dict[Row, int] = {}
    at = [places.setdefault(row, len(places)) for row in rows]
    return [*places], added(vectors, at, len(places))


def added(vectors: Tensor, at: Sequence[int], count: int) -> Tensor:
    """Returns that many vectors: to each those are added that are ``at`` its place."""
    where = torch.tensor(at, dtype=torch.long, device=vectors.device)
    found = vectors.new_zeros(count, len(Counts._fields))
    found[:, ENDS] = math.inf
    found[:, :ENDS].index_add_(0, where, vectors[:, :ENDS])
    found[:, ENDS].scatter_reduce_(0, where, vectors[:, ENDS], "amin")
    found[:, -1].scatter_reduce_(0, where, vectors[:, -1], "amax")
    return found


#: The position of the two ends in `Counts`, behind its sums.
ENDS: Final = Counts._fields.index("least")


def measured_step(before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
    """Returns a vector like `measured`'s, which counts values of a parameter that a step has left unchanged."""
    moving = gradient != 0
    wide = torch.float32 if after.device.type == "mps" else torch.float64
    found = torch.zeros(len(Counts._fields), dtype=wide, device=after.device)
    found[Counts._fields.index("unchanged")] = ((before == after) & moving).sum()
    found[Counts._fields.index("moving")] = moving.sum()
    found[ENDS] = math.inf
    return found


def _square(x: Tensor, wide: torch.dtype) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, dtype=wide)
    return found.square()


def figures(
    counts: Counts, of: Type, *, is_cast: bool, is_tried: bool
) -> Iterator[tuple[str, float]]:
    """Yields the figures of a row by name: those that its values and its type have.

    Of a format that is only tried those of rounding.
    """
    c = counts
    finite, nonzero, limit = c.values - c.nonfinite, c.values - c.nonfinite - c.zeros, limits(of)
    if c.moving:
        yield "unchanged", c.unchanged / c.moving
    if c.values and not is_tried:
        yield "nonfinite", c.nonfinite / c.values
    if finite and not is_tried:
        yield "zeros", c.zeros / finite
        yield "amax", c.amax
    if not nonzero:
        return
    if not is_tried:
        yield "amax_exponent", float(math.frexp(c.amax)[1] - 1)
    if of not in _WIDE and math.isfinite(limit.most):
        is_short = _bits(of) <= 8  # scales make use of all its range
        yield ("saturated", c.most / finite) if is_short else ("near_max", c.near / finite)
    if of not in _WIDE and limit.least:
        yield "subnormal", c.subnormal / nonzero
    if is_cast:
        yield "underflow", c.lost / nonzero
        yield "overflow", c.overflown / finite
        yield "error", math.sqrt(c.error / c.norm) if c.norm else 0.0
    if c.rounding and c.spread > c.norm * _ROUNDING:
        yield "error_of_spread", math.sqrt(c.rounding / c.spread)


#: Types whose range trainings don't leave.
_WIDE: Final = frozenset({torch.float32, torch.float64})

#: The spread of equal values, relative to their squares: what float32 makes of it.
_ROUNDING: Final = 2.0**-40


def _bits(of: Type) -> int:
    if isinstance(of, torch.dtype):
        return 8 * of.itemsize
    bits: Any = getattr(of, "bits", 32)
    return int(bits)
