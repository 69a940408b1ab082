"""Finds op lists: files, directories of them, and the shipped sets."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch

from ... import arguments
from ...errors import OpListError, OptionError, short, shown, suggestion
from ...frames import DIRECTORY
from .. import text_files
from ..decisions import LowType
from . import reading
from .kinds import FILE_NAMES, KINDS
from .op_list import OpList

#: The shipped set that is used where none is named.
DEFAULT_SET: Final = "hmpx"

#: Prefix of the names of shipped lists.
SHIPPED: Final = "lists/"

#: The path of each shipped list, its size, its number and when it changed.
State = tuple[tuple[str, int, int, int, int], ...]

#: How many states of the shipped lists are kept: they change where somebody edits them.
_STATES: Final = 2

_FILE: Final = text_files.TextKind("an op list", 16 << 20, OpListError)


def directory() -> Path:
    """Returns the directory of the shipped lists: in the package, or beside it in a checkout."""
    for candidate in (DIRECTORY / "lists", DIRECTORY.parent / "lists"):
        if (candidate / "first.txt").is_file():
            return candidate
    raise OpListError(f"the shipped lists are missing beside {DIRECTORY}; reinstall hmpx")


def set_names() -> list[str]:
    """Returns the names of the shipped sets, which ``lists=`` and ``@`` lines accept."""
    return list(_set_names(state()))


@functools.lru_cache(maxsize=_STATES)
def _set_names(state: State) -> list[str]:
    folder = directory()
    low = KINDS["low"].file_name
    return sorted(path.parent.name for path in folder.glob(f"*/{low}"))


def state() -> State:
    """Returns what tells the shipped lists from those that they are after a change of any file.

    What is made of them alone is kept by it: to read and parse them takes longer than most else of a
    conversion.
    """
    return tuple(_files(os.fspath(directory())))


def _files(folder: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Yields the path of each list in ``folder``, with its size, its number and when it changed."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith(".txt"):
                now = entry.stat()
                yield entry.path, now.st_size, now.st_ino, now.st_mtime_ns, now.st_ctime_ns


def read_list(
    path: str | os.PathLike[str], kind: str, faults: list[OpListError] | None = None
) -> OpList:
    """Returns the list in the file ``path``, of the kind with that name; ``faults`` as for `reading.parse`.

    Raises:
        OpListError: The file can't be read, is not text, or holds a line that is not valid.
        OptionError: ``path`` is not a path.
    """
    plain = arguments.path("an op list's path", path)
    return reading.parse(_read_text(plain), short(plain), kind, _SHIPPED_LISTS, faults=faults)


def read_shipped(name: str, kind: str = "low") -> OpList:
    """Returns a shipped list by its path under ``lists/``, without ``.txt``: ``"hmp/bf16"``."""
    return _read_shipped(state(), name, kind)


@functools.lru_cache(maxsize=_STATES * 100)
def _read_shipped(state: State, name: str, kind: str) -> OpList:
    text = _read_text(os.fspath(directory() / f"{name}.txt"))
    return parse(text, f"{SHIPPED}{name}.txt", kind, is_shipped=True)


@functools.cache
def of_libraries() -> OpList:
    """Returns the shipped list of other libraries' ops, which all other lists outrank."""
    return read_shipped("libraries", "fp32")


def read_set(lists: str | os.PathLike[str], low_dtype: LowType | None = None) -> dict[str, OpList]:
    """Returns kind -> list for a shipped set's name, or a directory with files of those names.

    Args:
        lists: The name or directory.
        low_dtype: The low-precision type: a shipped set may have another list for float16.

    Raises:
        OptionError: There is no such set and no such directory.
        OpListError: A list in the directory can't be read.
    """
    name = arguments.path("lists", lists)
    names = set_names()
    if name in names:
        return dict(_read_shipped_set(state(), name, low_dtype))
    found = {
        kind: read_list(Path(name) / file_name, kind)
        for kind, file_name in FILE_NAMES.items()
        if _is_there(Path(name), file_name)
    }
    if not found:
        raise OptionError(
            f"lists={shown(name)} is neither a shipped set ({', '.join(names)}) nor a directory "
            f"with {' or '.join(FILE_NAMES.values())}{suggestion(name, names)}"
        )
    missing = [kind for kind in KINDS.values() if kind.stand_in and kind.name not in found]
    return found | {kind.name: read_shipped(kind.stand_in, kind.name) for kind in missing}


@functools.lru_cache(maxsize=_STATES * 100)
def _read_shipped_set(state: State, name: str, low_dtype: LowType | None) -> dict[str, OpList]:
    folder = directory() / name
    return {
        kind: _read_shipped(state, f"{name}/{Path(file_name).stem}", kind)
        for kind, file_name in _shipped_files(folder, low_dtype).items()
        if (folder / file_name).is_file()
    }


def _is_there(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file()
    except (OSError, ValueError):  # too long, or it holds a null byte
        return False


def _shipped_files(folder: Path, low_dtype: LowType | None) -> dict[str, str]:
    """Returns kind -> file name, as `FILE_NAMES`, for a low-precision type."""
    files = dict(FILE_NAMES)
    if low_dtype is torch.float16:
        found = {kind.name: kind.float16_file_name for kind in KINDS.values()}
        files |= {kind: name for kind, name in found.items() if name and (folder / name).is_file()}
    return files


def parse(text: str, source: str, kind: str = "low", *, is_shipped: bool = False) -> OpList:
    """Returns the list that ``text`` holds; ``source`` is what error messages call it.

    Raises:
        OpListError: As `reading.parse`.
    """
    return reading.parse(text, source, kind, _SHIPPED_LISTS, is_shipped=is_shipped)


def from_lines(
    lines: Iterable[tuple[str, str]], kind: str = "low", faults: list[OpListError] | None = None
) -> OpList:
    """Returns the list that these lines make, each given with its ``file:line``; ``faults`` as for `reading.parse`.

    Raises:
        OpListError: As `reading.parse`.
    """
    return reading.from_lines(lines, kind, _SHIPPED_LISTS, faults=faults)


def _included(name: str, kind: str, where: str) -> OpList:
    names = set_names()
    if name not in names:
        raise OpListError(
            f"{where}: there is no shipped set {shown(name)} ({', '.join(names)}){suggestion(name, names)}"
        )
    included = read_set(name).get(KINDS[kind].included_as or kind)
    if included is None:
        raise OpListError(f"{where}: the shipped set {name!r} has no {kind} list")
    return included


def _read_text(path: str) -> str:
    text = text_files.read(path, _FILE)
    if "\0" in text:
        raise OpListError(f"{short(path)}: a binary file, not an op list; give a text file's path")
    return text


class _ShippedLists:
    """What lines of lists may refer to."""

    included = staticmethod(_included)
    of_libraries = staticmethod(of_libraries)


_SHIPPED_LISTS: Final = _ShippedLists()
