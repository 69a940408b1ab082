"""Finds all faults of op lists and policy files, as messages."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping
from typing import Final

import torch

from ..errors import HmpxError, HmpxWarning, OpListError, PolicyFileError, gathered
from .files import reading
from .lists.faults import (
    absent_names,
    conflicting_lines,
    idle_lines,
    repeated_lines,
    unknown_names,
)
from .lists.kinds import KINDS
from .lists.op_list import MOST_KEPT, Listed
from .lists.sets import read_list
from .loading import load_policy

#: Faults of a kind that `check` returns.
_MOST_CHECKED: Final = MOST_KEPT

_LINE: Final = re.compile(r"(?P<file>.+?):(?P<line>\d+): ")

#: The last line of faults that are too many to be shown.
_MORE: Final = re.compile(r"and [\d,]+ more")


def check_files(paths: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Returns the faults of files as text; of very many the first, and how many more there are.

    Args:
        paths: Kind of list, or ``policy`` -> paths.
    """
    faults: list[str] = []
    read: list[Listed] = []
    for kind, files in paths.items():
        for path in files:
            if kind == "policy":
                faults += _faults_of(path)
                continue
            refused: list[OpListError] = []
            try:
                found = read_list(path, kind, refused)
                read.append(Listed(found, KINDS[kind].decision(torch.bfloat16)))
            except OpListError as error:
                refused.append(error)
            faults += map(str, refused)
    return _in_order([*faults, *_faults_of_lists(read)])


def _faults_of_lists(lists: list[Listed], *more: list[Listed]) -> list[str]:
    """Returns the faults of lists that are used together; ``more`` are those of sections."""
    together = [*lists, *itertools.chain.from_iterable(more)]
    op_lists = [op_list for op_list, _ in together]
    faults: list[str] = []
    for find in (unknown_names, absent_names, repeated_lines):
        faults += find(op_lists, _MOST_CHECKED)
    idle = idle_lines(together)
    faults += gathered(idle, len(idle), _MOST_CHECKED)
    conflicts = [each for band in (lists, *more) for each in conflicting_lines(band)]
    return faults + gathered(conflicts, len(conflicts), _MOST_CHECKED)


def _faults_of(path: str) -> list[str]:
    """Returns every fault of a policy file."""
    refused: list[PolicyFileError] = []
    try:
        source = reading.read_policy_file(path, refused)
    except HmpxError as error:
        return str(error).splitlines()
    low = source.low_precision_type or torch.bfloat16
    given, *by_section = [
        [Listed(op_list, KINDS[kind].decision(low)) for kind, op_list in lists.items()]
        for lists in (source.lists, *[each.lists for each in source.sections])
    ]
    faults = _faults_of_lists(given, *by_section)
    if refused:  # what is left out of the rest may be what it lacks
        return [*itertools.chain.from_iterable(str(each).splitlines() for each in refused), *faults]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HmpxWarning)
        try:
            load_policy(policy=source)
        except HmpxError as error:
            faults += [line for line in str(error).splitlines() if not _is_told(line, faults)]
    return [*source.notes, *faults]


def _is_told(line: str, faults: list[str]) -> bool:
    """Whether a line of an error says nothing new beside the faults that were found one by one."""
    return line in faults or (bool(faults) and _MORE.fullmatch(line) is not None)


def _in_order(faults: list[str]) -> list[str]:
    """Returns the faults of each file by its lines; files in the order in which they come up."""
    files: dict[str, int] = {}

    def place(fault: str) -> tuple[int, int]:
        found = _LINE.match(fault)
        if found is None:
            return len(faults), 0  # "and 5 more"
        return files.setdefault(found["file"], len(files)), int(found["line"])

    return sorted(faults, key=place)
