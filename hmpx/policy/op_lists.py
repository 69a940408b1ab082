"""Op-list files: text -> op names, each with its file and line.

One op a line, ``#`` comments, ``@hmp`` includes the shipped list of the same kind, ``-mul``
removes an op again, ``*`` means every op that no list names. After the op may stand a low-precision
type of its own, and ``accumulate=`` and ``output=`` dtypes. Knows no policy.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from .. import arguments, ops, tensors
from ..errors import MOST_SHOWN, OpListError, OptionError, gathered, short, shown, suggestion
from ..frames import DIRECTORY
from ..torch_internals import torch_version
from . import text_files
from .decisions import INPUT, LowType, OutputType, parse_low_type

#: The shipped set that is used where none is named.
DEFAULT_SET: Final = "hmpx"

#: Kind of list -> its file name in a shipped set, or in a directory given as ``lists``.
FILE_NAMES: Final[Mapping[str, str]] = {
    "low": "bf16.txt",
    "fp32": "fp32.txt",
    "widest": "widest.txt",
}

#: What the names of shipped lists begin with.
SHIPPED: Final = "lists/"

#: The low list of a shipped set for float16, where it isn't that for bfloat16.
_FLOAT16: Final = "fp16.txt"

_FILE: Final = text_files.TextKind("an op list", 16 << 20, OpListError)

#: Torch has some thousand ops, so that no list of a person's comes near.
_MOST_LINES: Final = 1_000_000

#: Each brings in a whole list.
_MOST_INCLUDES: Final = 100

#: Of lines with a fault so many are kept; the others are counted.
MOST_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list.

    Attributes:
        text: The name as written, with what stands before it: ``"-mul"``.
        where: ``"my_bf16.txt:3"``.
        dtype: The low-precision type of this op alone; None for that of the list.
        accumulate_dtype: See `decisions.Decision`, and
        output_dtype: there.
    """

    text: str
    where: str
    dtype: LowType | None = None
    accumulate_dtype: torch.dtype | None = None
    output_dtype: OutputType | None = None

    def options(self) -> tuple[LowType | str | None, ...]:
        """Returns what stands after the name."""
        return self.dtype, self.accumulate_dtype, self.output_dtype


@dataclass(frozen=True)
class OpList:
    """A list after reading.

    Attributes:
        ops: Op name -> the line that put it there.
        unknown: Lines whose name is no op of the installed torch: the first of them.
        unknown_count: How many there are.
        repeated: (line, earlier line) pairs that hold the same text: the first of them.
        repeated_count: How many there are.
        removed: Ops removed by a ``-`` line, also operators of ops that are in the list.
        everything: The ``*`` line, if there is one.
        is_shipped: The list comes with hmpx.
    """

    ops: Mapping[str, Entry]
    unknown: tuple[Entry, ...] = ()
    unknown_count: int = 0
    repeated: tuple[tuple[Entry, Entry], ...] = ()
    repeated_count: int = 0
    removed: frozenset[str] = frozenset()
    everything: Entry | None = None
    is_shipped: bool = False


NOTHING: Final = OpList({})


def directory() -> Path:
    """Returns the directory of the shipped lists: in the package, or beside it in a checkout."""
    for candidate in (DIRECTORY / "lists", DIRECTORY.parent / "lists"):
        if (candidate / "first.txt").is_file():
            return candidate
    raise OpListError(f"the shipped lists are missing beside {DIRECTORY}; reinstall hmpx")


def set_names() -> list[str]:
    """Returns the names of the shipped sets: what ``lists=`` and ``@`` lines accept."""
    return sorted(path.parent.name for path in directory().glob(f"*/{FILE_NAMES['low']}"))


def read_list(path: str | os.PathLike[str], kind: str) -> OpList:
    """Returns the list in the file ``path``; ``kind`` is what ``@`` lines include.

    Raises:
        OpListError: The file can't be read, is no text, or holds a line that is no op name.
        OptionError: ``path`` is no path.
    """
    plain = arguments.path("an op list's path", path)
    return parse(_read_text(plain), short(plain), kind)


def read_shipped(name: str, kind: str = "low") -> OpList:
    """Returns a shipped list by its path under ``lists/``, without ``.txt``: ``"hmp/bf16"``."""
    text = _read_text(os.fspath(directory() / f"{name}.txt"))
    return parse(text, f"{SHIPPED}{name}.txt", kind, is_shipped=True)


@functools.cache
def of_libraries() -> OpList:
    """Returns the shipped list of other libraries' ops, which stands behind all other lists."""
    return read_shipped("libraries", "fp32")


def read_set(lists: str | os.PathLike[str], low_dtype: LowType | None = None) -> dict[str, OpList]:
    """Returns kind -> list for a shipped set's name, or a directory with files of those names.

    Args:
        lists: The name or directory.
        low_dtype: What the low list is for: a shipped set may have another one for float16.

    Raises:
        OptionError: There is no such set and no such directory.
        OpListError: A list in the directory can't be read.
    """
    name = arguments.path("lists", lists)
    names = set_names()
    if name in names:
        folder = directory() / name
        files = dict(FILE_NAMES)
        if low_dtype is torch.float16 and (folder / _FLOAT16).is_file():
            files["low"] = _FLOAT16
        return {
            kind: read_shipped(f"{name}/{Path(file_name).stem}", kind)
            for kind, file_name in files.items()
            if (folder / file_name).is_file()
        }
    found = {
        kind: read_list(Path(name) / file_name, kind)
        for kind, file_name in FILE_NAMES.items()
        if _is_there(Path(name), file_name)
    }
    if not found:
        raise OptionError(
            f"lists={shown(name)} is no shipped set ({', '.join(names)}) and no directory "
            f"with {' or '.join(FILE_NAMES.values())}{suggestion(name, names)}"
        )
    if "widest" not in found:
        found["widest"] = read_shipped("hmp/widest", "widest")
    return found


def _is_there(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file()
    except (OSError, ValueError):  # too long, or no path at all
        return False


def parse(text: str, source: str, kind: str = "low", *, is_shipped: bool = False) -> OpList:
    """Returns the list that ``text`` holds; ``source`` is what error messages call it.

    Raises:
        OpListError: A line is neither an op name, nor ``@set``, ``-op`` or ``*``; or what stands
            after the name is no option, or after a semicolon no condition; or there are too many
            lines.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    if len(lines) > _MOST_LINES:
        raise OpListError(
            f"{source}: {len(lines):,} lines are too many for an op list; at most {_MOST_LINES:,}"
        )
    contents = [line.partition("#")[0].strip() if "#" in line else line.strip() for line in lines]
    wheres = ((each, f"{source}:{number}") for number, each in enumerate(contents, start=1) if each)
    return from_lines(
        (
            (each, where)
            for line, where in wheres
            if (each := _without_condition(line, where) if ";" in line else line)
        ),
        kind,
        is_shipped=is_shipped,
    )


def _without_condition(line: str, where: str) -> str:
    """Returns a line without ``; torch >= 2.14``; ``""`` if that does not hold.

    Raises:
        OpListError: What stands after the semicolon is no condition.
    """
    content, _, condition = line.partition(";")
    found = _CONDITION.fullmatch(condition.strip())
    if found is None:
        raise OpListError(
            f"{where}: after a semicolon expected a version such as 'torch >= 2.14' or 'torch < 2.14', "
            f"found {shown(condition.strip())}"
        )
    is_newer = torch_version() >= (int(found["major"]), int(found["minor"]))
    return content.strip() if is_newer is (found["sign"] == ">=") else ""


_CONDITION: Final = re.compile(
    r"torch\s*(?P<sign><|>=)\s*(?P<major>\d{1,4})\.(?P<minor>\d{1,4})", re.ASCII
)


def from_lines(
    lines: Iterable[tuple[str, str]], kind: str = "low", *, is_shipped: bool = False
) -> OpList:
    """Returns the list that these lines make, each given with its ``file:line``.

    Raises:
        OpListError: As `parse`.
    """
    reading = _Reading(kind)
    reading.add_all(lines)
    return OpList(
        reading.found,
        tuple(reading.unknown),
        reading.unknown_count,
        tuple(reading.repeated),
        reading.repeated_count,
        frozenset(reading.removed),
        reading.everything,
        is_shipped,
    )


class _Parts(NamedTuple):
    """What a line says, wherever it stands.

    Attributes:
        content: The name as written, with what stands before it.
        start: Its first character.
        name: The op that is meant; None for an unknown one, ``@`` lines and ``*``.
        options: See `Entry.options`.
    """

    content: str
    start: str
    name: str | None
    options: tuple[Any, ...]

    @classmethod
    def of(cls, content: str, options: tuple[Any, ...]) -> _Parts:
        """Returns the parts of a line with this name and these options."""
        start = content[0]
        name = ops.names().get(content)
        if name is None and start not in "@*" and not content.isidentifier():
            name = ops.resolve(content.removeprefix("-"))
        is_castable = name is not None and ops.is_castable(name)
        return cls(content, start, name if is_castable else None, options)


class _Reading:
    """A list while it is read, line by line; no line takes longer for those before it."""

    def __init__(self, kind: str) -> None:
        self.found: dict[str, Entry] = {}
        self.unknown: list[Entry] = []
        self.unknown_count = 0
        self.repeated: list[tuple[Entry, Entry]] = []
        self.repeated_count = 0
        self.removed: set[str] = set()
        self.everything: Entry | None = None
        self._kind = kind
        self._own: dict[str, Entry] = {}
        self._where: dict[str, str] = {}  # name as written -> the last line with it
        self._taken: dict[str, _Parts] = {}  # line -> what it says, of those with more than a name
        self._options: dict[str, tuple[Any, ...]] = {}  # what follows a name -> what it says
        self._included: dict[str, OpList] = {}
        self._include_count = 0

    def add_all(self, lines: Iterable[tuple[str, str]]) -> None:
        """Takes lines of which something is left without their comment.

        Raises:
            OpListError: As `parse`.
        """
        known, written, taken = ops.names(), self._where, self._taken
        for line, where in lines:
            is_bare = line.isidentifier()  # as nearly all are: there is nothing to take apart
            if is_bare or (line[:1] not in "@-*" and " " not in line and line.isprintable()):
                earlier = written.get(line)
                written[line] = where
                name = known.get(line)
                if name is None and not is_bare:
                    name = ops.resolve(line)
                if name is None or not ops.is_castable(name):
                    self._note_unknown(line, where)
                elif name not in self._own or self._own[name].options() != _NO_OPTIONS:
                    self._add(name, Entry(line, where))
                if earlier is not None:
                    self._note_repeated(line, where, earlier)
            else:
                parts = taken.get(line)
                if parts is None:
                    parts = self._taken_apart(line, where)
                    if (
                        parts.name is not None or line == "*"
                    ):  # else there may be any number of them
                        taken[line] = parts
                self._add_parts(parts, where)

    def _taken_apart(self, line: str, where: str) -> _Parts:
        content, _, rest = line.partition(" ")
        options = self._options.get(rest)
        if options is None or content[:1] in "@-" or not content.isprintable():
            entry = parse_line(line, where, self._kind)
            if content == entry.text:  # else ``rest`` isn't all that follows the name
                self._options[rest] = entry.options()
            content, options = entry.text, entry.options()
        return _Parts.of(content, options)

    def _add_parts(self, parts: _Parts, where: str) -> None:
        content, name = parts.content, parts.name
        if parts.start == "@":
            self._include(content, where)
        elif parts.start == "-":
            self._remove(content, name, where)
        else:
            earlier = self._where.get(content)
            self._where[content] = where
            if earlier is not None:
                self._note_repeated(content, where, earlier)
            if content == "*":
                self.everything = Entry(content, where, *parts.options)
            elif name is None:
                self._note_unknown(content, where)
            elif name not in self._own or self._own[name].options() != parts.options:
                self._add(name, Entry(content, where, *parts.options))

    def _add(self, name: str, entry: Entry) -> None:
        own = self._own.get(name)
        if own is None:
            self.found[name] = self._own[name] = entry
            self.removed.discard(name)
        elif own.options() != entry.options():
            raise OpListError(
                f"{entry.where}: {shown(entry.text)} is the op {name!r}, which stands in this list "
                f"already, at {own.where}, with other dtypes; keep one of the lines"
            )

    def _note_repeated(self, content: str, where: str, earlier: str) -> None:
        self.repeated_count += 1
        if self.repeated_count <= MOST_KEPT:
            self.repeated.append((Entry(content, where), Entry(content, earlier)))

    def _note_unknown(self, content: str, where: str) -> None:
        why = ops.refusal(content.removeprefix("-"))
        if why:
            raise OpListError(f"{where}: {why}")
        self.unknown_count += 1
        if self.unknown_count <= MOST_KEPT:
            self.unknown.append(Entry(content, where))

    def _include(self, content: str, where: str) -> None:
        self._include_count += 1
        if self._include_count > _MOST_INCLUDES:
            raise OpListError(
                f"{where}: more than {_MOST_INCLUDES} @ lines in one list; "
                "one for each set is enough"
            )
        included = self._included.get(content)
        if included is None:
            included = self._included[content] = _included(content[1:], self._kind, where)
        self.found.update({n: e for n, e in included.ops.items() if n not in self._own})
        self.removed |= included.removed - self.found.keys()
        self.everything = included.everything or self.everything

    def _remove(self, content: str, name: str | None, where: str) -> None:
        if name is None:
            self._note_unknown(content, where)
            return
        is_listed = self.found.pop(name, None) is not None
        is_there = is_listed or self.everything or self._is_covered(name)
        if not is_there and name not in of_libraries().ops:
            self._note_unknown(content, where)
        self._own.pop(name, None)
        self.removed.add(name)

    def _is_covered(self, name: str) -> bool:
        """Whether ``name`` is an operator of an op in the list."""
        covering: str | None = name
        while covering is not None:
            if covering in self.found:
                return True
            covering = ops.covering(covering)
        return False


_NO_OPTIONS: Final = (None, None, None)


def parse_line(content: str, where: str, kind: str = "low") -> Entry:
    """Returns what one line says: ``"conv2d float16"``, ``"sum accumulate=float32"``.

    Raises:
        OpListError: What stands after the name is no option.
    """
    if not content.isprintable() and "\t" not in content:
        raise OpListError(f"{where}: one op a line, please, not {shown(content)}")
    name, *words = content.split(maxsplit=_MOST_WORDS) or [""]
    if not name:
        raise OpListError(f"{where}: an op name is empty")
    if not words:
        return Entry(name, where)
    options: dict[str, Any] = {}
    for word in words:
        key, is_option, value = word.partition("=")
        if not is_option:
            key, value = "dtype", word
        if key not in _OPTIONS:
            hint = suggestion(key, _OPTIONS) or f" ({', '.join(_OPTIONS)})"
            raise OpListError(f"{where}: unknown option {shown(key)} of {shown(name)}{hint}")
        if _OPTIONS[key] in options:
            raise OpListError(f"{where}: {shown(name)} is given {key} twice; keep one")
        try:
            options[_OPTIONS[key]] = _option(key, value)
        except OptionError as error:
            if not is_option and len(words) == 1 and ops.resolve(word) in ops.table():
                raise OpListError(f"{where}: one op a line, please, not {shown(content)}") from None
            raise OpListError(f"{where}: {error}") from None
    if name[0] in "@-":
        raise OpListError(f"{where}: {shown(name)} takes no options; put them after an op's name")
    if kind == "pass":
        raise OpListError(f"{where}: {shown(content)} names a dtype, but is left alone")
    if "dtype" in options and kind not in ("low", "fp16"):
        raise OpListError(
            f"{where}: {shown(content)} names a dtype, but only low-precision lists have a choice"
        )
    return Entry(name, where, **options)


@functools.lru_cache(maxsize=256)
def _option(key: str, value: str) -> Any:
    if key == "dtype":
        return parse_low_type(value)
    if key == "output" and value == INPUT:
        return INPUT
    return tensors.parse_name(value)


_OPTIONS: Final[Mapping[str, str]] = {
    "dtype": "dtype",
    "accumulate": "accumulate_dtype",
    "output": "output_dtype",
}


#: There are three options; a line of more words is wrong however it goes on.
_MOST_WORDS: Final = 8


def unknown(op_lists: Sequence[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for the lines that name nothing to cast."""
    faults = (
        f"{entry.where}: {_why_unknown(entry.text)}"
        for op_list in op_lists
        for entry in op_list.unknown
    )
    return gathered(faults, sum(op_list.unknown_count for op_list in op_lists), most)


def absent(op_lists: Iterable[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for lines that name what other libraries, as far as can be told, don't have.

    Args:
        op_lists: Lists; shipped ones name what need not be installed.
        most: How many messages to return.
    """
    faults = [
        f"{entry.where}: {why}"
        for op_list in op_lists
        if not op_list.is_shipped
        for name, entry in op_list.ops.items()
        if ops.is_foreign(name)
        and not entry.where.startswith(SHIPPED)
        and (why := ops.missing(name) or ops.lacking(name))
    ]
    return gathered(faults, len(faults), most)


def repeated(op_lists: Sequence[OpList], most: int = MOST_SHOWN) -> list[str]:
    """Returns messages for the lines that stand in their list twice."""
    faults = (
        f"{entry.where}: {shown(entry.text)} stands in this list already, at {earlier.where}; "
        "remove one of the lines"
        for op_list in op_lists
        for entry, earlier in op_list.repeated
    )
    return gathered(faults, sum(op_list.repeated_count for op_list in op_lists), most)


def idle(op_list: OpList, *, is_relative: bool) -> list[str]:
    """Returns messages for the lines of a user's list that can never change anything.

    ``iadd`` beside ``add``, which covers it, says nothing that is wrong.
    """
    return [
        f"{entry.where}: {shown(entry.text)} has no effect: "
        + ("it has one input only" if is_relative else "the type of what it writes to decides")
        + "; remove the line"
        for name, entry in op_list.ops.items()
        if not (op_list.is_shipped or entry.where.startswith(SHIPPED))
        and not ops.is_decisive(name, is_relative=is_relative)
        and ops.covering(name) not in op_list.ops
        and not (is_relative and (entry.accumulate_dtype or entry.output_dtype))
    ]


def _why_unknown(text: str) -> str:
    bare = text.removeprefix("-")
    if bare in ops.facts("became"):
        now = ops.facts("became")[bare][0]
        return f"{shown(bare)} was an op of Gaudi's torch; torch's own is {now!r}"
    name = ops.resolve(bare)
    if name is not None and not ops.is_castable(name):
        return f"{bare!r} computes nothing from tensors, so there is nothing to cast"
    if name is not None:
        return f"{text!r} removes an op that no earlier line holds"
    return f"unknown op {shown(bare)}{suggestion(bare, ops.names())}"


def _included(name: str, kind: str, where: str) -> OpList:
    names = set_names()
    if name not in names:
        raise OpListError(
            f"{where}: no shipped set {shown(name)} ({', '.join(names)}){suggestion(name, names)}"
        )
    included = read_set(name).get("low" if kind == "fp16" else kind)
    if included is None:
        raise OpListError(f"{where}: the shipped set {name!r} has no {kind} list")
    return included


def _read_text(path: str) -> str:
    text = text_files.read(path, _FILE)
    if "\0" in text:
        raise OpListError(f"{short(path)}: a binary file, not an op list; give a text file's path")
    return text
