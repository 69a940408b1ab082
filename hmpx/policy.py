"""From lists to decisions: which `CastPolicy` each op has, why, and in which dtype.

Conflicts and precedence are settled here, once; a `Policy` is frozen and holds the answer for
every op that is cast. Knows nothing of how torch is patched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import oplists, ops, policy_files, sections
from .decisions import CastPolicy, Decision, LowType, parse_low_type
from .errors import HmpxError, HmpxWarning, OpListError, OptionError, PolicyFileError, suggestion
from .oplists import OpList
from .policy_files import PolicySource
from .sections import Section, SectionRule

_PASS = Decision(CastPolicy.PASS, reason="in no list")


@dataclass(frozen=True)
class Policy:
    """A decision for every op that is cast.

    Attributes:
        decisions: Op name -> decision. Ops that are not in it are left alone.
        low_precision_type: The type of the low-precision list.
        sections: Decisions for parts of a model; of those that hold for a call and name its op, the
            first one counts, before ``decisions``.
    """

    decisions: Mapping[str, Decision]
    low_precision_type: LowType = torch.bfloat16
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        settled = {
            op: said
            if (dtype := said.dtype or _dtype_of(said, self.low_precision_type)) is None
            else dataclasses.replace(said, dtype=dtype)
            for op, said in self.decisions.items()
        }
        object.__setattr__(self, "decisions", types.MappingProxyType(settled))

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self.low_precision_type, self.sections))

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (dict(self.decisions), self.low_precision_type, self.sections)

    def section_rules(self) -> dict[str, list[SectionRule]]:
        """Returns op -> what the sections say of it, in the order in which they are asked."""
        found: dict[str, list[SectionRule]] = {}
        for section in self.sections:
            for op, decision in section.decisions.items():
                found.setdefault(op, []).append(SectionRule(section, decision))
        return found

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Returns a message for each module pattern that matches none of these qualified names."""
        return sections.unmatched(self.sections, paths)

    def fingerprint(self) -> str:
        """Returns what equal policies have in common, in any process."""
        placed = [(each.conditions(), _bare(each.decisions)) for each in self.sections]
        state = repr((_bare(self.decisions), placed, self.low_precision_type))
        return hashlib.sha256(state.encode()).hexdigest()

    def to_yaml(self) -> str:
        """Returns a policy file that makes an equal policy: all that is in force, spelled out."""
        return policy_files.dump(self.decisions, self.low_precision_type, self.sections)

    def __getitem__(self, op: str) -> Decision:
        """Returns the decision for ``op``, in any of its spellings.

        Raises:
            OptionError: torch has no such op.
        """
        name = ops.resolve(op)
        if name is None:
            raise OptionError(f"unknown op {op!r}{suggestion(op, ops.names())}")
        return self.decisions.get(name, _PASS)

    @classmethod
    def from_ops(
        cls,
        *,
        low: Iterable[str] = (),
        fp32: Iterable[str] = (),
        widest: Iterable[str] = (),
        first: Iterable[str] = (),
        low_precision_type: LowType | str = torch.bfloat16,
    ) -> Policy:
        """Returns the policy that holds exactly these ops, without any shipped list.

        Where an op stands in several, an earlier argument outranks a later one.

        Raises:
            OpListError: A name is unknown, or stands in both ``low`` and ``fp32``.
            OptionError: ``low_precision_type`` is none.
        """
        low_dtype = parse_low_type(low_precision_type)
        given = {"low": low, "fp32": fp32, "widest": widest, "first": first}
        lists = [
            (oplists.parse("\n".join(names), f"<{kind}>"), _decision(kind, low_dtype))
            for kind, names in given.items()
        ]
        _report(lists, strict=True)
        return cls(_resolve([[pair] for pair in lists]), low_dtype)


def _bare(decisions: Mapping[str, Decision]) -> list[tuple[object, ...]]:
    """Returns ``decisions`` without their reasons."""
    return [
        (name, d.cast_policy.name, d.dtype, d.accumulate_dtype, d.output_dtype)
        for name, d in sorted(decisions.items())
    ]


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
        OpListError: A list can't be read, or an op stands in two lists; with ``strict``, also if a
            name is unknown.
        PolicyFileError: ``policy`` can't be read, or is no policy.
        OptionError: ``opt_level``, ``low_precision_type`` or ``lists`` has no such value.
    """
    if policy is None and policy_files.is_policy_file(bf16_file_path):
        policy, bf16_file_path = bf16_file_path, ""
    low_dtype = parse_low_type(low_precision_type)
    if policy is not None:
        if any((bf16_file_path, fp32_file_path, fp16_file_path, lists)) or opt_level != "O1":
            raise OptionError("policy holds every decision; leave out lists, paths and opt_level")
        if isinstance(policy, Policy):
            return policy
        return _from_source(read_source(policy), low_dtype, strict=strict)
    if opt_level not in ("O1", "O2"):
        raise OptionError(f"opt_level must be 'O1' or 'O2', not {opt_level!r}")
    for argument, path in (
        ("bf16_file_path", bf16_file_path),
        ("fp32_file_path", fp32_file_path),
        ("fp16_file_path", fp16_file_path),
    ):
        if path in ("O1", "O2"):
            raise OptionError(f"{argument} is {path!r}; pass it by name: opt_level={path!r}")
        if policy_files.is_policy_file(path):
            raise OptionError(f"{argument} is {path!r}; pass it by name: policy={path!r}")
    given_paths = {"low": bf16_file_path, "fp16": fp16_file_path, "fp32": fp32_file_path}
    if opt_level == "O2":
        if lists is not None:
            raise OptionError("opt_level 'O2' has its own lists; leave out lists, or use 'O1'")
        if any(given_paths.values()):
            ignored = ", ".join(repr(os.fspath(p)) for p in given_paths.values() if p)
            _warn(f"opt_level 'O2' ignores list files ({ignored}); use 'O1' to read them")
            given_paths = {}
        lists = "o2"
    given = [
        (oplists.read(path, kind), _decision(kind, low_dtype))
        for kind, path in given_paths.items()
        if path
    ]
    shipped = [
        (op_list, _decision(kind, low_dtype))
        for kind, op_list in oplists.read_set("hmp" if lists is None else lists).items()
        if not (kind == "fp32" and fp32_file_path)
        and not (kind == "low" and (bf16_file_path or _is_low(fp16_file_path, low_dtype)))
    ]
    first = [(oplists.read_shipped("first"), _decision("first", low_dtype))]
    _report([*given, *shipped], strict=strict)
    return Policy(_resolve([given, shipped, first]), low_dtype)


def read_source(policy: object) -> PolicySource:
    """Returns what a policy file, or a mapping like one, holds.

    Raises:
        OptionError: ``policy`` is neither.
        PolicyFileError: It can't be read, or is no policy.
    """
    if isinstance(policy, PolicySource):
        return policy
    if isinstance(policy, Mapping):
        return policy_files.from_mapping(policy)
    if isinstance(policy, (str, os.PathLike)):
        return policy_files.read(policy)
    raise OptionError(
        f"policy must be an hmpx.Policy, the path of a policy file, or a dict, not {policy!r}"
    )


def _from_source(source: PolicySource, default_dtype: LowType, *, strict: bool) -> Policy:
    """Returns the policy of a file; raises and warns of its faults."""
    for note in source.notes:
        _warn(note)
    low_dtype = source.low_precision_type or default_dtype
    given = [(op_list, _decision(kind, low_dtype)) for kind, op_list in source.lists.items()]
    shipped = []
    first = []
    if source.base is not None:
        base = oplists.read_set(source.base)
        shipped = [
            (_without(op_list, kind, source), _decision(kind, low_dtype))
            for kind, op_list in base.items()
        ]
        for kind in source.removed.keys() - base.keys() - {"first"}:
            raise PolicyFileError(
                f"{source.removed[kind][0].where}: the shipped set has no {kind} list to remove from"
            )
        first_list = _without(oplists.read_shipped("first"), "first", source)
        first = [(first_list, _decision("first", low_dtype))]
    by_section = [
        [
            (op_list, _decision(kind, section.low_precision_type or low_dtype))
            for kind, op_list in section.lists.items()
        ]
        for section in source.sections
    ]
    _report([*given, *shipped], *by_section, strict=strict)
    decisions = {
        op: decision
        for op, decision in _resolve([given, shipped, first]).items()
        if decision.cast_policy is not CastPolicy.PASS
    }
    made = [
        Section(_resolve([lists]), **section.conditions, where=section.where)
        for section, lists in zip(source.sections, by_section, strict=True)
    ]
    _check_sections(made)
    return Policy(decisions, low_dtype, tuple(made))


def _without(op_list: OpList, kind: str, source: PolicySource) -> OpList:
    """Returns ``op_list`` without the ops that the policy file removes from it."""
    kept = dict(op_list.ops)
    for entry in source.removed.get(kind, ()):
        if entry.text == "*":
            return dataclasses.replace(op_list, ops={}, everything=None)
        name = ops.resolve(entry.text)
        if name is None or kept.pop(name, None) is None:
            hint = suggestion(entry.text, kept)
            raise PolicyFileError(
                f"{entry.where}: no {entry.text!r} in the shipped {kind} list to remove{hint}"
            )
    removed = op_list.removed | (op_list.ops.keys() - kept.keys())
    return dataclasses.replace(op_list, ops=kept, removed=removed)


def _check_sections(made: list[Section]) -> None:
    """Raises an error where two sections with equal conditions differ about an op."""
    known: dict[tuple[object, str], Decision] = {}
    for section in made:
        conditions = section.conditions()
        for op, decision in section.decisions.items():
            said = known.setdefault((conditions, op), decision)
            if said != decision:
                raise PolicyFileError(
                    f"{decision.reason}: {op!r} is decided at {said.reason} already, in a section "
                    "with the same conditions; keep one of the lines"
                )


def check(paths: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Returns every fault of files as text.

    Args:
        paths: Kind (``low``, ``fp16``, ``fp32`` for lists, ``policy``) -> paths.
    """
    faults: list[str] = []
    read: list[tuple[OpList, Decision]] = []
    for kind, files in paths.items():
        for path in files:
            if kind == "policy":
                faults += _faults_of(path)
                continue
            try:
                read.append((oplists.read(path, kind), _decision(kind, torch.bfloat16)))
            except OpListError as error:
                faults.append(str(error))
    for op_list, _ in read:
        faults += oplists.unknown(op_list) + oplists.repeated(op_list)
    return faults + _conflicts(read)


def _faults_of(path: str) -> list[str]:
    """Returns every fault of a policy file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HmpxWarning)
        try:
            load_policy(policy=path)
        except HmpxError as error:
            return str(error).splitlines()
    lines = [line.strip() for warning in caught for line in str(warning.message).splitlines()]
    return [line for line in lines if line != _LEFT_OUT]


_LEFT_OUT = "left out of the op lists:"


def _is_low(fp16_file_path: object, low_dtype: LowType) -> bool:
    """Whether the fp16 file *is* the low-precision list, since the low type is fp16."""
    return bool(fp16_file_path) and low_dtype is torch.float16


def _dtype_of(decision: Decision, low_dtype: LowType) -> LowType | None:
    return {CastPolicy.LOW: low_dtype, CastPolicy.FP32: torch.float32}.get(decision.cast_policy)


def _decision(kind: str, low_dtype: LowType) -> Decision:
    return {
        "low": Decision(CastPolicy.LOW, low_dtype),
        "fp16": Decision(CastPolicy.LOW, torch.float16),
        "fp32": Decision(CastPolicy.FP32, torch.float32),
        "widest": Decision(CastPolicy.WIDEST),
        "first": Decision(CastPolicy.FIRST),
        "follow": Decision(CastPolicy.FOLLOW),
        "pass": Decision(CastPolicy.PASS),
    }[kind]


def _of(entry: oplists.Entry, decision: Decision) -> Decision:
    """Returns the decision of a list's line: that of its list, but for what the line says itself."""
    return dataclasses.replace(
        decision,
        dtype=entry.dtype or decision.dtype,
        accumulate_dtype=entry.accumulate_dtype,
        output_dtype=entry.output_dtype,
        reason=entry.where,
    )


def _report(
    lists: list[tuple[OpList, Decision]], *more: list[tuple[OpList, Decision]], strict: bool
) -> None:
    """Raises or warns about the faults of lists that stand beside each other.

    ``more`` are lists that stand beside each other elsewhere.
    """
    by_band: dict[bool, list[tuple[OpList, Decision]]] = {}
    for op_list, decision in lists:
        by_band.setdefault(op_list.is_shipped, []).append((op_list, decision))
    lists = [*lists, *[pair for each in more for pair in each]]
    unknown = [fault for op_list, _ in lists for fault in oplists.unknown(op_list)]
    if unknown and strict:
        raise OpListError("\n".join(unknown))
    conflicts = [fault for band in (*by_band.values(), *more) for fault in _conflicts(band)]
    if conflicts:
        raise OpListError("\n".join(conflicts))
    if unknown:
        _warn(f"{_LEFT_OUT}\n  " + "\n  ".join(unknown))
    repeated = [fault for op_list, _ in lists for fault in oplists.repeated(op_list)]
    if repeated:
        _warn("\n".join(repeated))


def _conflicts(lists: list[tuple[OpList, Decision]]) -> list[str]:
    faults = []
    seen: dict[str, tuple[oplists.Entry, OpList, Decision]] = {}
    for op_list, decision in lists:
        if decision.cast_policy in _RELATIVE:  # they give way to the other lists
            continue
        for name, entry in op_list.ops.items():
            said = _of(entry, decision)
            other = seen.setdefault(name, (entry, op_list, said))
            if other[2] != said:
                faults.append(
                    f"{entry.where}: {entry.text!r} is in two lists: it is the op {name!r}, as "
                    f"{other[0].text!r} at {other[0].where} is; keep one of the lines"
                )
        if op_list.everything is not None:
            said = _of(op_list.everything, decision)
            other = seen.setdefault("*", (op_list.everything, op_list, said))
            if other[2] != said:
                faults.append(
                    f"{op_list.everything.where}: '*' is in two lists, at {other[0].where} too; "
                    "keep one of the lines"
                )
    return faults


#: Of lists that give way to the others.
_RELATIVE = frozenset({CastPolicy.WIDEST, CastPolicy.FIRST})


def _resolve(bands: list[list[tuple[OpList, Decision]]]) -> dict[str, Decision]:
    """Returns op -> decision.

    An earlier band outranks a later one. Within a band an operator's own line outranks that of the
    op that covers it. ``*`` comes after every named line of a low-precision or fp32 list.
    """
    decisions: dict[str, Decision] = {}
    fixed_bands = [
        [pair for pair in band if pair[1].cast_policy not in _RELATIVE] for band in bands
    ]
    relative_bands = [[pair for pair in band if pair[1].cast_policy in _RELATIVE] for band in bands]
    for band in fixed_bands:
        _resolve_named(band, decisions)
    for band in fixed_bands:
        for op_list, decision in band:
            if op_list.everything is not None:
                star = _of(op_list.everything, decision)
                for name in ops.table():
                    if name not in op_list.removed and name in ops.computing():
                        decisions.setdefault(name, star)
    for band in relative_bands:
        _resolve_named(band, decisions)
    return decisions


def _resolve_named(band: list[tuple[OpList, Decision]], decisions: dict[str, Decision]) -> None:
    """Adds to ``decisions`` what the named lines of ``band`` say of ops not in it yet."""
    named = {
        name: (_of(entry, decision), op_list)
        for op_list, decision in band
        for name, entry in op_list.ops.items()
    }
    if not named:
        return
    for name, op in ops.table().items():
        covering: str | None = name
        while covering is not None and covering not in named:
            covering = op.covered_by if covering == name else ops.table()[covering].covered_by
        if covering is not None and name not in named[covering][1].removed:
            decisions.setdefault(name, named[covering][0])


def _warn(message: str) -> None:
    warnings.warn(message, HmpxWarning, stacklevel=_user_stack_level())


def _user_stack_level() -> int:
    """Returns the stack level of the first caller outside hmpx."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    return level
