"""Faults of op lists: names that are unknown, lines that repeat, conflict, or have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from ... import ops
from ...errors import MOST_SHOWN, OpListError, gathered, shown
from ...warning import warn
from ..decisions import ROLES, YIELDING, CastPolicy, Decision
from .op_list import Entry, Listed, OpList
from .sets import SHIPPED

#: Stands above the faults of names in a warning.
LEFT_OUT: Final = "left out of the op lists:"

_OPERATORS: Final = "torch.ops.aten."


def unknown_names(op_lists: Sequence[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for the lines that do not name an op that can be cast."""
    faults = (
        f"{entry.where}: {_why_unknown(entry.text)}"
        for op_list in op_lists
        for entry in op_list.unknown
    )
    return gathered(faults, sum(op_list.unknown_count for op_list in op_lists), most)


def absent_names(op_lists: Iterable[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for lines that name functions which other libraries don't seem to have.

    Args:
        op_lists: Lists; shipped ones are passed over, since their libraries need not be installed.
        most: How many messages to return.
    """
    faults = [
        f"{entry.where}: {why}"
        for op_list in op_lists
        if not op_list.is_shipped
        for name, entry in op_list.ops.items()
        if ops.is_foreign(name)
        and not entry.where.startswith(SHIPPED)
        and (why := ops.missing(name) or ops.lacking(name))
    ]
    return gathered(faults, len(faults), most)


def repeated_lines(op_lists: Sequence[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for the lines that are in their list twice."""
    faults = (
        f"{entry.where}: {shown(entry.text)} is already in this list, at {earlier.where}; "
        "remove one of the lines"
        for op_list in op_lists
        for entry, earlier in op_list.repeated
    )
    return gathered(faults, sum(op_list.repeated_count for op_list in op_lists), most)


def _idle(op_list: OpList, *, is_relative: bool) -> list[str]:
    """Returns messages for the lines of a user's list that can never change anything.

    ``iadd`` beside ``add``, which covers it, is fine.
    """
    return [
        f"{entry.where}: {shown(entry.text)} has no effect: "
        + ("it has only one input" if is_relative else "the dtype of its output decides")
        + "; remove the line"
        for name, entry in op_list.ops.items()
        if not (op_list.is_shipped or entry.where.startswith(SHIPPED))
        and not ops.is_decisive(name, is_relative=is_relative)
        and ops.covering(name) not in op_list.ops
        and not (is_relative and (entry.accumulate_dtype or entry.output_dtype))
    ]


def _idle_roles(op_list: OpList) -> list[str]:
    """Returns messages for formats by role on a user's lines that round nothing."""
    return [
        f"{entry.where}: {role}= of {shown(entry.text)} has no effect: {why}; leave it out"
        for name, entry in op_list.ops.items()
        if not (op_list.is_shipped or entry.where.startswith(SHIPPED))
        for role in ROLES
        if getattr(entry, role) is not None and (why := ops.idle_roles(name).get(role))
    ]


def _misread(op_list: OpList) -> Iterator[str]:
    """Yields messages for a user's lines that probably mean something else than they are read as."""
    for name, entry in op_list.ops.items():
        if entry.text.startswith(_OPERATORS) and not ops.is_foreign(name):
            yield (
                f"{entry.where}: {shown(entry.text)} is read as {name!r}: torch's functions are cast, "
                f"calls of {_OPERATORS}{name} are not; write {name!r}"
            )
        elif entry.text == "all" and len(op_list.ops) == 1:
            yield f"{entry.where}: 'all' is read as the op torch.all; write '*' for every other op"


def _why_unknown(text: str) -> str:
    bare = text.removeprefix("-")
    if bare in ops.facts("became"):
        now = ops.facts("became")[bare][0]
        return f"{shown(bare)} was an op of Gaudi's torch; torch's own is {now!r}"
    name = ops.resolve(bare)
    if name is not None and not ops.is_castable(name):
        return f"{bare!r} computes nothing from tensors, so there is nothing to cast"
    if name is not None:
        return f"{text!r} removes an op that no earlier line holds"
    return ops.unknown(bare)


def report(
    lists: list[Listed],
    *more: list[Listed],
    strict: bool,
    is_from_files: bool = True,
) -> None:
    """Raises errors or warns about the faults of lists that are used together.

    Args:
        lists: The lists of a policy.
        *more: Those of each of its sections.
        strict: Whether unknown names are an error.
        is_from_files: Whether to warn of lines without effect and, with ``strict``, raise an error for
            libraries that are not installed.
    """
    by_band: dict[bool, list[Listed]] = {}
    for each in lists:
        by_band.setdefault(each.op_list.is_shipped, []).append(each)
    lists = [*lists, *chain.from_iterable(more)]
    op_lists = [op_list for op_list, _ in lists]
    unknown = unknown_names(op_lists)
    if strict:
        faults = unknown + (absent_names(op_lists) if is_from_files else [])
        if faults:
            raise OpListError("\n".join(faults))
    conflicts = list(
        chain.from_iterable(conflicting_lines(band) for band in (*by_band.values(), *more))
    )
    if conflicts:
        raise OpListError("\n".join(gathered(conflicts, len(conflicts))))
    if unknown:
        warn(f"{LEFT_OUT}\n  " + "\n  ".join(unknown))
    repeated = repeated_lines(op_lists)
    if repeated:
        warn("\n".join(repeated))
    idle = idle_lines(lists)
    if idle and is_from_files:
        warn("\n".join(gathered(idle, len(idle))))


def idle_lines(lists: Iterable[Listed]) -> list[str]:
    """Returns messages for lines that can never change anything, or not what they name."""
    return [
        message
        for op_list, decision in lists
        if decision.cast_policy is not CastPolicy.PASS
        for message in chain(
            _idle(op_list, is_relative=decision.cast_policy in YIELDING),
            _idle_roles(op_list),
            _misread(op_list),
        )
    ]


def conflicting_lines(lists: list[Listed]) -> Iterator[str]:
    """Yields a message for each op that two lists claim."""
    seen: dict[str, tuple[Entry, Decision]] = {}
    for listed in lists:
        if listed.decision.cast_policy in YIELDING:
            continue
        for name, entry in listed.op_list.ops.items():
            said = listed.decided(entry)
            other = seen.setdefault(name, (entry, said))
            if other[1] != said:
                yield (
                    f"{entry.where}: {shown(entry.text)} is in two lists: it is the op {name!r}, as "
                    f"{shown(other[0].text)} at {other[0].where} is; keep one of the lines"
                )
        everything = listed.op_list.everything
        if everything is not None:
            said = listed.decided(everything)
            other = seen.setdefault("*", (everything, said))
            if other[1] != said:
                yield (
                    f"{everything.where}: '*' is in two lists, at {other[0].where} too; "
                    "keep one of the lines"
                )
