"""Reads op lists: text -> op names, each with its file and line; finds the shipped ones."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from .. import arguments, files, number_formats, ops
from ..errors import OpListError, OptionError, short, shown, suggestion
from ..places import DIRECTORY
from ..torch_internals import torch_version
from .decisions import LINE_OPTIONS, OF_ALL_LINES, SHIPPED, CastPolicy, LowType
from .op_lists import FILE_NAMES, KINDS, POLICY_NAME, Entry, OpList

_CONDITION: Final = re.compile(
    r"torch\s*(?P<sign><|>=)\s*(?P<major>\d{1,4})\.(?P<minor>\d{1,4})", re.ASCII
)


def parse(text: str, source: str, kind: str = "low", **options: Any) -> OpList:
    """Returns the list in ``text``, called ``source`` in messages; the ``options`` are those of `from_lines`."""
    lines = text.removeprefix("\ufeff").splitlines()
    contents = (line.partition("#")[0].strip() for line in lines)
    numbered = ((each, f"{source}:{n}") for n, each in enumerate(contents, 1) if each)
    return from_lines(numbered, kind, **options)


def from_lines(
    lines: Iterable[tuple[str, str]],
    kind: str = "low",
    *,
    is_shipped: bool = False,
    faults: list[OpListError] | None = None,
    version: tuple[int, int] | None = None,
) -> OpList:
    """Returns the list of lines, each with its ``file:line``; ``faults`` collects errors of lines."""
    reading = _Reading(kind, is_shipped, version or torch_version())
    for line, where in lines:
        try:
            reading.add(line, where)
        except OpListError as error:
            if faults is None:
                raise
            faults.append(error)
    return reading.list


class _Reading:
    """A list while it is read, line by line; the time for a line does not grow with the list."""

    def __init__(self, kind: str, is_shipped: bool, version: tuple[int, int]) -> None:
        self._kind, self._version = kind, version
        self.list = OpList({}, is_shipped=is_shipped)
        self._own: dict[str, Entry] = {}  # those that are not from an ``@`` line
        self._where: dict[str, str] = {}  # name as written -> the last line with it

    def add(self, line: str, where: str) -> None:
        """Adds a line without its comment."""
        if ";" in line:
            line = _applying(line, where, self._version)
            if not line:
                return
        entry = _parse_line(line, where, self._kind)
        text = entry.text
        if text[0] == "@":
            self._include(text[1:], where)
            return
        name = ops.resolve(text.removeprefix("-"))
        name = name if name is not None and ops.is_castable(name) else None
        if text[0] == "-":
            self._remove(entry, name)
            return
        earlier = self._where.get(text)
        self._where[text] = where
        if text == "*":
            self.list.everything = entry
        elif name is None:
            self._note_unknown(entry)
        elif name not in self._own:
            self.list.ops[name] = self._own[name] = entry
            self.list.removed.discard(name)
        elif self._own[name].options != entry.options:
            raise OpListError(
                f"{where}: {shown(text)} is the op {name!r}, which is already in this list, at "
                f"{self._own[name].where}, with other dtypes; keep one of the lines"
            )
        if earlier is not None:
            self.list.repeated.append((text, where, earlier))

    def _note_unknown(self, entry: Entry) -> None:
        if "," in entry.text:
            raise OpListError(f"{entry.where}: expected one op per line, found {shown(entry.text)}")
        self.list.unknown.append(entry)

    def _include(self, name: str, where: str) -> None:
        names = set_names()
        if shipped_set(name) is None:
            raise OpListError(
                f"{where}: there is no shipped set {shown(name)} ({', '.join(names)})"
                f"{suggestion(name, names)}"
            )
        kind, pinned = self._kind, f"{name}@{self._version[0]}.{self._version[1]}"
        is_pinned = self._version != torch_version() and _PINNED.fullmatch(pinned)
        included = read_set(pinned if is_pinned else name).get("low" if kind == "fp16" else kind)
        if included is None:
            raise OpListError(f"{where}: the shipped set {name!r} has no {kind} list")
        self.list.ops |= {n: e for n, e in included.ops.items() if n not in self._own}
        self.list.removed |= included.removed - self.list.ops.keys()
        self.list.everything = included.everything or self.list.everything

    def _remove(self, entry: Entry, name: str | None) -> None:
        if name is None:
            self._note_unknown(entry)
            return
        was_listed = self.list.ops.pop(name, None) or self.list.everything
        is_there = was_listed or ops.covering_among(name, self.list.ops) is not None
        if not is_there and name not in of_libraries().ops:
            self._note_unknown(entry)
        self._own.pop(name, None)
        self.list.removed.add(name)


# --- one line ----------------------------------------------------------------------------------


def _applying(line: str, where: str, version: tuple[int, int]) -> str:
    """Returns a line without its ``; torch >= 2.14``; ``""`` if it does not hold for ``version``."""
    content, _, condition = line.partition(";")
    found = _CONDITION.fullmatch(condition.strip())
    if found is None:
        raise OpListError(
            f"{where}: after a semicolon expected a version such as 'torch >= 2.14' or 'torch < 2.14', "
            f"found {shown(condition.strip())}"
        )
    is_newer = version >= (int(found["major"]), int(found["minor"]))
    return content.strip() if is_newer is (found["sign"] == ">=") else ""


def _parse_line(content: str, where: str, kind: str) -> Entry:
    """Returns the entry of a line: ``"conv2d float16"``, ``"sum accumulate=float32"``."""
    if not content.isprintable() and "\t" not in content:
        raise OpListError(f"{where}: expected one op per line, found {shown(content)}")
    name, *words = content.split() or [""]
    if not name:
        raise OpListError(f"{where}: an op name is empty")
    if not words:
        return Entry(name, where)
    options: dict[str, Any] = {}
    for word in words:
        key, is_option, value = word.partition("=")
        if not is_option:
            key, value = "dtype", word
        if key not in LINE_OPTIONS:
            hint = suggestion(key, LINE_OPTIONS) or f" ({', '.join(LINE_OPTIONS)})"
            raise OpListError(f"{where}: unknown option {shown(key)} of {shown(name)}{hint}")
        field, read = LINE_OPTIONS[key]
        if field in options:
            raise OpListError(f"{where}: {shown(name)} is given {key} twice; keep one")
        try:
            options[field] = read(value)
        except OptionError as error:
            is_op = ops.resolve(word.strip(",")) in ops.table() and not number_formats.said_of(word)
            message = f"expected one op per line, found {shown(content)}"
            raise OpListError(f"{where}: {message if is_op and not is_option else error}") from None
    if name[0] in "@-":
        raise OpListError(f"{where}: {shown(name)} takes no options; put them after an op's name")
    cast_policy = KINDS[kind].cast_policy
    if cast_policy is CastPolicy.PASS:
        raise OpListError(f"{where}: {shown(content)} names a dtype, but is left alone")
    if cast_policy is not CastPolicy.LOW and options.keys() - OF_ALL_LINES:
        raise OpListError(
            f"{where}: {shown(content)} names a dtype, but only low-precision lists have a choice"
        )
    return Entry(name, where, options)


# --- files -------------------------------------------------------------------------------------


def directory() -> Path:
    """Returns the directory of the shipped lists: in the package, or next to it in a checkout."""
    for candidate in (DIRECTORY / "lists", DIRECTORY.parent / "lists"):
        if (candidate / "first.txt").is_file():
            return candidate
    raise OpListError(f"the shipped lists are missing next to {DIRECTORY}; reinstall hmpx")


@functools.cache
def set_names() -> list[str]:
    """Returns the names of the shipped sets, which ``lists=`` and ``@`` lines accept."""
    return sorted(path.parent.name for path in directory().glob(f"*/{FILE_NAMES['low']}"))


def read_list(
    path: str | os.PathLike[str], kind: str, faults: list[OpListError] | None = None
) -> OpList:
    """Returns the list in the file ``path``, of the named kind; ``faults`` as for `parse`."""
    plain = arguments.path("an op list's path", path)
    return parse(files.read_text(plain, files.OP_LIST), short(plain), kind, faults=faults)


#: A set that torch.autocast has had in some version of torch, and the versions that are known.
_PINNED: Final = re.compile(r"(autocast-(?:cpu|cuda|mps|xpu))@(\d{1,3})\.(\d{1,3})", re.ASCII)
_OLDEST, _NEWEST = (2, 6), (2, 14)


def shipped_set(name: str) -> tuple[str, tuple[int, int]] | None:
    """Returns a shipped set's directory and the torch version that its lines are read for; None for others.

    The version is the installed one, or that of ``"autocast-cuda@2.11"``.
    """
    if name in set_names():
        return name, torch_version()
    found = _PINNED.fullmatch(name)
    if found is None:
        return None
    version = int(found[2]), int(found[3])
    if not _OLDEST <= version <= _NEWEST:
        raise OptionError(
            f"lists {shown(name)}: the lists of torch {_OLDEST[0]}.{_OLDEST[1]} to "
            f"{_NEWEST[0]}.{_NEWEST[1]} are known"
        )
    return found[1], version


@functools.cache
def read_shipped(name: str, kind: str = "low", version: tuple[int, int] | None = None) -> OpList:
    """Returns a shipped list by its path under ``lists/``, without ``.txt``: ``"hmp/bf16"``.

    Lines are read for a torch ``version``; None is the installed one. Names that this torch lacks are left out.
    """
    text = (directory() / f"{name}.txt").read_text("utf-8")
    found = parse(text, f"{SHIPPED}{name}.txt", kind, is_shipped=True, version=version)
    found.unknown.clear()  # a user can't change them
    return found


def of_libraries() -> OpList:
    """Returns the shipped list of other libraries' ops, which all other lists override."""
    return read_shipped("libraries", "fp32")


def read_set(lists: str | os.PathLike[str], low_dtype: LowType | None = None) -> dict[str, OpList]:
    """Returns kind -> list for a shipped set, also for float16 as the low type, or for a directory of lists."""
    name = arguments.path("lists", lists)
    shipped = shipped_set(name)
    folder = directory() / shipped[0] if shipped else Path(name)
    found = {}
    for kind in KINDS.values():
        half = kind.float16_file_name if shipped and low_dtype is torch.float16 else None
        file_name = next(
            (f for f in (half, kind.file_name) if f and os.path.isfile(folder / f)),  # noqa: PTH113  # of any text
            None,
        )
        if file_name is not None and shipped:
            path = f"{shipped[0]}/{Path(file_name).stem}"
            found[kind.name] = read_shipped(path, kind.name, shipped[1])
        elif file_name is not None:
            found[kind.name] = read_list(folder / file_name, kind.name)
    if not found:
        names, path = set_names(), os.path.join(name, POLICY_NAME)  # noqa: PTH118  # any text
        is_there = os.path.isfile(path)  # noqa: PTH113  # any text
        hint = f"; give policy={shown(path)}" if is_there else suggestion(name, names)
        raise OptionError(
            f"lists={shown(name)} is neither a shipped set ({', '.join(names)}) nor a directory "
            f"with {' or '.join(FILE_NAMES.values())}{hint}"
        )
    for kind in () if shipped else KINDS.values():
        if kind.stand_in and kind.name not in found:
            found[kind.name] = read_shipped(kind.stand_in, kind.name)
    return found
