"""Measures with noise: paired samples, more of them as long as they leave open whether a set passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on; of the normal beyond.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL: Final = 1.96


@dataclass(frozen=True)
class Sampling:
    """How often a measure is taken.

    Attributes:
        most: Most samples of one set.
    """

    most: int = 1


def sampled(difference: Callable[[int], float], tolerance: float, sampling: Sampling) -> float:
    """Returns the upper end of what the mean of paired differences may be; infinite if one is not finite.

    1, 2, 4, ... samples are taken until it is clear whether the mean is within the tolerance; what stays
    undecided lies above it.

    Args:
        difference: Number of a sample -> what low precision loses there, with the same seed.
        tolerance: The largest mean that passes.
        sampling: How many samples may be taken.
    """
    found: list[float] = []
    goal = 1
    while True:
        while len(found) < goal:
            value = difference(len(found))
            if not math.isfinite(value):
                return math.inf
            found.append(value)
        mean = statistics.fmean(found)
        if sampling.most == 1:
            return mean
        margin = _margin(found)
        if goal > 1 and (mean + margin <= tolerance or mean - margin > tolerance):
            return mean + margin if mean + margin <= tolerance else mean
        if goal >= sampling.most:
            return mean + margin
        goal = min(2 * goal, sampling.most)


def _margin(values: list[float]) -> float:
    """Returns half the width of the mean's 95 % interval."""
    freedom = len(values) - 1
    if not freedom:
        return math.inf
    quantile = _T[freedom - 1] if freedom <= len(_T) else _NORMAL
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
