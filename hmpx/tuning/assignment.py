"""Policies that give each spot its type: lists for whole ops, sections for modules.

An op that follows its inputs is only in shipped lists with such a rule: the widest type among the inputs, or
that of the first. See `_RELATIVE`.
"""

from __future__ import annotations

import functools
import glob
from collections.abc import Iterable, Mapping
from typing import Any, Final

from .. import ops
from ..errors import PolicyFileError
from ..policy import CastPolicy, Policy, load_policy
from .candidates import FOLLOWS, Candidate, Kept, Spot, parted

#: The type of kept ops.
FP32: Final = "float32"


def assigned(candidates: Iterable[Candidate], kept: Kept, low_type: str) -> dict[Spot, str]:
    """Maps each spot to the name of its type: ``low_type`` unless its candidate is a member of ``kept``."""
    by_name = {each.name: each for each in candidates}
    types = {spot: low_type for each in by_name.values() for spot in each.spots}
    for member in kept:
        name, other = parted(member)
        types |= dict.fromkeys(by_name[name].spots, other or FP32)
    return types


def policy_of(types: Mapping[Spot, str], low_type: str) -> Policy:
    """Returns the policy by which each spot computes in its type; the default lists decide other ops."""
    return load_policy(policy=policy_source(types, low_type))


def policy_source(types: Mapping[Spot, str], low_type: str) -> dict[str, Any]:
    """Returns that policy in the form of a policy file."""
    base = {}
    for op in sorted({op for op, _ in types}):  # its type in modules that no section names
        found = {each for (name, _), each in types.items() if name == op}
        base[op] = found.pop() if len(found) == 1 else types.get((op, ""), low_type)
    placed = _placed(types, base)
    alike: dict[tuple[int, tuple[tuple[str, str], ...]], list[str]] = {}
    for module in sorted(placed, key=lambda each: (-_depth(each), each)):
        own = tuple(sorted(placed[module].items()))
        alike.setdefault((_depth(module), own), []).append(module)
    sections = [
        {"module": [glob.escape(module) for module in same], **_lists(dict(own), low_type)}
        for (_, own), same in alike.items()
    ]
    lists: dict[str, Any] = dict(
        _lists({op: each for op, each in base.items() if each != FOLLOWS}, low_type)
    )
    for op in [op for op, each in base.items() if each == FOLLOWS]:
        _make_follow(op, lists)
    source = {"low_precision_type": low_type, "lists": "hmpx", **lists}
    return {**source, "sections": sections} if sections else source


def reads_first(op: str) -> bool:
    """Whether an op that follows its inputs follows the first one, like a matrix product."""
    return _relative(op) is CastPolicy.FIRST


@functools.cache
def may_follow(op: str) -> bool:
    """Whether a policy can make an op follow its inputs: not if other ops' lines alone decide it."""
    if ops.is_foreign(op):
        return False
    try:
        decided = policy_of({(op, ""): FOLLOWS}, "bfloat16")[op].cast_policy
    except PolicyFileError:
        return False
    return decided is _relative(op)


@functools.cache
def _relative(op: str) -> CastPolicy:
    """Returns the decision for an op that is in no low-precision or fp32 list."""
    nothing = {"remove": ["*"]}
    return load_policy(policy={"lists": "hmpx", "low": nothing, "fp32": nothing})[op].cast_policy


def _make_follow(op: str, lists: dict[str, Any]) -> None:
    """Removes an op from the shipped lists that decide otherwise."""
    shipped = load_policy()[op].cast_policy
    if shipped is _relative(op):
        return
    kind = {CastPolicy.LOW: "low", CastPolicy.FP32: "fp32"}[shipped]
    is_promoted = _relative(op) is CastPolicy.WIDEST and ops.covering(op) is not None
    if _relative(op) is CastPolicy.PASS or is_promoted:
        lists.setdefault("pass", []).append(op)  # torch promotes it
        return
    found = lists.get(kind, [])
    lists[kind] = found if isinstance(found, dict) else {"add": found, "remove": []}
    lists[kind]["remove"].append(op)


def _placed(types: Mapping[Spot, str], base: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns module -> op -> type, where it differs from the enclosing modules."""
    placed: dict[str, dict[str, str]] = {}
    for (op, module), wanted in sorted(types.items(), key=lambda each: _depth(each[0][1])):
        if module and _inherited(op, module, placed, base) != wanted:
            placed.setdefault(module, {})[op] = wanted
            for other in sorted((ops.covered(op) - {op}) & base.keys()):  # a line covers these, too
                found = types.get((other, module)) or _inherited(other, module, placed, base)
                placed[module].setdefault(other, found)
    return placed


def _inherited(
    op: str, module: str, placed: Mapping[str, Mapping[str, str]], base: Mapping[str, str]
) -> str:
    """Returns an op's type in a module by the sections of that module and the enclosing ones."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        found = placed.get(".".join(parts[:count]), {}).get(op)
        if found is not None:
            return found
    return base[op]


def _depth(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _lists(types: Mapping[str, str], low_type: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for op, each in types.items():
        if each == FOLLOWS:
            found.setdefault(_relative(op).value, []).append(op)
        elif each == FP32:
            found.setdefault("fp32", []).append(op)
        else:
            found.setdefault("low", []).append(op if each == low_type else f"{op} {each}")
    order = ("low", "fp32", "widest", "first", "pass")
    return {key: found[key] for key in order if key in found}
