"""From lists to decisions: which `CastPolicy` each op has, why, and in which dtype.

Conflicts and precedence are settled here, once; a `Policy` is frozen and holds the answer for
every op that is cast. Knows nothing of how torch is patched.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch

from .. import arguments, ops
from ..arguments import is_a
from ..errors import (
    HmpxError,
    HmpxWarning,
    OpListError,
    OptionError,
    PolicyFileError,
    gathered,
    shown,
    suggestion,
)
from ..frames import is_ours
from . import files as policy_files
from . import op_lists as oplists
from . import sections, tables
from .decisions import UNDECIDED, CastPolicy, Decision, LowType, parse_low_type
from .files import PolicySource
from .op_lists import OpList
from .sections import Section, SectionRule


@dataclass(frozen=True, repr=False)
class Policy:
    """A decision for every op that is cast.

    `print` shows it as a table.

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
        """Gives each decision the dtype that it leaves out.

        Raises:
            OptionError: A field holds what it can't hold.
        """
        low_dtype = parse_low_type(self.low_precision_type)
        settled: dict[str, Decision] = {}
        given = arguments.mapping("decisions", self.decisions, _DECISIONS)
        for op, said in given.items():
            if not is_a(op, str) or not is_a(said, Decision):
                raise OptionError(
                    f"decisions must be {_DECISIONS}; it holds {shown(op)}: {shown(said)}"
                )
            dtype = said.dtype or _dtype_of(said, low_dtype)
            settled[op] = said if dtype is None else dataclasses.replace(said, dtype=dtype)
        made = tuple(arguments.items("sections", self.sections, "sections of a policy"))
        for section in made:
            if not is_a(section, Section):
                raise OptionError(f"sections must be sections of a policy, not {shown(section)}")
        object.__setattr__(self, "decisions", types.MappingProxyType(settled))
        object.__setattr__(self, "low_precision_type", low_dtype)
        object.__setattr__(self, "sections", made)

    def __repr__(self) -> str:
        return f"<hmpx.Policy {tables.policy_line(*self._content())}>"

    def __str__(self) -> str:
        return tables.text(*self._content())

    def _repr_html_(self) -> str:
        """Returns the table that notebooks show."""
        return tables.as_html(*self._content())

    def _content(self) -> tuple[Mapping[str, Decision], LowType, tuple[Section, ...]]:
        return self.decisions, self.low_precision_type, self.sections

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self.low_precision_type, self.sections))

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (dict(self.decisions), self.low_precision_type, self.sections)

    def section_rules(self) -> dict[str, list[SectionRule]]:
        """Returns op -> what the sections say of it, in the order in which they are asked."""
        found: dict[str, list[SectionRule]] = {}
        for section in self.sections:
            rules: dict[int, SectionRule] = {}  # a line of ``*`` is one decision for all its ops
            for op, decision in section.decisions.items():
                rule = rules.get(id(decision))
                if rule is None:
                    rule = rules[id(decision)] = SectionRule(section, decision)
                found.setdefault(op, []).append(rule)
        return found

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Returns a message for each module pattern that matches none of these qualified names.

        Raises:
            OptionError: ``paths`` are no strings.
        """
        return sections.unmatched(self.sections, arguments.texts("paths", paths))

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
        spelling = arguments.text("a policy's key", op, "an op name")
        name = ops.resolve(spelling)
        if name is None:
            raise OptionError(f"unknown op {shown(spelling)}{suggestion(spelling, ops.names())}")
        found = self.decisions.get(name)
        if found is None and ops.is_foreign(name):  # perhaps listed by another name of it
            same = ops.same(name, self.decisions)
            found = None if same is None else self.decisions[same]
        return UNDECIDED if found is None else found

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
            OptionError: ``low_precision_type`` is none, or a list holds no strings.
        """
        low_dtype = parse_low_type(low_precision_type)
        given = {"low": low, "fp32": fp32, "widest": widest, "first": first}
        lists = [
            (
                oplists.parse("\n".join(arguments.texts(kind, names, _NAMES)), f"<{kind}>"),
                _decision(kind, low_dtype),
            )
            for kind, names in given.items()
        ]
        _report(lists, strict=True, is_from_files=False)
        return cls(_resolve([[pair] for pair in lists]), low_dtype)


_NAMES: Final = "a list of op names"
_DECISIONS: Final = "a dict of op names to hmpx.Decision"


def _bare(decisions: Mapping[str, Decision]) -> list[tuple[str, list[str]]]:
    """Returns the ops by what is decided for them, without reasons; equal for equal decisions."""
    bare: dict[int, list[str]] = {}  # a line of ``*`` is one decision for all its ops
    found: dict[str, list[str]] = {}
    for name in sorted(decisions):
        d = decisions[name]
        names = bare.get(id(d))
        if names is None:
            said = repr((d.cast_policy.name, d.dtype, d.accumulate_dtype, d.output_dtype))
            names = bare[id(d)] = found.setdefault(said, [])
        names.append(name)
    return sorted(found.items())


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
    given_paths = {
        name: arguments.path(name, path)
        for name, path in (
            ("bf16_file_path", bf16_file_path),
            ("fp32_file_path", fp32_file_path),
            ("fp16_file_path", fp16_file_path),
        )
    }
    level = arguments.choice("opt_level", opt_level, ("O1", "O2"))
    set_or_folder = arguments.path("lists", lists)
    strict = arguments.truth("strict", strict)
    low_dtype = parse_low_type(low_precision_type)
    if policy is None and policy_files.is_policy_file(given_paths["bf16_file_path"]):
        policy, given_paths["bf16_file_path"] = given_paths["bf16_file_path"], ""
    if policy is not None:
        if any(given_paths.values()) or set_or_folder or level != "O1":
            raise OptionError("policy holds every decision; leave out lists, paths and opt_level")
        if isinstance(policy, Policy):
            return policy
        return _from_source(read_source(policy), low_dtype, strict=strict)
    for argument, path in given_paths.items():
        if path in ("O1", "O2"):
            raise OptionError(f"{argument} is {path!r}; pass it by name: opt_level={path!r}")
        if policy_files.is_policy_file(path):
            found = shown(path)
            raise OptionError(f"{argument} is {found}; pass it by name: policy={found}")
    if level == "O2":
        if lists is not None:
            raise OptionError("opt_level 'O2' has its own lists; leave out lists, or use 'O1'")
        if any(given_paths.values()):
            ignored = ", ".join(shown(path) for path in given_paths.values() if path)
            _warn(f"opt_level 'O2' ignores list files ({ignored}); use 'O1' to read them")
        return _from_lists({}, "o2", low_dtype, strict=strict)
    by_kind = dict(zip(("low", "fp32", "fp16"), given_paths.values(), strict=True))
    chosen = oplists.DEFAULT_SET if lists is None else set_or_folder
    return _from_lists(by_kind, chosen, low_dtype, strict=strict)


def _from_lists(
    paths: Mapping[str, str], lists: str, low_dtype: LowType, *, strict: bool
) -> Policy:
    """Returns the policy of the files at ``paths``, by kind, and of a set of lists beside them."""
    given = [
        (oplists.read_list(path, kind), _decision(kind, low_dtype))
        for kind, path in paths.items()
        if path
    ]
    has_low = paths.get("low") or (paths.get("fp16") and low_dtype is torch.float16)
    shipped = [
        (op_list, _decision(kind, low_dtype))
        for kind, op_list in oplists.read_set(lists, low_dtype).items()
        if not (kind == "fp32" and paths.get("fp32")) and not (kind == "low" and has_low)
    ]
    first = [(oplists.read_shipped("first"), _decision("first", low_dtype))]
    _report([*given, *shipped], strict=strict)
    libraries = [_of_libraries([*given, *shipped])]
    return Policy(_resolve([given, shipped, first, libraries]), low_dtype)


def read_source(policy: object) -> PolicySource:
    """Returns what a policy file, or a mapping like one, holds.

    Raises:
        OptionError: ``policy`` is neither.
        PolicyFileError: It can't be read, or is no policy.
    """
    if isinstance(policy, PolicySource):
        return policy
    if is_a(policy, Mapping):
        return policy_files.from_mapping(policy)  # type: ignore[arg-type]
    if is_a(policy, str) or hasattr(type(policy), "__fspath__"):
        return policy_files.read_policy_file(arguments.path("policy", policy))
    raise OptionError(
        f"policy must be an hmpx.Policy, the path of a policy file, or a dict, not {shown(policy)}"
    )


def _from_source(source: PolicySource, default_dtype: LowType, *, strict: bool) -> Policy:
    """Returns the policy of a file; raises and warns of its faults."""
    for note in source.notes:
        _warn(note)
    low_dtype = source.low_precision_type or default_dtype
    given = [(op_list, _decision(kind, low_dtype)) for kind, op_list in source.lists.items()]
    shipped = []
    first: list[tuple[OpList, Decision]] = []
    libraries: list[tuple[OpList, Decision]] = []
    if source.base is not None:
        base = oplists.read_set(source.base, low_dtype)
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
        libraries = [_of_libraries([*given, *shipped])]
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
        for op, decision in _resolve([given, shipped, first, libraries]).items()
        if decision.cast_policy is not CastPolicy.PASS
    }
    made = [
        Section(_resolve([lists]), **section.conditions, where=section.where)
        for section, lists in zip(source.sections, by_section, strict=True)
    ]
    _check_sections(made)
    return Policy(decisions, low_dtype, tuple(made))


def _of_libraries(lists: Iterable[tuple[OpList, Decision]]) -> tuple[OpList, Decision]:
    """Returns the shipped list of other libraries' ops, without those that ``lists`` remove."""
    removed = frozenset().union(*[op_list.removed for op_list, _ in lists])
    op_list = oplists.of_libraries()
    kept = {name: entry for name, entry in op_list.ops.items() if name not in removed}
    return dataclasses.replace(op_list, ops=kept), Decision(CastPolicy.FP32, torch.float32)


def _without(op_list: OpList, kind: str, source: PolicySource) -> OpList:
    """Returns ``op_list`` without the ops that the policy file removes from it."""
    kept, removed = dict(op_list.ops), set(op_list.removed)
    for entry in source.removed.get(kind, ()):
        if entry.text == "*":
            return dataclasses.replace(op_list, ops={}, everything=None)
        name = ops.resolve(entry.text)
        if name in op_list.removed:
            continue  # the shipped list does without it already
        if name is not None and name in oplists.of_libraries().ops:
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


def check_files(paths: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Returns the faults of files as text; of very many the first, and how many more there are.

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
                read.append((oplists.read_list(path, kind), _decision(kind, torch.bfloat16)))
            except OpListError as error:
                faults.append(str(error))
    lists = [op_list for op_list, _ in read]
    conflicts = list(_conflicts(read))
    for find in (oplists.unknown, oplists.absent, oplists.repeated):
        faults += find(lists, _MOST_CHECKED)
    idle = _idle(read)
    faults += gathered(idle, len(idle), _MOST_CHECKED)
    return faults + gathered(conflicts, len(conflicts), _MOST_CHECKED)


#: Faults of a kind that `check` returns.
_MOST_CHECKED: Final = oplists.MOST_KEPT


def _faults_of(path: str) -> list[str]:
    """Returns every fault of a policy file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HmpxWarning)
        try:
            load_policy(policy=path)
        except HmpxError as error:
            return str(error).splitlines()
    lines = [line.strip() for warning in caught for line in str(warning.message).splitlines()]
    lines += oplists.absent(policy_files.read_policy_file(path).op_lists(), _MOST_CHECKED)
    return [line for line in lines if line != _LEFT_OUT]


_LEFT_OUT = "left out of the op lists:"


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
    lists: list[tuple[OpList, Decision]],
    *more: list[tuple[OpList, Decision]],
    strict: bool,
    is_from_files: bool = True,
) -> None:
    """Raises or warns about the faults of lists that stand beside each other.

    Args:
        lists: Pairs of a list and what it decides.
        *more: Lists that stand beside each other elsewhere.
        strict: Whether unknown names are an error.
        is_from_files: Whether those of libraries that are not installed are one, too, and lines that
            have no effect are warned of.
    """
    by_band: dict[bool, list[tuple[OpList, Decision]]] = {}
    for op_list, decision in lists:
        by_band.setdefault(op_list.is_shipped, []).append((op_list, decision))
    lists = [*lists, *[pair for each in more for pair in each]]
    op_lists = [op_list for op_list, _ in lists]
    unknown = oplists.unknown(op_lists)
    if strict:
        faults = unknown + (oplists.absent(op_lists) if is_from_files else [])
        if faults:
            raise OpListError("\n".join(faults))
    conflicts = list(chain.from_iterable(_conflicts(band) for band in (*by_band.values(), *more)))
    if conflicts:
        raise OpListError("\n".join(gathered(conflicts, len(conflicts))))
    if unknown:
        _warn(f"{_LEFT_OUT}\n  " + "\n  ".join(unknown))
    repeated = oplists.repeated(op_lists)
    if repeated:
        _warn("\n".join(repeated))
    idle = _idle(lists)
    if idle and is_from_files:
        _warn("\n".join(gathered(idle, len(idle))))


def _idle(lists: Iterable[tuple[OpList, Decision]]) -> list[str]:
    """Returns messages for lines that can never change anything."""
    return [
        message
        for op_list, decision in lists
        if decision.cast_policy is not CastPolicy.PASS
        for message in oplists.idle(op_list, is_relative=decision.cast_policy in _RELATIVE)
    ]


def _conflicts(lists: list[tuple[OpList, Decision]]) -> Iterator[str]:
    """Yields a message for each op that two lists claim."""
    seen: dict[str, tuple[oplists.Entry, Decision]] = {}
    for op_list, decision in lists:
        if decision.cast_policy in _RELATIVE:  # they give way to the other lists
            continue
        for name, entry in op_list.ops.items():
            said = _of(entry, decision)
            other = seen.setdefault(name, (entry, said))
            if other[1] != said:
                yield (
                    f"{entry.where}: {shown(entry.text)} is in two lists: it is the op {name!r}, as "
                    f"{shown(other[0].text)} at {other[0].where} is; keep one of the lines"
                )
        if op_list.everything is not None:
            said = _of(op_list.everything, decision)
            other = seen.setdefault("*", (op_list.everything, said))
            if other[1] != said:
                yield (
                    f"{op_list.everything.where}: '*' is in two lists, at {other[0].where} too; "
                    "keep one of the lines"
                )


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
                for name in _computing():
                    if name not in op_list.removed:
                        decisions.setdefault(name, star)
    for band in relative_bands:
        _resolve_named(band, decisions)
    return decisions


@functools.cache
def _computing() -> tuple[str, ...]:
    """Returns the ops that ``*`` means, in the order of the table."""
    return tuple(name for name in ops.table() if name in ops.computing())


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
    for name, (decision, _) in named.items():
        if ops.is_foreign(name):
            decisions.setdefault(name, decision)


def _warn(message: str) -> None:
    warnings.warn(message, HmpxWarning, stacklevel=_user_stack_level())


def _user_stack_level() -> int:
    """Returns the stack level of the first caller outside hmpx."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_globals.get("__package__")):
        level, frame = level + 1, frame.f_back
    return level
