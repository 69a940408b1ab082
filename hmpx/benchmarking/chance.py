"""Whether ratios of times differ from 1 by more than chance: the sign test, of so many runs as there are.

Quartiles that leave out 1 do not show it: of variants that are all equal to fp32, with ten runs each, one
of four "is faster" by its quartiles in every seventh benchmark, and with three runs in nearly every second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

#: If a variant is as fast as another, so often it is held to be faster at most; for slower likewise.
LEVEL: Final = 1 / 64

#: With fewer runs even the same sign of all of them is not so rare.
FEWEST_RUNS: Final = 6

#: Nearer to 1 than this is equal: so much may come from a variant's place in its turn.
_EQUAL: Final = 0.01


def is_beyond_chance(ratios: Sequence[float]) -> bool:
    """Whether so many of the ratios are on one side of 1 that chance rarely does it."""
    count = len(ratios)
    on_a_side = max(
        sum(each < 1 - _EQUAL for each in ratios), sum(each > 1 + _EQUAL for each in ratios)
    )
    ways = sum(math.comb(count, each) for each in range(on_a_side, count + 1))
    return ways <= LEVEL * 2**count and 2 * on_a_side > count
