"""The names of rounding modes, and of what becomes of values that are too large."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Overflow: TypeAlias = Literal["inf", "nan", "saturate"]

#: What values beyond the largest may become.
OVERFLOWS: Final[tuple[Overflow, ...]] = ("inf", "nan", "saturate")

#: In the order of the compiled kernels' numbers.
ROUNDING_MODES: Final = ("nearest", "toward_zero", "up", "down", "nearest_away", "stochastic")

#: Steps of the longest history of amaxes.
MOST_STEPS: Final = 65536
