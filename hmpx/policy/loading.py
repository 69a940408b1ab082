"""Builds policies from op lists and policy files, the arguments of `load_policy` and `hmpx.convert`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn

from .. import arguments, number_formats, ops
from ..errors import OptionError, PolicyFileError, shown, suggestion, warn
from ..number_formats import is_format
from .decisions import CastPolicy, Decision, LowType, parse_low_type
from .faults import report
from .lists import from_lines, of_libraries, read_list, read_set, read_shipped, shipped_set
from .op_lists import (
    DEFAULT_SET,
    OPTIONS_NAME,
    Listed,
    OpList,
    PolicySource,
    is_policy_file,
    listed,
    resolve,
)
from .policy import Policy
from .sections import Section

_F = TypeVar("_F", bound=Callable[..., Any])

#: Types that users pass as the first list by mistake -> the remedy.
_MISPLACED: Final = (
    (nn.Module, "leave the model out: it is torch that is converted, for all models"),
    ((list, tuple, set, frozenset), "names of ops go in policy=hmpx.Policy.from_ops(low=[...])"),
    (Mapping, "pass it by name: policy=..."),
    (torch.dtype, "pass it by name: low_precision_type=..."),
)


#: Values that users pass as a list by mistake, by the name of their argument.
_VALUES: Final = {
    "opt_level": ("O1", "O2"),
    "low_precision_type": ("bf16", "fp16", "bfloat16", "float16"),
}


def options_of_lists(lists: object) -> dict[str, Any]:
    """Returns the arguments of `convert` that the `OPTIONS_NAME` of a directory of lists holds, if there is one.

    Raises:
        PolicyFileError: It can't be read.
    """
    if lists is None or shipped_set(folder := arguments.path("lists", lists)):
        return {}
    path = os.path.join(folder, OPTIONS_NAME)  # noqa: PTH118  # any text
    if not os.path.lexists(path):
        return {}
    from . import files  # yaml

    return files.read_options(path)


def reading_options(function: _F) -> _F:
    """Has `options_of_lists` give the arguments that a call of ``function`` does not."""
    taken = inspect.signature(function).parameters

    @functools.wraps(function)
    def reading(*args: Any, **given: Any) -> Any:
        said = options_of_lists(given.get("lists"))
        return function(*args, **{name: said[name] for name in said if name in taken} | given)

    return reading  # type: ignore[return-value]


@reading_options
def load_policy(
    bf16_file_path: str | os.PathLike[str] = "",
    fp32_file_path: str | os.PathLike[str] = "",
    *,
    fp16_file_path: str | os.PathLike[str] = "",
    opt_level: str = "O1",
    low_precision_type: LowType | str = torch.bfloat16,
    lists: str | os.PathLike[str] | None = None,
    policy: Policy | PolicySource | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    exclude: str | Iterable[str] = (),
    strict: bool = False,
) -> Policy:
    """Returns the policy of these lists; the arguments are those of `hmpx.convert`.

    A policy file may also be the first argument: ``load_policy("policy.yaml")``.

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
    return made_policy(locals())[0]


def made_policy(given: Mapping[str, Any]) -> tuple[Policy, bool]:
    """Returns the policy for the arguments of `load_policy`, and whether its file asks for logging."""
    policy, is_verbose = _made_policy(given)
    excluded = arguments.texts("exclude", given["exclude"], "a list of names of modules")
    if excluded:
        stars = from_lines([("*", "exclude")], "fp32")
        decisions = resolve([listed({"fp32": stars}, torch.bfloat16)])
        section = Section(decisions, where="exclude", module=tuple(excluded))
        sections = (section, *policy.sections)
        policy = Policy(policy.decisions, policy.low_precision_type, sections)
    return policy, is_verbose


def _made_policy(given: Mapping[str, Any]) -> tuple[Policy, bool]:
    bf16_path, policy = given["bf16_file_path"], given["policy"]
    for kinds, remedy in _MISPLACED:
        if isinstance(bf16_path, kinds):
            found = shown(bf16_path)
            raise OptionError(f"bf16_file_path must be a string or a path, not {found}; {remedy}")
    bf16_path = arguments.path("bf16_file_path", bf16_path)
    if policy is None and is_policy_file(bf16_path):  # it may be passed as the list
        bf16_path, policy = "", bf16_path
    if policy is not None and not isinstance(policy, (Policy, PolicySource)):
        from . import files  # yaml

        if isinstance(policy, Mapping):
            policy = files.from_mapping(policy)
        elif isinstance(policy, str) or hasattr(type(policy), "__fspath__"):
            policy = files.read_policy_file(arguments.path("policy", policy))
        else:
            raise OptionError(
                "policy must be an hmpx.Policy, the path of a policy file, or a dict, not "
                f"{shown(policy)}"
            )
    paths = {"bf16_file_path": bf16_path} | {
        name: arguments.path(name, given[name]) for name in ("fp32_file_path", "fp16_file_path")
    }
    opt_level = arguments.choice("opt_level", given["opt_level"], ("O1", "O2"))
    lists = None if given["lists"] is None else arguments.path("lists", given["lists"])
    strict = arguments.truth("strict", given["strict"])
    low_dtype = parse_low_type(given["low_precision_type"])
    if policy is not None:
        if any(paths.values()) or lists or opt_level != "O1":
            raise OptionError("policy holds every decision; leave out lists, paths and opt_level")
        if isinstance(policy, Policy):
            return policy, False
        return _from_source(policy, low_dtype, strict=strict), policy.is_verbose
    for argument, path in paths.items():
        for name, known in _VALUES.items():
            if path in known:
                raise OptionError(f"{argument} is {path!r}; pass it by name: {name}={path!r}")
        if is_policy_file(path):
            found = shown(path)
            raise OptionError(f"{argument} is {found}; pass it by name: policy={found}")
    by_kind = dict(zip(("low", "fp32", "fp16"), paths.values(), strict=True))
    if opt_level == "O2":
        if lists is not None:
            raise OptionError("opt_level 'O2' has its own lists; leave out lists, or use 'O1'")
        if ignored := ", ".join(shown(path) for path in paths.values() if path):
            warn(f"opt_level 'O2' ignores list files ({ignored}); use 'O1' to read them")
        by_kind, lists = {}, "o2"
    lists = DEFAULT_SET if lists is None else lists
    return _from_lists(by_kind, lists, low_dtype, strict=strict), False


def _from_lists(
    paths: Mapping[str, str], lists: str, low_dtype: LowType, *, strict: bool
) -> Policy:
    """Returns the policy of the files at ``paths``, by kind; the set of lists supplies the other kinds."""
    own = {kind: read_list(path, kind) for kind, path in paths.items() if path}
    if not own and shipped_set(lists):
        return _shipped(lists, low_dtype)
    given, replaced = listed(own, low_dtype), {*own}
    if "fp16" in own and low_dtype is torch.float16:
        replaced.add("low")
    rest = {k: each for k, each in read_set(lists, low_dtype).items() if k not in replaced}
    shipped = listed(rest, low_dtype)
    report([*given, *shipped], strict=strict)
    return Policy(resolve([given, shipped, *_beneath([*given, *shipped])]), low_dtype)


@functools.lru_cache(maxsize=32)
def _shipped(lists: str, low_dtype: LowType) -> Policy:
    """Returns the policy of a set of shipped lists alone; tests check these."""
    shipped = listed(read_set(lists, low_dtype), low_dtype)
    return Policy(resolve([[], shipped, *_beneath(shipped)]), low_dtype)


def _beneath(lists: Iterable[Listed], first: OpList | None = None) -> list[list[Listed]]:
    """Returns the bands below all ``lists``: ops whose inputs must agree, ops of other libraries."""
    removed = frozenset().union(*[each.op_list.removed for each in lists])
    libraries = of_libraries()
    kept = {name: entry for name, entry in libraries.ops.items() if name not in removed}
    first = read_shipped("first") if first is None else first
    of_others = dataclasses.replace(libraries, ops=kept)
    return [listed({"first": first}, torch.bfloat16), listed({"fp32": of_others}, torch.bfloat16)]


def _from_source(source: PolicySource, default_dtype: LowType, *, strict: bool) -> Policy:
    for note in source.notes:
        warn(note)
    low_dtype = source.low_precision_type or default_dtype
    given = listed(source.lists, low_dtype)
    bands = [given]
    if source.base is not None:
        base = read_set(source.base, low_dtype)
        for kind in source.removed.keys() - base.keys() - {"first"}:
            raise PolicyFileError(
                f"{source.removed[kind][0].where}: the shipped set has no {kind} list to remove from"
            )
        kept = {kind: _without(op_list, kind, source) for kind, op_list in base.items()}
        shipped = listed(kept, low_dtype)
        first = _without(read_shipped("first"), "first", source)
        bands += [shipped, *_beneath([*given, *shipped], first)]
    by_section = [listed(s.lists, s.low_precision_type or low_dtype) for s in source.sections]
    report([each for band in bands[:2] for each in band], *by_section, strict=strict)
    resolved = resolve(bands).items()
    decisions = {op: each for op, each in resolved if each.cast_policy is not CastPolicy.PASS}
    made = [
        Section(resolve([lists]), **section.conditions, where=section.where)
        for section, lists in zip(source.sections, by_section, strict=True)
    ]
    _check_sections(made)
    return _with_formats(Policy(decisions, low_dtype, tuple(made)), source)


def _without(op_list: OpList, kind: str, source: PolicySource) -> OpList:
    kept, removed = dict(op_list.ops), set(op_list.removed)
    for entry in source.removed.get(kind, ()):
        if entry.text == "*":
            return dataclasses.replace(op_list, ops={}, everything=None)
        name = ops.resolve(entry.text)
        if name in op_list.removed:
            continue  # the shipped list does not have it
        if name is not None and name in of_libraries().ops:
            removed.add(name)
        elif name is None or kept.pop(name, None) is None:
            hint = suggestion(entry.text, kept)
            raise PolicyFileError(
                f"{entry.where}: no {shown(entry.text)} in the shipped {kind} list to remove{hint}"
            )
    removed |= op_list.ops.keys() - kept.keys()
    return dataclasses.replace(op_list, ops=kept, removed=removed)


def _check_sections(made: list[Section]) -> None:
    """Raises an error if two sections with equal conditions decide an op differently."""
    known: dict[object, dict[str, Decision]] = {}
    for section in made:
        decided = known.setdefault(section.conditions, {})
        for op in decided.keys() & section.decisions.keys():
            said, decision = decided[op], section.decisions[op]
            if said != decision:
                raise PolicyFileError(
                    f"{decision.reason}: {op!r} is decided at {said.reason} already, in a section "
                    "with the same conditions; keep one of the lines"
                )
        decided.update(section.decisions)


def _with_formats(policy: Policy, source: PolicySource) -> Policy:
    if not source.formats:
        return policy
    if not policy.formats():
        raise PolicyFileError(
            f"{source.where}: {next(iter(source.formats))} has no effect: no op runs in a number format; name one as "
            "low_precision_type, or on an op's line"
        )

    options = source.formats

    def with_options(decision: Decision) -> Decision:
        """Adds options to a decision with a format, whose own options override them."""
        if not is_format(decision.dtype):
            return decision
        gradients = options.get("round_gradients")
        if isinstance(gradients, bool):
            gradients = decision.dtype if gradients else number_formats.get("float32")
        return dataclasses.replace(
            decision,
            rounding=decision.rounding or options.get("rounding"),
            overflow=decision.overflow or options.get("overflow"),
            gradients=decision.gradients or gradients,
        )

    def settle(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        return {op: with_options(said) for op, said in decisions.items()}

    sections = [each.with_decisions(settle(each.decisions)) for each in policy.sections]
    return Policy(settle(policy.decisions), policy.low_precision_type, tuple(sections))
