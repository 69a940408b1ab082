"""Makes policies of op lists and policy files: the arguments of `hmpx.convert`."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .. import ops
from ..errors import PolicyFileError, shown, suggestion
from ..warning import warn
from .decisions import CastPolicy, Decision, LowType
from .files.sources import PolicySource
from .lists import sets
from .lists.faults import report
from .lists.kinds import KINDS
from .lists.op_list import Listed, OpList
from .policy import Policy
from .precedence import resolve
from .request import PolicyRequest, policy_request
from .sections import Section


def load_policy(
    bf16_file_path: str | os.PathLike[str] = "",
    fp32_file_path: str | os.PathLike[str] = "",
    *,
    fp16_file_path: str | os.PathLike[str] = "",
    opt_level: str = "O1",
    low_precision_type: LowType | str = torch.bfloat16,
    lists: str | os.PathLike[str] | None = None,
    policy: Policy | PolicySource | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Policy:
    """Returns the policy that these lists make; the arguments are those of `hmpx.convert`.

    A policy file may also be given alone, in the first place: ``load_policy("policy.yaml")``.

    Raises:
        OpListError: A list can't be read, or an op is in two lists; with ``strict``, also if a
            name is unknown.
        PolicyFileError: ``policy`` can't be read, or is not a policy.
        OptionError: ``opt_level``, ``low_precision_type`` or ``lists`` has an invalid value.

    Example:
        >>> policy = hmpx.load_policy(policy={"lists": "none", "low": ["mm"]})
        >>> policy["mm"].cast_policy
        <CastPolicy.LOW: 'low'>
        >>> "softmax" in policy.decisions
        False
    """
    return requested_policy(policy_request(locals()))


def requested_policy(request: PolicyRequest) -> Policy:
    """Returns the policy that is asked for.

    Raises:
        OpListError: A list can't be read, or an op is in two lists; also of unknown names, if strict.
        PolicyFileError: The policy file contradicts itself.
    """
    policy, low_dtype, strict = request.policy, request.low_dtype, request.strict
    if isinstance(policy, Policy):
        return policy
    if policy is not None:
        return _from_source(policy, low_dtype, strict=strict)
    if request.opt_level == "O2":
        if ignored := ", ".join(shown(path) for path in request.paths.values() if path):
            warn(f"opt_level 'O2' ignores list files ({ignored}); use 'O1' to read them")
        return _from_lists({}, "o2", low_dtype, strict=strict)
    lists = sets.DEFAULT_SET if request.lists is None else request.lists
    return _from_lists(request.paths, lists, low_dtype, strict=strict)


def _from_lists(
    paths: Mapping[str, str], lists: str, low_dtype: LowType, *, strict: bool
) -> Policy:
    """Returns the policy of the files at ``paths``, by kind, and of a set of lists for the other kinds."""
    given = [
        Listed(sets.read_list(path, kind), KINDS[kind].decision(low_dtype))
        for kind, path in paths.items()
        if path
    ]
    if not given and lists in sets.set_names():
        made = _shipped(sets.state(), lists, low_dtype)
        report(list(made.lists), strict=strict)
        return Policy(made.decisions, low_dtype)
    has_low = paths.get("low") or (paths.get("fp16") and low_dtype is torch.float16)
    shipped = [
        Listed(op_list, KINDS[kind].decision(low_dtype))
        for kind, op_list in sets.read_set(lists, low_dtype).items()
        if not (kind == "fp32" and paths.get("fp32")) and not (kind == "low" and has_low)
    ]
    first = [Listed(sets.read_shipped("first"), KINDS["first"].decision(low_dtype))]
    report([*given, *shipped], strict=strict)
    libraries = [_of_libraries([*given, *shipped])]
    return Policy(resolve([given, shipped, first, libraries]), low_dtype)


class _Shipped(NamedTuple):
    """A set of shipped lists, and the decisions that they make."""

    lists: tuple[Listed, ...]
    decisions: Mapping[str, Decision]


@functools.lru_cache(maxsize=32)
def _shipped(state: sets.State, lists: str, low_dtype: LowType) -> _Shipped:
    """Returns what a shipped set decides where no other list is given; ``state`` is that of its files."""
    found = sets.read_set(lists, low_dtype)
    shipped = [Listed(op_list, KINDS[kind].decision(low_dtype)) for kind, op_list in found.items()]
    first = [Listed(sets.read_shipped("first"), KINDS["first"].decision(low_dtype))]
    decisions = resolve([[], shipped, first, [_of_libraries(shipped)]])
    return _Shipped(tuple(shipped), types.MappingProxyType(decisions))


def _from_source(source: PolicySource, default_dtype: LowType, *, strict: bool) -> Policy:
    """Returns the policy of a file; raises errors and warns about its faults."""
    for note in source.notes:
        warn(note)
    low_dtype = source.low_precision_type or default_dtype
    given = [
        Listed(op_list, KINDS[kind].decision(low_dtype)) for kind, op_list in source.lists.items()
    ]
    shipped = []
    first: list[Listed] = []
    libraries: list[Listed] = []
    if source.base is not None:
        base = sets.read_set(source.base, low_dtype)
        shipped = [
            Listed(_without(op_list, kind, source), KINDS[kind].decision(low_dtype))
            for kind, op_list in base.items()
        ]
        for kind in source.removed.keys() - base.keys() - {"first"}:
            raise PolicyFileError(
                f"{source.removed[kind][0].where}: the shipped set has no {kind} list to remove from"
            )
        first_list = _without(sets.read_shipped("first"), "first", source)
        first = [Listed(first_list, KINDS["first"].decision(low_dtype))]
        libraries = [_of_libraries([*given, *shipped])]
    by_section = [
        [
            Listed(op_list, KINDS[kind].decision(section.low_precision_type or low_dtype))
            for kind, op_list in section.lists.items()
        ]
        for section in source.sections
    ]
    report([*given, *shipped], *by_section, strict=strict)
    decisions = {
        op: decision
        for op, decision in resolve([given, shipped, first, libraries]).items()
        if decision.cast_policy is not CastPolicy.PASS
    }
    made = [
        Section(resolve([lists]), **section.conditions, where=section.where)
        for section, lists in zip(source.sections, by_section, strict=True)
    ]
    _check_sections(made)
    return _with_formats(Policy(decisions, low_dtype, tuple(made)), source)


def _with_formats(policy: Policy, source: PolicySource) -> Policy:
    """Returns the policy with what the file says of all ops in number formats.

    Raises:
        PolicyFileError: It says something, and there are none.
    """
    given = source.formats.given()
    if not given:
        return policy
    if not policy.formats():
        raise PolicyFileError(
            f"{source.where}: {given[0]} has no effect: no op runs in a number format; name one as "
            "low_precision_type, or on an op's line"
        )
    settled: dict[int, Decision] = {}  # a line of ``*`` is one decision for all its ops

    def settle(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        return {
            op: settled.setdefault(id(said), source.formats.settled(said))
            for op, said in decisions.items()
        }

    sections = [each.with_decisions(settle(each.decisions)) for each in policy.sections]
    return Policy(settle(policy.decisions), policy.low_precision_type, tuple(sections))


def _of_libraries(lists: Iterable[Listed]) -> Listed:
    """Returns the shipped list of other libraries' ops, without those that ``lists`` remove."""
    removed = frozenset().union(*[listed.op_list.removed for listed in lists])
    op_list = sets.of_libraries()
    kept = {name: entry for name, entry in op_list.ops.items() if name not in removed}
    decision = Decision(CastPolicy.FP32, torch.float32)
    return Listed(dataclasses.replace(op_list, ops=kept), decision)


def _without(op_list: OpList, kind: str, source: PolicySource) -> OpList:
    """Returns ``op_list`` without the ops that the policy file removes from it."""
    kept, removed = dict(op_list.ops), set(op_list.removed)
    for entry in source.removed.get(kind, ()):
        if entry.text == "*":
            return dataclasses.replace(op_list, ops={}, everything=None)
        name = ops.resolve(entry.text)
        if name in op_list.removed:
            continue  # the shipped list does without it already
        if name is not None and name in sets.of_libraries().ops:
            removed.add(name)
        elif name is None or kept.pop(name, None) is None:
            hint = suggestion(entry.text, kept)
            raise PolicyFileError(
                f"{entry.where}: no {shown(entry.text)} in the shipped {kind} list to remove{hint}"
            )
    removed |= op_list.ops.keys() - kept.keys()
    return dataclasses.replace(op_list, ops=kept, removed=frozenset(removed))


def _check_sections(made: list[Section]) -> None:
    """Raises an error where two sections with equal conditions differ about an op."""
    known: dict[object, dict[str, Decision]] = {}
    for section in made:
        decided = known.setdefault(section.conditions(), {})
        for op in decided.keys() & section.decisions.keys():
            said, decision = decided[op], section.decisions[op]
            if said != decision:
                raise PolicyFileError(
                    f"{decision.reason}: {op!r} is decided at {said.reason} already, in a section "
                    "with the same conditions; keep one of the lines"
                )
        decided.update(section.decisions)
