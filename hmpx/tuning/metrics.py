"""Error of one batch's outputs in low precision against fp32, computed in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import OptionError, noted, raised_here, shown
from ..tensors import Opaque, floating_parts, parts_of

#: Metrics with a name.
METRICS: Final = ("relative_l2", "loss", "kl")


def relative_l2(found: Any, expected: Any) -> float:
    """Returns the L2 norm of the difference over that of the fp32 output, of all tensors together.

    Equal infinities count as equal. A model without floating-point tensors is compared by its Python
    floats; without these, by the share of elements that differ.
    """
    references = floating_of(expected)
    if not references:
        return _disagreement(_exact_of(found), _exact_of(expected))
    difference = norm = 0.0
    for low, high in _pairs(floating_of(found), references):
        differing = torch.where(low == high, 0, low - high)
        difference += float(differing.abs().square().sum())
        norm += float(torch.where(high.isfinite(), high, 0).abs().square().sum())
    return math.sqrt(ratio(difference, norm))


def kl(found: Any, expected: Any) -> float:
    """Returns the mean Kullback-Leibler divergence, in nats, of softmaxed logits from those in fp32.

    Logits are the output's attribute ``logits``, else its first floating-point tensor;
    classes are their last dimension.
    """
    ((low, high),) = _pairs([_logits(found)], [_logits(expected)])
    p, q = torch.log_softmax(high, -1), torch.log_softmax(low, -1)
    gap = torch.where(p == q, 0, p - q)  # masked classes are -inf in both
    rows = torch.where(p.exp() == 0, 0, p.exp() * gap).sum(-1)
    return max(float(rows.mean()), 0.0) if rows.numel() else 0.0


def ratio(difference: float, norm: float) -> float:
    """Returns a difference relative to a norm; infinity if that is zero, or the difference not finite."""
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else (math.inf if difference else 0.0)


def number(name: str, function: Callable[..., Any], *args: Any) -> float:
    """Calls the user's function and returns its result as a float; its errors pass, with a note."""
    try:
        value = function(*args)
    except Exception as error:
        noted(error, f"hmpx.tune: {name} raised it")
        raise
    try:
        return float(value)
    except raised_here(TypeError, ValueError, RuntimeError):
        raise OptionError(
            f"{name} must return a number or a tensor with one element, not {shown(value)}"
        ) from None


def loss_of(output: Any) -> Any:
    """Returns the output's attribute ``loss``."""
    loss = getattr(output, "loss", None)
    if loss is None:
        raise OptionError("metric='loss' needs a loss_fn: the model returns no attribute loss")
    return loss


def floating_of(value: Any) -> list[Tensor]:
    """Returns the floating-point numbers in ``value``: of tensors and arrays, else Python's."""
    return [*floating_parts(parts_of(value)).values()]


def unseen_of(value: Any) -> list[str]:
    """Returns the places in ``value`` that `relative_l2` ignores."""
    parts = list(parts_of(value))
    is_compared = floating_parts(parts)
    return [
        each.where
        for each in parts
        if isinstance(each.value, Opaque)
        or (is_compared and isinstance(each.value, Tensor) and each.where not in is_compared)
    ]


def _exact_of(value: Any) -> list[Any]:
    """Returns the integers and bools in ``value``: of tensors and arrays, else plain values."""
    parts = [each.value for each in parts_of(value) if not isinstance(each.value, Opaque)]
    return [each for each in parts if isinstance(each, Tensor)] or parts


def _pairs(found: list[Tensor], expected: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns both as float64, with matching shapes."""
    if len(found) != len(expected):
        raise OptionError(
            f"the model returns {len(found)} tensors in low precision and {len(expected)} in fp32; "
            "tune compares them one by one"
        )
    pairs = [*zip(found, expected, strict=True)]
    for low, high in pairs:
        if low.shape != high.shape:
            raise OptionError(
                f"the model returns shape {tuple(low.shape)} in low precision and {tuple(high.shape)} in "
                "fp32; tune compares outputs one by one"
            )
    return [(low.detach().double(), high.detach().double()) for low, high in pairs]


def _disagreement(found: list[Any], expected: list[Any]) -> float:
    if len(found) != len(expected):
        return 1.0
    differing = elements = 0
    for low, high in zip(found, expected, strict=True):
        if not (isinstance(low, Tensor) and isinstance(high, Tensor)):
            elements, differing = elements + 1, differing + (low != high)
            continue
        elements += high.numel()
        differing += high.numel() if low.shape != high.shape else int((low != high).sum())
    return differing / elements if elements else 0.0


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    found = [logits] if isinstance(logits, Tensor) else floating_of(output)
    if not found:
        raise OptionError(
            "metric='kl' needs logits, but the model returns no floating-point tensor"
        )
    return found[0]


#: Fewest batches for which `limit` looks beyond the worst of them.
LEAST_BATCHES: Final = 5

#: The 95 % quantile of the normal distribution.
_QUANTILE: Final = 1.645

#: Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on; the last is the normal's.
_MEAN: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 1.96)


def limit(errors: list[float]) -> float:
    """Returns the error that 95 % of similar batches stay below, with 95 % confidence; at least the largest of these.

    It is the upper tolerance limit of normal errors or of lognormal ones, which are skewed, whichever is larger (Natrella,
    Experimental Statistics, 1963, section 2-5). Of fewer than `LEAST_BATCHES` errors it is the largest.
    """
    count, worst = len(errors), max(errors)
    if count < LEAST_BATCHES or not math.isfinite(worst):
        return worst
    a = 1 - _QUANTILE**2 / (2 * (count - 1))
    b = _QUANTILE**2 * (1 - 1 / count)
    factor = (_QUANTILE + math.sqrt(_QUANTILE**2 - a * b)) / a

    def upper(values: list[float]) -> float:
        return statistics.fmean(values) + factor * statistics.stdev(values)

    skewed = math.exp(upper([*map(math.log, errors)])) if min(errors) > 0 else 0.0
    return max(worst, upper(errors), skewed)


def sampled(difference: Callable[[int], float], tolerance: float, most: int) -> float:
    """Returns an upper bound for the mean of paired differences; infinite if one is not finite.

    Takes 1, 2, 4, ... samples, at ``most``, until it is clear whether the mean is within the tolerance. An
    undecided mean counts as above it.
    """
    found: list[float] = []
    goal = 1
    while True:
        found += [difference(index) for index in range(len(found), goal)]
        if not all(map(math.isfinite, found)):
            return math.inf
        mean = statistics.fmean(found)
        if goal > 1:  # half the width of the mean's 95 % interval
            quantile = _MEAN[min(goal - 1, len(_MEAN)) - 1]
            margin = quantile * statistics.stdev(found) / math.sqrt(goal)
            if mean - margin > tolerance:
                return mean
            if goal == most or mean + margin <= tolerance:
                return mean + margin
        elif most == 1:
            return mean
        goal = min(2 * goal, most)
