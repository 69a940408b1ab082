"""What is more and what is less: sets that are within others, and what a set may keep at most."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from .candidates import Kept, bare, is_following

#: Shares that differ by less are equal.
_EQUAL: Final = 1e-9


class Most(NamedTuple):
    """What a set may keep in fp32 at most, or what it keeps.

    Attributes:
        flops: A share of the FLOPs, and
        bytes: of the bytes.
        members: How many members.
    """

    flops: float
    bytes: float
    members: float

    def plus(self, other: Most) -> Most:
        """Returns the sum."""
        return Most(
            self.flops + other.flops, self.bytes + other.bytes, self.members + other.members
        )

    def is_within(self, other: Most) -> bool:
        """Whether it is no more than another in any respect."""
        return all(one <= most + _EQUAL for one, most in zip(self, other, strict=True))

    def least(self, other: Most) -> Most:
        """Returns the lesser in each respect."""
        return Most(*map(min, self, other))


#: No bound.
ANYTHING: Final = Most(math.inf, math.inf, math.inf)


def is_within(kept: Kept, other: Kept) -> bool:
    """Whether all members of a set are in another, following their inputs there or in fp32."""
    return all(each in other or (is_following(each) and bare(each) in other) for each in kept)
