"""What is more and what is less: sets that are within others, and what a set may keep at most."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from .candidates import Kept, bare, is_following

#: Shares that differ by less are equal.
_EQUAL: Final = 1e-9


class Work(NamedTuple):
    """What a set keeps in fp32: what sets compete by.

    Attributes:
        share: The shares of the FLOPs and of the bytes, added up, and
        members: how many members.
    """

    share: float
    members: float

    def plus(self, other: Work) -> Work:
        """Returns the sum."""
        return Work(self.share + other.share, self.members + other.members)

    def is_within(self, other: Work) -> bool:
        """Whether it is less than another, or the same share with no more members."""
        if abs(self.share - other.share) <= _EQUAL:
            return self.members <= other.members
        return self.share < other.share


#: No bound.
ANYTHING: Final = Work(math.inf, math.inf)


def is_within(kept: Kept, other: Kept) -> bool:
    """Whether all members of a set are in another, following their inputs there or in fp32."""
    return all(each in other or (is_following(each) and bare(each) in other) for each in kept)
