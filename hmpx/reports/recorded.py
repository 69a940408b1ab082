"""`Report.policy`: the types in which ops ran, as a policy."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from .. import ops
from ..errors import warn
from ..policy import CastPolicy, Decision, Policy, Section, parse_low_type
from ..tensors import COMPUTED
from .cells import located
from .rows import WIDE, Row


def recorded_policy(rows: Iterable[Row]) -> Policy:
    """Returns the policy under which ops run in the types of the rows, the most expensive first.

    Ops that ran in the widest type of their inputs are in no list.
    """
    calls = [
        row
        for row in rows
        if row.phase != "backward" and row.dtype and ops.is_castable(row.op) and row.input_dtypes
    ]
    decided = {row.op for row in calls if row.dtype != _widest(row.input_dtypes) or _output(row)}
    found: dict[str, dict[str, Decision]] = {}  # op -> module -> decision
    for row in calls:
        if row.op not in decided or row.dtype == "float64":
            continue
        where = f"{row.reason}, {located(row.location)}"
        decision = (
            Decision(CastPolicy.FP32, output_dtype=_output(row), reason=where)
            if row.dtype in WIDE
            else Decision(
                CastPolicy.LOW, parse_low_type(row.dtype), output_dtype=_output(row), reason=where
            )
        )
        kept = found.setdefault(row.op, {}).setdefault(row.module, decision)
        if kept != decision:
            warn(
                f"{located(row.location)}: {row.op} ran in {row.dtype} here, and elsewhere in the module "
                f"{row.module or 'outermost'} in another type, which the policy has; a rule could tell them apart"
            )
    common = {op: each for op, by_module in found.items() for each in by_module.values()}
    several = {op for op, by_module in found.items() if len({*by_module.values()}) > 1}
    by_module: dict[str, dict[str, Decision]] = {}
    for op in several:
        for module, decision in found[op].items():
            by_module.setdefault(module, {})[op] = decision
    deepest = sorted(by_module, key=lambda module: -len(module.split(".")) if module else 1)
    sections = [
        Section(by_module[module], module=(re.sub(r"([*?[])", r"[\1]", module),))
        for module in deepest
    ]
    low = next((row.dtype for row in calls if row.dtype not in WIDE), torch.bfloat16)
    default = {op: each for op, each in common.items() if op not in several}
    return Policy(default, parse_low_type(low), tuple(sections))


def _widest(dtypes: Iterable[str]) -> str:
    """Returns the dtype to which floating ones promote, by name."""
    names = {*dtypes}
    return next(iter(names)) if len(names) == 1 else "float64" if "float64" in names else "float32"


def _output(row: Row) -> torch.dtype | None:
    """Returns the dtype to which a decision of hmpx's casts the results of a call; None for none."""
    returned = {*row.output_dtypes}
    usual = row.dtype if hasattr(torch, row.dtype) else _widest(row.input_dtypes)
    if row.cast_policy not in {"LOW", "FP32"} or len(returned) != 1 or returned == {usual}:
        return None
    dtype = getattr(torch, returned.pop(), None)
    return dtype if dtype in COMPUTED else None
