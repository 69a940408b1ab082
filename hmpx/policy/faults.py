"""Faults of op lists and policy files: unknown names; lines that repeat, conflict or do nothing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

import torch

from .. import ops
from ..errors import (
    MOST_SHOWN,
    HmpxError,
    HmpxWarning,
    OpListError,
    PolicyFileError,
    gathered,
    shown,
    warn,
)
from .decisions import SHIPPED, CastPolicy, Decision
from .lists import read_list
from .op_lists import OPTIONS_NAME, Entry, Listed, OpList, listed

_OPERATORS: Final = "torch.ops.aten."

#: How many faults of each kind `check_files` shows.
_MOST_FAULTS: Final = 100

#: The place at the start of a fault's text, and the last line of a list of faults that was cut.
_LINE: Final = re.compile(r"(?P<file>.+?):(?P<line>\d+): ")
_MORE: Final = re.compile(r"and [\d,]+ more")


def report(
    lists: list[Listed],
    *more: list[Listed],
    strict: bool,
    is_from_files: bool = True,
) -> None:
    """Raises errors or warns about the faults of a policy's lists and, in ``more``, of its sections'."""
    unknown, absent, repeated, idle, conflicts = _found(lists, *more)
    if not is_from_files:
        absent = idle = []
    if strict and unknown + absent:
        raise OpListError("\n".join(unknown + absent))
    if conflicts:
        raise OpListError("\n".join(conflicts))
    if unknown:
        warn("left out of the op lists:\n  " + "\n  ".join(unknown))
    for messages in (repeated, idle):
        if messages:
            warn("\n".join(messages))


def _found(lists: list[Listed], *more: list[Listed], most: int = MOST_SHOWN) -> list[list[str]]:
    """Returns the faults of lists that are used together: for each kind the first ones, and a count."""
    together = [*lists, *chain.from_iterable(more)]
    op_lists = [op_list for op_list, _ in together]
    shipped = [each for each in lists if each.op_list.is_shipped]
    own = [each for each in lists if not each.op_list.is_shipped]
    conflicts = chain.from_iterable(map(_conflicting_lines, (own, shipped, *more)))
    absent = [  # of other libraries, which don't seem to have them
        f"{entry.where}: {why}"
        for name, entry in chain.from_iterable(map(_own_lines, op_lists))
        if ops.is_foreign(name) and (why := ops.missing(name) or ops.lacking(name))
    ]
    found = map(list, (absent, _idle_lines(together), conflicts))
    absent, idle, conflicting = [gathered(each, len(each), most) for each in found]
    unknown, repeated = unknown_names(op_lists, most), repeated_lines(op_lists, most)
    return [unknown, absent, repeated, idle, conflicting]


# --- each kind of fault ------------------------------------------------------------------------


def unknown_names(op_lists: Iterable[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for the lines that do not name an op that can be cast."""
    entries = [entry for each in op_lists for entry in each.unknown]
    faults = (f"{entry.where}: {_why_unknown(entry.text)}" for entry in entries)
    return gathered(faults, len(entries), most)


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


def repeated_lines(op_lists: Iterable[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for the lines that occur twice in their list."""
    lines = [line for each in op_lists for line in each.repeated]
    faults = (
        f"{where}: {shown(text)} is already in this list, at {earlier}; remove one of the lines"
        for text, where, earlier in lines
    )
    return gathered(faults, len(lines), most)


def _own_lines(op_list: OpList) -> Iterator[tuple[str, Entry]]:
    """Yields the user's ops and lines; shipped lists may name functions that are not installed."""
    if not op_list.is_shipped:
        for name, entry in op_list.ops.items():
            if not entry.where.startswith(SHIPPED):
                yield name, entry


def _idle_lines(lists: Iterable[Listed]) -> Iterator[str]:
    """Yields messages for lines without effect, and those that the user probably meant differently."""
    for each in lists:
        if each.decision.cast_policy is CastPolicy.PASS:
            continue
        why = "it has only one input" if each.yields else "the dtype of its output decides"
        for name, entry in _own_lines(each.op_list):
            if (
                not ops.is_decisive(name, is_relative=each.yields)
                and ops.covering(name) not in each.op_list.ops  # ``iadd`` alongside ``add``
                and not (each.yields and entry.options)
            ):
                yield f"{entry.where}: {shown(entry.text)} has no effect: {why}; remove the line"
            if entry.text.startswith(_OPERATORS) and not ops.is_foreign(name):
                yield (
                    f"{entry.where}: {shown(entry.text)} is read as {name!r}: torch's functions are "
                    f"cast, calls of {_OPERATORS}{name} are not; write {name!r}"
                )
            elif entry.text == "all" and len(each.op_list.ops) == 1:
                yield f"{entry.where}: 'all' is read as the op torch.all; write '*' for every other op"


def _conflicting_lines(lists: Iterable[Listed]) -> Iterator[str]:
    """Yields a message for each op that two lists claim."""
    seen: dict[str, tuple[Entry, Decision]] = {}
    for each in lists:
        if each.yields:
            continue
        named = list(each.op_list.ops.items())
        if each.op_list.everything is not None:
            named.append(("*", each.op_list.everything))
        for name, entry in named:
            said = each.decided(entry)
            other, other_said = seen.setdefault(name, (entry, said))
            if other_said == said:
                continue
            where = f"{entry.where}: {shown(entry.text)} is in two lists"
            if name == "*":
                yield f"{where}, at {other.where} too; keep one of the lines"
            else:
                yield (
                    f"{where}: it is the op {name!r}, as {shown(other.text)} at {other.where} is; "
                    "keep one of the lines"
                )


# --- all faults of files -----------------------------------------------------------------------


def check_files(paths: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Returns the first faults of files, kind of list or ``policy`` -> paths, and how many more there are."""
    faults: list[str] = []
    read: list[Listed] = []
    for kind, files in paths.items():
        for path in files:
            if kind == "policy":
                faults += _faults_of_policy(path)
                continue
            refused: list[OpListError] = []
            try:
                read += listed({kind: read_list(path, kind, refused)}, torch.bfloat16)
            except OpListError as error:
                refused.append(error)
            faults += gathered(map(str, refused), len(refused), _MOST_FAULTS)
    return _in_order([*faults, *chain.from_iterable(_found(read, most=_MOST_FAULTS))])


def _faults_of_policy(path: str) -> list[str]:
    from .files import read_options, read_policy_file  # yaml
    from .loading import load_policy

    refused: list[PolicyFileError] = []
    try:
        if Path(path).name == OPTIONS_NAME:
            read_options(path)
            return []
        source = read_policy_file(path, refused)
    except HmpxError as error:
        return str(error).splitlines()
    low = source.low_precision_type or torch.bfloat16
    read = [listed(lists, low) for lists in (source.lists, *[s.lists for s in source.sections])]
    faults = [*chain.from_iterable(_found(*read, most=_MOST_FAULTS))]
    if refused:  # without the refused parts, the rest may seem incomplete
        return [*chain.from_iterable(str(each).splitlines() for each in refused), *faults]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HmpxWarning)
        try:
            load_policy(policy=source)
        except HmpxError as error:
            faults += [
                line
                for line in str(error).splitlines()
                if line not in faults and not (faults and _MORE.fullmatch(line))
            ]
    return [*source.notes, *faults]


def _in_order(faults: list[str]) -> list[str]:
    """Sorts the faults of each file by line; files stay in the order of their first fault."""
    files: dict[str, int] = {}

    def place(fault: str) -> tuple[int, int]:
        found = _LINE.match(fault)
        if found is None:
            return len(faults), 0  # "and 5 more"
        return files.setdefault(found["file"], len(files)), int(found["line"])

    return sorted(faults, key=place)
