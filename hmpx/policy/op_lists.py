"""Op lists and policy files as data, and the precedence of lists that name or cover the same op."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from .. import ops
from ..errors import OpListError, OptionError
from .decisions import YIELDING, CastPolicy, Decision, LowType

#: The default shipped set.
DEFAULT_SET: Final = "hmpx"


class ListKind(NamedTuple):
    """The properties of all op lists of a kind."""

    name: str  # Its name in messages and policy files
    cast_policy: CastPolicy  # The decision for its ops
    # The target dtype; None for the policy's low-precision type, or if the cast policy has no dtype
    dtype: torch.dtype | None = None
    file_name: str | None = None  # Its file in a directory of lists; None if directories have none
    # In a shipped set, the file that replaces it if the low-precision type is float16
    float16_file_name: str | None = None
    # The shipped list for directories without such a file; ``""`` for none
    stand_in: str = ""
    is_key: bool = True  # Policy files, and the sections in them, have lists of this kind


_ROWS: Final = (
    ListKind("low", CastPolicy.LOW, file_name="bf16.txt", float16_file_name="fp16.txt"),
    ListKind("fp16", CastPolicy.LOW, torch.float16, is_key=False),
    ListKind("fp32", CastPolicy.FP32, torch.float32, file_name="fp32.txt"),
    ListKind("widest", CastPolicy.WIDEST, file_name="widest.txt", stand_in="hmp/widest"),
    ListKind("first", CastPolicy.FIRST),
    ListKind("follow", CastPolicy.FOLLOW),
    ListKind("pass", CastPolicy.PASS),
)

#: Name -> kind.
KINDS: Final[Mapping[str, ListKind]] = {kind.name: kind for kind in _ROWS}

#: Names of the kinds.
LIST_KINDS: Final = tuple(KINDS)

#: The lists that a policy file, and each section in it, may hold.
KEYS: Final = tuple(kind.name for kind in _ROWS if kind.is_key)

#: Kind of list -> its file name in a shipped set, or in a directory given as ``lists``.
FILE_NAMES: Final[Mapping[str, str]] = {
    kind.name: kind.file_name for kind in _ROWS if kind.file_name is not None
}

#: The values of ``legalize``.
LEGALIZE_MODES: Final = ("auto", "always", "never", "fast")

#: The values of ``hardware``.
HARDWARE_MODES: Final = ("auto", "never", "require")

#: In a directory of lists: the arguments of `convert` with which they were measured.
OPTIONS_NAME: Final = "options.yaml"

#: The policy file that `hmpx.tune` writes where modules differ.
POLICY_NAME: Final = "policy.yaml"

#: Endings of the names of policy files.
POLICY_SUFFIXES: Final = (".yaml", ".yml", ".json")


def is_policy_file(path: object) -> bool:
    """Whether ``path`` has the name of a policy file."""
    return isinstance(path, str) and path.endswith(POLICY_SUFFIXES)


class Entry(NamedTuple):
    """One line of a list."""

    text: str  # The name as written, with its prefix: ``"-mul"``
    where: str  # ``"my_bf16.txt:3"``
    options: Mapping[str, Any] = {}  # Field of `Decision` -> its value in the line


@dataclass
class OpList:
    """A list after reading."""

    ops: dict[str, Entry]  # Op name -> the line that put it there
    # Lines whose name is not an op of the installed torch
    unknown: list[Entry] = field(default_factory=list)
    # Names that occur twice, as written, each with both places, the later one first
    repeated: list[tuple[str, str, str]] = field(default_factory=list)
    # Ops removed by a ``-`` line, including operators of ops in the list
    removed: set[str] = field(default_factory=set)
    everything: Entry | None = None  # The ``*`` line, if there is one
    is_shipped: bool = False  # The list comes with hmpx


class Listed(NamedTuple):
    """A list, and the decision of its lines without options."""

    op_list: OpList
    decision: Decision

    def decided(self, entry: Entry) -> Decision:
        """Returns the decision of a line: the list's, with the line's options."""
        try:
            return dataclasses.replace(self.decision, reason=entry.where, **entry.options)
        except OptionError as error:
            raise OpListError(f"{entry.where}: {error}") from None

    @property
    def yields(self) -> bool:
        """Whether lists that don't yield override this one."""
        return self.decision.cast_policy in YIELDING


def listed(lists: Mapping[str, OpList], low_dtype: LowType) -> list[Listed]:
    """Returns lists by kind with their decisions; ``low_dtype`` is the low-precision type."""
    found = []
    for name, op_list in lists.items():
        kind = KINDS[name]
        low = low_dtype if kind.cast_policy is CastPolicy.LOW else None
        found.append(Listed(op_list, Decision(kind.cast_policy, kind.dtype or low)))
    return found


# --- policy files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SectionSource:
    """One section as it is written."""

    lists: Mapping[str, OpList]  # Name in `KEYS` -> op list
    conditions: Mapping[str, Any]  # Key in `sections.CONDITIONS` -> value
    low_precision_type: LowType | None  # For its lists; None for the file's
    where: str  # ``"policy.yaml:12"``


@dataclass(frozen=True)
class PolicySource:
    """A policy file after reading, before anything is decided."""

    # Name in `KEYS` -> ops added to that list
    lists: Mapping[str, OpList] = field(default_factory=dict)
    # Name in `KEYS` -> the lines that remove ops from the shipped list
    removed: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    base: str | None = DEFAULT_SET  # The shipped set, or a directory; None for none
    low_precision_type: LowType | None = None  # None if the file names none
    # Options of all its ops in number formats, which lines override: ``rounding``, ``overflow``,
    # ``round_gradients`` as in `convert`
    formats: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[SectionSource, ...] = ()  # In their order
    is_verbose: bool = False  # Whether the file asks for logging
    notes: tuple[str, ...] = ()  # Messages to the user
    where: str = ""  # The file

    def op_lists(self) -> list[OpList]:
        """Returns all the lists in it."""
        return [*self.lists.values(), *[o for each in self.sections for o in each.lists.values()]]


# --- precedence --------------------------------------------------------------------------------


def resolve(bands: Iterable[list[Listed]]) -> dict[str, Decision]:
    """Returns op -> decision.

    A band is a list of op lists. An earlier band overrides a later one. Within a band an operator's
    own line overrides that of the op that covers it. Every named line of a low-precision or fp32
    list overrides ``*``.
    """
    decisions: dict[str, Decision] = {}
    bands = list(bands)
    firm = [[each for each in band if not each.yields] for band in bands]
    for band in firm:
        _resolve_named(band, decisions)
    for each in itertools.chain.from_iterable(firm):
        if each.op_list.everything is not None:
            star = each.decided(each.op_list.everything)
            for name in ops.table():
                if name in ops.computing() and name not in each.op_list.removed:
                    decisions.setdefault(name, star)
    for band in bands:
        _resolve_named([each for each in band if each.yields], decisions)
    return decisions


def _resolve_named(band: list[Listed], decisions: dict[str, Decision]) -> None:
    """Adds the decisions of the named lines of ``band`` for ops without a decision."""
    named = {
        name: (each.decided(entry), each.op_list)
        for each in band
        for name, entry in each.op_list.ops.items()
    }
    for name in sorted({each for line in named for each in ops.covered(line)} & ops.table().keys()):
        covering = ops.covering_among(name, named)
        if covering is not None and name not in named[covering][1].removed:
            decisions.setdefault(name, named[covering][0])
    for name, (decision, _) in named.items():
        if ops.is_foreign(name):
            decisions.setdefault(name, decision)
