"""Which list decides an op that several lists name, or cover."""

from __future__ import annotations

import functools
import itertools

from .. import ops
from .decisions import YIELDING, Decision
from .lists.op_list import Listed


def resolve(bands: list[list[Listed]]) -> dict[str, Decision]:
    """Returns op -> decision.

    A band is a list of op lists. An earlier band outranks a later one. Within a band an operator's own line outranks that of the
    op that covers it. ``*`` comes after every named line of a low-precision or fp32 list.
    """
    decisions: dict[str, Decision] = {}
    yielding = [[each for each in band if _yields(each)] for band in bands]
    bands = [[each for each in band if not _yields(each)] for band in bands]
    for band in bands:
        _resolve_named(band, decisions)
    for listed in itertools.chain.from_iterable(bands):
        if listed.op_list.everything is not None:
            star = listed.decided(listed.op_list.everything)
            for name in _computing():
                if name not in listed.op_list.removed:
                    decisions.setdefault(name, star)
    for band in yielding:
        _resolve_named(band, decisions)
    return decisions


def _yields(listed: Listed) -> bool:
    return listed.decision.cast_policy in YIELDING


@functools.cache
def _computing() -> tuple[str, ...]:
    """Returns the ops that ``*`` means, in the order of the table."""
    return tuple(name for name in ops.table() if name in ops.computing())


def _resolve_named(band: list[Listed], decisions: dict[str, Decision]) -> None:
    """Adds the decisions of the named lines of ``band`` for ops that have none yet."""
    named = {
        name: (listed.decided(entry), listed.op_list)
        for listed in band
        for name, entry in listed.op_list.ops.items()
    }
    if not named:
        return
    for name, op in ops.table().items():
        covering: str | None = name
        while covering is not None and covering not in named:
            covering = op.covered_by if covering == name else ops.table()[covering].covered_by
        if covering is not None and name not in named[covering][1].removed:
            decisions.setdefault(name, named[covering][0])
    for name, (decision, _) in named.items():
        if ops.is_foreign(name):
            decisions.setdefault(name, decision)
