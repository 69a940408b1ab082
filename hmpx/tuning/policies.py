"""Policies by which a search evaluates sets, and the one that shows what a program calls."""

from __future__ import annotations

import functools
import glob
from collections.abc import Mapping
from typing import Any, Final

from .. import ops
from ..errors import PolicyFileError
from ..policy import DENY, CastPolicy, Decision, Policy, load_policy

#: A call site of an op: its name, and the module's qualified name; ``""`` outside any module.
Spot = tuple[str, str]

#: The type of ops that are kept in fp32.
FP32: Final = "float32"

#: The type of ops that are in low precision only if all their inputs are, and else in fp32.
FOLLOWS: Final = "follows"


def observing_policy() -> Policy:
    """Returns a policy that shows each op of an fp32 program and changes nothing.

    Python functions are seen by the ops that they call. Those that call something that can't be patched, as
    ``Tensor.__rsub__`` does, are listed themselves.
    """
    is_listed = ops.facts("python_level")
    listed = [
        name
        for name in ops.computing()
        if any(
            site.is_python
            and (
                site.attribute.startswith("__") or f"{site.namespace}.{site.attribute}" in is_listed
            )
            for site in ops.table()[name].sites
        )
    ]
    return Policy({name: Decision(DENY) for name in sorted(listed)})


def policy_of(types: Mapping[Spot, str], low_type: str) -> Policy:
    """Returns the policy by which each spot computes in its type; the default lists decide other ops."""
    return load_policy(policy=policy_source(types, low_type))


def policy_source(types: Mapping[Spot, str], low_type: str) -> dict[str, Any]:
    """Returns that policy in the form of a policy file."""
    base = {}
    for op in sorted({op for op, _ in types}):  # its type in modules that no section names
        found = {each for (name, _), each in types.items() if name == op}
        base[op] = found.pop() if len(found) == 1 else types.get((op, ""), low_type)
    lists: dict[str, Any] = dict(_lists({op: each for op, each in base.items() if each != FOLLOWS}))
    for op in [op for op, each in base.items() if each == FOLLOWS]:
        _make_follow(op, lists)
    source = {"low_precision_type": low_type, "lists": "hmpx", **lists}
    placed = _placed(types, base)
    alike: dict[tuple[int, tuple[tuple[str, str], ...]], list[str]] = {}
    for module in sorted(placed, key=lambda each: (-_depth(each), each)):
        own = tuple(sorted(placed[module].items()))
        alike.setdefault((_depth(module), own), []).append(module)
    if alike:
        source["sections"] = [
            {"module": [*map(glob.escape, modules)], **_lists(dict(own))}
            for (_, own), modules in alike.items()
        ]
    return source


@functools.cache
def may_follow(op: str) -> bool:
    """Whether a policy can make an op follow its inputs: not if other ops' lines alone decide it."""
    if ops.is_foreign(op):
        return False
    try:
        decided = policy_of({(op, ""): FOLLOWS}, "bfloat16")[op].cast_policy
    except PolicyFileError:
        return False
    return decided is relative(op)


@functools.cache
def relative(op: str) -> CastPolicy:
    """Returns the decision for an op that is in no low-precision or fp32 list."""
    nothing = {"remove": ["*"]}
    return load_policy(policy={"lists": "hmpx", "low": nothing, "fp32": nothing})[op].cast_policy


def _make_follow(op: str, lists: dict[str, Any]) -> None:
    """Removes an op from the shipped lists that decide otherwise."""
    shipped, own = load_policy()[op].cast_policy, relative(op)
    if shipped is own:
        return
    is_promoted = own is CastPolicy.WIDEST and ops.covering(op) is not None
    if own is CastPolicy.PASS or is_promoted:
        lists.setdefault("pass", []).append(op)  # torch promotes it
        return
    found = lists.get(shipped.value, [])
    if isinstance(found, list):
        found = lists[shipped.value] = {"add": found, "remove": []}
    found["remove"].append(op)


def _placed(types: Mapping[Spot, str], base: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns module -> op -> type, where it differs from the enclosing modules."""
    placed: dict[str, dict[str, str]] = {}

    def inherited(op: str, module: str) -> str:
        """Returns an op's type by the sections of a module and of the enclosing ones."""
        while module:
            if op in placed.get(module, {}):
                return placed[module][op]
            module = module.rpartition(".")[0]
        return base[op]

    for (op, module), wanted in sorted(types.items(), key=lambda each: _depth(each[0][1])):
        if module and inherited(op, module) != wanted:
            placed.setdefault(module, {})[op] = wanted
            for other in sorted((ops.covered(op) - {op}) & base.keys()):  # a line covers these, too
                found = types.get((other, module)) or inherited(other, module)
                placed[module].setdefault(other, found)
    return placed


def _depth(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _lists(types: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns kind of list -> ops, in the order of policy files."""
    found: dict[str, list[str]] = {"low": [], "fp32": [], "widest": [], "first": [], "pass": []}
    for op, each in types.items():
        kind = relative(op).value if each == FOLLOWS else "fp32" if each == FP32 else "low"
        found[kind].append(op)
    return {kind: names for kind, names in found.items() if names}
