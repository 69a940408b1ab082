"""Everything that hmpx raises or warns with on a user's mistake.

Knows nothing of torch. Each message has three parts: what is wrong, where, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HmpxError(Exception):
    """Base of every error that hmpx raises deliberately."""


class OpListError(HmpxError):
    """An op list can't be read, or says two things about one op."""


class OptionError(HmpxError):
    """An argument of a public function has a value that it can't have."""


class PolicyFileError(HmpxError):
    """A policy file can't be read, or says what no policy can be."""


class RuleError(HmpxError):
    """A rule raised an error, or returned what is no decision."""


class FreezeError(HmpxError):
    """A model can't be frozen, or a frozen one can't do what was asked of it."""


class KernelsError(HmpxError):
    """Compiled kernels can't be built, kept or loaded; rounding by torch ops needs none."""


class HmpxWarning(UserWarning):
    """Something in the user's input was left out, and hmpx went on without it."""


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Returns ``"; did you mean 'matmul'?"`` for the nearest candidate, or ``""``."""
    nearest = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
