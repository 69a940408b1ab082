"""What searches ask, and how they are asked in turn."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from .candidates import Kept
from .evaluation import Outcome

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """A set that is to be evaluated.

    Attributes:
        kept: The set.
        phase: What it is asked for: see `Evaluation`.
        ahead: Sets that may be asked for next, the likeliest first.
    """

    kept: Kept
    phase: str
    ahead: tuple[Kept, ...] = ()


#: Yields what to evaluate, is sent what came of it, and returns a set.
Search = Generator[Ask, Outcome, Kept]

#: A part of a search, which is sent errors only.
Asking = Generator[Ask, float, T]


def noted(asking: Asking[T], outcomes: dict[Kept, Outcome]) -> Generator[Ask, Outcome, T]:
    """Passes on what is asked, puts what comes of it into ``outcomes``, and sends the errors."""
    try:
        asked = next(asking)
        while True:
            outcomes[asked.kept] = yield asked
            asked = asking.send(outcomes[asked.kept].error)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def by_errors(asking: Asking[Kept]) -> Search:
    """Returns a search of one that looks at errors only."""
    return noted(asking, {})
