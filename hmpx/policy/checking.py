"""Finds all faults of op lists and policy files, as messages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Final

import torch

from ..errors import HmpxError, HmpxWarning, OpListError, gathered
from .files import reading
from .lists.faults import (
    LEFT_OUT,
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
            try:
                read.append(Listed(read_list(path, kind), KINDS[kind].decision(torch.bfloat16)))
            except OpListError as error:
                faults.append(str(error))
    lists = [op_list for op_list, _ in read]
    conflicts = list(conflicting_lines(read))
    for find in (unknown_names, absent_names, repeated_lines):
        faults += find(lists, _MOST_CHECKED)
    idle = idle_lines(read)
    faults += gathered(idle, len(idle), _MOST_CHECKED)
    return faults + gathered(conflicts, len(conflicts), _MOST_CHECKED)


def _faults_of(path: str) -> list[str]:
    """Returns every fault of a policy file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HmpxWarning)
        try:
            load_policy(policy=path)
        except HmpxError as error:
            return str(error).splitlines()
    lines = [line.strip() for warning in caught for line in str(warning.message).splitlines()]
    lines += absent_names(reading.read_policy_file(path).op_lists(), _MOST_CHECKED)
    return [line for line in lines if line != LEFT_OUT]
