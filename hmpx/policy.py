"""From lists to decisions: which `CastPolicy` each op has, why, and in which dtype.

Conflicts and precedence are settled here, once; a `Policy` is frozen and holds the answer for
every op that is cast. Knows nothing of how torch is patched.
"""

from __future__ import annotations

import enum
import os
import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import dtypes, oplists, ops
from .errors import HmpxWarning, OpListError, OptionError, suggestion
from .oplists import OpList


class CastPolicy(enum.Enum):
    """What is done with the inputs of an op."""

    LOW = "low"  #: every eligible input -> the low-precision dtype
    FP32 = "fp32"  #: every bfloat16 or float16 input -> float32
    WIDEST = "widest"  #: all floating inputs -> the widest dtype among them
    FIRST = "first"  #: the other eligible inputs -> the dtype of the first floating one
    PASS = "pass"  #: nothing


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy does with one op.

    Attributes:
        cast_policy: The rule.
        dtype: The dtype that `CastPolicy.LOW` and `CastPolicy.FP32` cast to; None for the others.
        reason: Where it comes from: ``"my_bf16.txt:3"``. Not part of equality.
    """

    cast_policy: CastPolicy
    dtype: torch.dtype | None = None
    reason: str = field(default="", compare=False)


_PASS = Decision(CastPolicy.PASS, reason="in no list")


@dataclass(frozen=True)
class Policy:
    """A decision for every op that is cast.

    Attributes:
        decisions: Op name -> decision. Ops that are not in it are left alone.
        low_precision_type: The dtype of the low-precision list.
    """

    decisions: Mapping[str, Decision]
    low_precision_type: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", types.MappingProxyType(dict(self.decisions)))

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self.low_precision_type))

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (dict(self.decisions), self.low_precision_type)

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
        low_precision_type: torch.dtype | str = torch.bfloat16,
    ) -> Policy:
        """Returns the policy that holds exactly these ops, without any shipped list.

        Where an op stands in several, an earlier argument outranks a later one.

        Raises:
            OpListError: A name is unknown, or stands in both ``low`` and ``fp32``.
            OptionError: ``low_precision_type`` is none.
        """
        low_dtype = dtypes.parse_low_precision(low_precision_type)
        given = {"low": low, "fp32": fp32, "widest": widest, "first": first}
        lists = [
            (oplists.parse("\n".join(names), f"<{kind}>"), _decision(kind, low_dtype))
            for kind, names in given.items()
        ]
        _report(lists, strict=True)
        return cls(_resolve([[pair] for pair in lists]), low_dtype)


def load_policy(
    bf16_file_path: str | os.PathLike[str] = "",
    fp32_file_path: str | os.PathLike[str] = "",
    *,
    fp16_file_path: str | os.PathLike[str] = "",
    opt_level: str = "O1",
    low_precision_type: torch.dtype | str = torch.bfloat16,
    lists: str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Policy:
    """Returns the policy that these lists make; the arguments are those of `hmpx.convert`.

    Raises:
        OpListError: A list can't be read, or an op stands in two lists; with ``strict``, also if a
            name is unknown.
        OptionError: ``opt_level``, ``low_precision_type`` or ``lists`` has no such value.
    """
    low_dtype = dtypes.parse_low_precision(low_precision_type)
    if opt_level not in ("O1", "O2"):
        raise OptionError(f"opt_level must be 'O1' or 'O2', not {opt_level!r}")
    for argument, path in (("bf16_file_path", bf16_file_path), ("fp32_file_path", fp32_file_path)):
        if path in ("O1", "O2"):
            raise OptionError(f"{argument} is {path!r}; pass it by name: opt_level={path!r}")
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


def check(paths: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Returns every fault of list files, kind (``low``, ``fp16``, ``fp32``) -> paths, as text."""
    faults: list[str] = []
    read: list[tuple[OpList, Decision]] = []
    for kind, files in paths.items():
        for path in files:
            try:
                read.append((oplists.read(path, kind), _decision(kind, torch.bfloat16)))
            except OpListError as error:
                faults.append(str(error))
    for op_list, _ in read:
        faults += oplists.unknown(op_list) + oplists.repeated(op_list)
    return faults + _conflicts(read)


def _is_low(fp16_file_path: object, low_dtype: torch.dtype) -> bool:
    """Whether the fp16 file *is* the low-precision list, since the low type is fp16."""
    return bool(fp16_file_path) and low_dtype is torch.float16


def _decision(kind: str, low_dtype: torch.dtype) -> Decision:
    return {
        "low": Decision(CastPolicy.LOW, low_dtype),
        "fp16": Decision(CastPolicy.LOW, torch.float16),
        "fp32": Decision(CastPolicy.FP32, torch.float32),
        "widest": Decision(CastPolicy.WIDEST),
        "first": Decision(CastPolicy.FIRST),
    }[kind]


def _report(lists: list[tuple[OpList, Decision]], *, strict: bool) -> None:
    """Raises or warns about the faults of lists that stand beside each other."""
    unknown = [fault for op_list, _ in lists for fault in oplists.unknown(op_list)]
    if unknown and strict:
        raise OpListError("\n".join(unknown))
    by_band: dict[bool, list[tuple[OpList, Decision]]] = {}
    for op_list, decision in lists:
        by_band.setdefault(op_list.is_shipped, []).append((op_list, decision))
    conflicts = [fault for band in by_band.values() for fault in _conflicts(band)]
    if conflicts:
        raise OpListError("\n".join(conflicts))
    if unknown:
        _warn("left out of the op lists:\n  " + "\n  ".join(unknown))
    repeated = [fault for op_list, _ in lists for fault in oplists.repeated(op_list)]
    if repeated:
        _warn("\n".join(repeated))


def _conflicts(lists: list[tuple[OpList, Decision]]) -> list[str]:
    faults = []
    seen: dict[str, tuple[oplists.Entry, OpList, Decision]] = {}
    for op_list, decision in lists:
        if decision.dtype is None:  # WIDEST and FIRST give way to the other lists
            continue
        for name, entry in op_list.ops.items():
            other = seen.setdefault(name, (entry, op_list, decision))
            if other[2] != decision:
                faults.append(
                    f"{entry.where}: {entry.text!r} is in two lists: it is the op {name!r}, as "
                    f"{other[0].text!r} at {other[0].where} is; keep one of the lines"
                )
        if op_list.everything is not None:
            other = seen.setdefault("*", (op_list.everything, op_list, decision))
            if other[2] != decision:
                faults.append(
                    f"{op_list.everything.where}: '*' is in two lists, at {other[0].where} too; "
                    "keep one of the lines"
                )
    return faults


def _resolve(bands: list[list[tuple[OpList, Decision]]]) -> dict[str, Decision]:
    """Returns op -> decision.

    An earlier band outranks a later one. Within a band an operator's own line outranks that of the
    op that covers it. ``*`` comes after every named line of a low-precision or fp32 list.
    """
    decisions: dict[str, Decision] = {}
    relative = (CastPolicy.WIDEST, CastPolicy.FIRST)
    fixed_bands = [[pair for pair in band if pair[1].cast_policy not in relative] for band in bands]
    relative_bands = [[pair for pair in band if pair[1].cast_policy in relative] for band in bands]
    for band in fixed_bands:
        _resolve_named(band, decisions)
    for band in fixed_bands:
        for op_list, decision in band:
            if op_list.everything is not None:
                star = Decision(decision.cast_policy, decision.dtype, op_list.everything.where)
                for name in ops.table():
                    if name not in op_list.removed and _is_computation(name):
                        decisions.setdefault(name, star)
    for band in relative_bands:
        _resolve_named(band, decisions)
    return decisions


def _resolve_named(band: list[tuple[OpList, Decision]], decisions: dict[str, Decision]) -> None:
    """Adds to ``decisions`` what the named lines of ``band`` say of ops not in it yet."""
    named = {
        name: Decision(decision.cast_policy, decision.dtype, entry.where)
        for op_list, decision in band
        for name, entry in op_list.ops.items()
    }
    if not named:
        return
    for name, op in ops.table().items():
        covering: str | None = name
        while covering is not None and covering not in named:
            covering = op.covered_by if covering == name else ops.table()[covering].covered_by
        if covering is not None:
            decisions.setdefault(name, named[covering])


def _is_computation(name: str) -> bool:
    """Whether ``*`` covers the op: it computes with tensors, and casting can't lose a write."""
    return not name.startswith("_") and ops.is_castable(name) and not ops.is_view(name)


def _warn(message: str) -> None:
    warnings.warn(message, HmpxWarning, stacklevel=_user_stack_level())


def _user_stack_level() -> int:
    """Returns the stack level of the first caller outside hmpx."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    return level
