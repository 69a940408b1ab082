"""The rows of a comparison: one per call site, and one per parameter's gradient."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import fielded
from ..renames import renamed_fields
from ..reports import Row
from ..tensors import long_name
from .calls import SiteNumbers
from .measures import Sums, limits

#: Relative to the gradients of the module's other parameters: the largest gradient that may be zero up to rounding,
#: and the largest difference of such a one. Those of biases before norms, and of attention's keys, are 1e-8 to 1e-6,
#: with differences to 1e-2; others are above 1e-2.
_ZERO, _HARMLESS = 2.0**-16, 2.0**-4


class Magnitudes(NamedTuple):
    """The magnitudes of a call's results in float32.

    Attributes:
        smallest: The smallest nonzero one in a sample; infinity if there is none.
        largest: The largest.
    """

    smallest: float
    largest: float


@renamed_fields(site="location", rel="error", propagated_rel="propagated_error")
@dataclass(frozen=True, slots=True)
class ComparedSite:
    """The effect of low precision on the calls of one op from one line in one module.

    Attributes:
        op: Op name.
        module: Qualified name of the innermost module; ``""`` for none.
        location: ``"model.py:12"``: the line of the program.
        cast_policy: Name of the `CastPolicy` that decided.
        reason: The source of the decision: ``"lists/hmpx/bf16.txt:20"``.
        dtype: Name of the low-precision type that the op computed with; ``""`` if it used none.
        calls: Number of calls.
        effect: First-order effect of this op's own rounding on the loss: a norm of gradient times
            difference. Without a loss: on the outputs, relative to their norm. Infinity if a low result is
            not finite though the reference is; NaN if no gradient arrives, or none that is finite.
        error: Norm of the differences over norm of the references.
        max_abs: The largest difference.
        sqnr_db: Signal to quantization noise ratio, in decibel.
        ulp: Mean error in units in the last place of the low-precision type, in a sample.
        cosine: Cosine between low results and references.
        propagated_error: Like ``error``, with the whole model in low precision, so with errors of
            earlier calls; in a sample.
        range: The magnitudes of the references.
        fits: Whether inputs and results are within the range of the low-precision type.
        lost: Number of results that are finite in the reference only.
        underflow: Share of nonzero results that became zero, in a sample.
        flips: Share of integer results, such as indices, that differ; NaN if there are none.
        flops: Floating-point operations in low precision.
        bytes: Bytes of inputs and results in low precision.
        exponents: Number of sampled reference values with each binary exponent, from -64 on.
        order: Position of the first call among the model's calls.
        unseen: Number of calls that round but whose results get no gradient, or one that is not finite;
            ``effect`` does not include them.
    """

    op: str
    module: str
    location: str
    cast_policy: str
    reason: str
    dtype: str
    calls: int
    effect: float
    error: float
    max_abs: float
    sqnr_db: float
    ulp: float
    cosine: float
    propagated_error: float
    range: Magnitudes
    fits: bool
    lost: int
    underflow: float
    flips: float
    flops: int
    bytes: int
    exponents: tuple[int, ...]
    order: int
    unseen: int = 0

    __repr__ = fielded


@renamed_fields(rel="error")
@dataclass(frozen=True, slots=True)
class ComparedGradient:
    """The effect of low precision on the gradient of one parameter.

    Attributes:
        name: Qualified name of the parameter.
        error: Norm of the difference over norm of the gradient in float32. NaN if the latter is not finite; 0
            if the gradient is zero up to rounding, such as that of a bias before a norm.
        cosine: Cosine between the two.
        is_finite: Whether the gradient in low precision is finite.
    """

    name: str
    error: float
    cosine: float
    is_finite: bool


def compared_sites(
    kept: Mapping[tuple[str, str, str], SiteNumbers], recorded: Iterable[Row], scale: float
) -> tuple[ComparedSite, ...]:
    """Returns the rows, largest effect first, from the records of the runs and the rows of `record`."""
    costs: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in recorded:
        if row.phase == "forward":
            key = (row.op, row.module, row.location)
            flops, count = costs.get(key, (0, 0))
            costs[key] = flops + row.flops, count + row.bytes
    numbers = _on_host(
        tensor
        for found in kept.values()
        for several in (
            *((each.numbers, each.exponents) for each in found.measured),
            *(each.effects for each in found.arrivals),
            *(found.propagated, found.inputs),
            [count for count, _ in found.flips],
        )
        for tensor in several
    )
    sites = [
        _site(key, found, numbers, costs.get(key, (0, 0)), scale) for key, found in kept.items()
    ]
    # By effect, or by error where that is unknown or zero.
    return tuple(
        sorted(
            sites,
            key=lambda site: (
                *(0.0 if math.isnan(each) else -each for each in (site.effect, site.error)),
                site.order,
            ),
        )
    )


def compared_gradients(found: Iterable[tuple[str, Tensor]]) -> tuple[ComparedGradient, ...]:
    """Returns the rows of gradients, the largest difference first."""
    norms = {name: of_parameter.tolist() for name, of_parameter in found}
    squares, whole = defaultdict[str, float](float), 0.0
    for name, (_, reference, _) in norms.items():
        if math.isfinite(reference):
            squares[name.rpartition(".")[0]] += reference**2
            whole += reference**2
    rows = []
    for name, (difference, reference, low) in norms.items():
        own = reference**2 if math.isfinite(reference) else 0.0
        # Of the module's other parameters, or of the model's if it has no others.
        beside = math.sqrt(
            max(squares[name.rpartition(".")[0]] - own, 0.0) or max(whole - own, 0.0)
        )
        # Zero up to rounding, where those of other parameters have this norm.
        is_small = reference <= _ZERO * beside and difference <= _HARMLESS * beside
        if is_small and reference < 2 * difference:
            difference = reference = low = 0.0  # noqa: PLW2901
        is_finite, error, cosine = math.isfinite(low), math.nan, math.nan
        if math.isfinite(reference):
            error = _ratio(difference, reference) if is_finite else math.inf
            cosine = _cosine(difference, reference, low) if is_finite else math.nan
        rows.append(ComparedGradient(name, error, cosine, is_finite))
    # Unknown errors, and infinite ones, come first.
    return tuple(sorted(rows, key=lambda row: (row.is_finite, row.error == row.error, -row.error)))


def _on_host(tensors: Iterable[Tensor]) -> dict[int, list[float]]:
    """Returns the values of tensors by their ``id``, each device being read once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    found: dict[int, list[float]] = {}
    for given in by_device.values():
        values = torch.cat([each.reshape(-1) for each in given]).tolist()
        start = 0
        for tensor in given:
            found[id(tensor)] = values[start : start + tensor.numel()]
            start += tensor.numel()
    return found


def _site(
    key: tuple[str, str, str],
    kept: SiteNumbers,
    numbers: Mapping[int, list[float]],
    costs: tuple[int, int],
    scale: float,
) -> ComparedSite:
    def of(tensors: Iterable[Tensor]) -> list[list[float]]:
        return [numbers[id(each)] for each in tensors]

    call, low_type = kept.low.call, kept.low.low_type
    results = [Sums(*each) for each in of(each.numbers for each in kept.measured)]
    sums = functools.reduce(Sums.plus, results, Sums())
    propagated = [math.hypot(*each) for each in zip(*of(kept.propagated), strict=True)]
    within = limits(low_type)
    most = max([sums.largest, *(each for (each,) in of(kept.inputs))])
    flips = sum(each for (each,) in of(count for count, _ in kept.flips))
    rounding = [any(results[i].difference for i in each.places) for each in kept.arrivals]
    arrived = [[value for (value,) in of(each.effects)] for each in kept.arrivals]
    known = [bool(each) and not any(map(math.isnan, each)) for each in arrived]
    effects = [*itertools.chain(*itertools.compress(arrived, known))]
    quotient = sums.reference / sums.difference if sums.difference else math.inf
    if sums.lost:
        effect = math.inf
    elif low_type is None or (not effects and results and sums.difference == 0):
        effect = 0.0
    else:
        effect = scale * math.hypot(*effects) if effects else math.nan
    return ComparedSite(
        op=key[0],
        module=key[1],
        location=key[2],
        cast_policy=call.cast_policy,
        reason=call.reason,
        dtype="" if low_type is None else long_name(low_type),
        calls=kept.calls,
        effect=effect,
        error=_ratio(sums.difference, sums.reference) if results else 0.0,
        max_abs=sums.max_abs,
        sqnr_db=20 * math.log10(quotient) if 0 < quotient < math.inf else quotient or -math.inf,
        ulp=sums.ulp / len(results) if results else 0.0,
        cosine=_cosine(sums.difference, sums.reference, sums.low) if results else 1.0,
        propagated_error=_ratio(*propagated) if propagated else math.nan,
        range=Magnitudes(sums.smallest, sums.largest),
        fits=within is None or (most <= within.max and not sums.lost),
        lost=int(sums.lost),
        underflow=_ratio(sums.underflow, sums.nonzero),
        flips=_ratio(flips, sum(size for _, size in kept.flips)) if kept.flips else math.nan,
        flops=costs[0],
        bytes=costs[1],
        exponents=tuple(
            [
                int(sum(each))
                for each in zip(*of(each.exponents for each in kept.measured), strict=True)
            ]
        ),
        order=kept.order,
        unseen=sum(
            rounds and not is_known for rounds, is_known in zip(rounding, known, strict=True)
        ),
    )


def _ratio(part: float, whole: float) -> float:
    """Returns ``part / whole``; 0 where both are."""
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def _cosine(difference: float, reference: float, low: float) -> float:
    """Returns the cosine by the law of cosines."""
    if not reference or not low:
        return 1.0 if reference == low else 0.0
    return max(-1.0, min(1.0, (reference**2 + low**2 - difference**2) / (2 * reference * low)))
