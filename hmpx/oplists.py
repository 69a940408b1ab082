"""Op-list files: text -> op names, each with its file and line.

One op a line, ``#`` comments, ``@hmp`` includes the shipped list of the same kind, ``-mul``
removes an op again, ``*`` means every op that no list names. After the op may stand a low-precision
type of its own, and ``accumulate=`` and ``output=`` dtypes. Knows no policy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from . import dtypes, ops
from .decisions import LowType, parse_low_type
from .errors import OpListError, OptionError, suggestion

#: Kind of list -> its file name in a shipped set, or in a directory given as ``lists``.
FILE_NAMES: Final[Mapping[str, str]] = {
    "low": "bf16.txt",
    "fp32": "fp32.txt",
    "widest": "widest.txt",
}


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
    output_dtype: torch.dtype | None = None

    def options(self) -> tuple[LowType | None, ...]:
        """Returns what stands after the name."""
        return self.dtype, self.accumulate_dtype, self.output_dtype


@dataclass(frozen=True)
class OpList:
    """A list after reading.

    Attributes:
        ops: Op name -> the line that put it there.
        unknown: Lines whose name is no op of the installed torch.
        repeated: (line, earlier line) pairs that hold the same text.
        removed: Ops removed by a ``-`` line, also operators of ops that are in the list.
        everything: The ``*`` line, if there is one.
        is_shipped: The list comes with hmpx.
    """

    ops: Mapping[str, Entry]
    unknown: tuple[Entry, ...] = ()
    repeated: tuple[tuple[Entry, Entry], ...] = ()
    removed: frozenset[str] = frozenset()
    everything: Entry | None = None
    is_shipped: bool = False


NOTHING: Final = OpList({})


def directory() -> Path:
    """Returns the directory of the shipped lists: in the package, or beside it in a checkout."""
    package = Path(__file__).parent
    for candidate in (package / "lists", package.parent / "lists"):
        if (candidate / "first.txt").is_file():
            return candidate
    raise OpListError(f"the shipped lists are missing beside {package}; reinstall hmpx")


def set_names() -> list[str]:
    """Returns the names of the shipped sets: what ``lists=`` and ``@`` lines accept."""
    return sorted(path.parent.name for path in directory().glob(f"*/{FILE_NAMES['low']}"))


def read(path: str | os.PathLike[str], kind: str) -> OpList:
    """Returns the list in the file ``path``; ``kind`` is what ``@`` lines include.

    Raises:
        OpListError: The file can't be read, is no text, or holds a line that is no op name.
        OptionError: ``path`` is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"an op-list path must be a string or a path, not {path!r}")
    return parse(_read_text(Path(path)), os.fspath(path), kind)


def read_shipped(name: str, kind: str = "low") -> OpList:
    """Returns a shipped list by its path under ``lists/``, without ``.txt``: ``"hmp/bf16"``."""
    text = _read_text(directory() / f"{name}.txt")
    return parse(text, f"lists/{name}.txt", kind, is_shipped=True)


def read_set(lists: str | os.PathLike[str]) -> dict[str, OpList]:
    """Returns kind -> list for a shipped set's name, or a directory with files of those names.

    Raises:
        OptionError: There is no such set and no such directory.
    """
    if isinstance(lists, str) and lists in set_names():
        folder = directory() / lists
        return {
            kind: read_shipped(f"{lists}/{Path(file_name).stem}", kind)
            for kind, file_name in FILE_NAMES.items()
            if (folder / file_name).is_file()
        }
    if not isinstance(lists, str | os.PathLike):
        raise OptionError(f"lists must be a name or a directory, not {lists!r}")
    folder = Path(lists)
    found = {
        kind: read(folder / file_name, kind)
        for kind, file_name in FILE_NAMES.items()
        if (folder / file_name).is_file()
    }
    if not found:
        names = set_names()
        raise OptionError(
            f"lists={os.fspath(lists)!r} is no shipped set ({', '.join(names)}) and no directory "
            f"with {' or '.join(FILE_NAMES.values())}{suggestion(str(lists), names)}"
        )
    if "widest" not in found:
        found["widest"] = read_shipped("hmp/widest", "widest")
    return found


def parse(text: str, source: str, kind: str = "low", *, is_shipped: bool = False) -> OpList:
    """Returns the list that ``text`` holds; ``source`` is what error messages call it.

    Raises:
        OpListError: A line is neither an op name, nor ``@set``, ``-op`` or ``*``; or what stands
            after the name is no option.
    """
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), start=1)
    contents = [(line.partition("#")[0].strip(), f"{source}:{number}") for number, line in lines]
    return from_lines([each for each in contents if each[0]], kind, is_shipped=is_shipped)


def from_lines(
    lines: Iterable[tuple[str, str]], kind: str = "low", *, is_shipped: bool = False
) -> OpList:
    """Returns the list that these lines make, each given with its ``file:line``.

    Raises:
        OpListError: As `parse`.
    """
    found: dict[str, Entry] = {}
    own: dict[str, Entry] = {}
    texts: dict[str, Entry] = {}
    unknown: list[Entry] = []
    repeated: list[tuple[Entry, Entry]] = []
    removed: set[str] = set()
    everything: Entry | None = None
    for line, where in lines:
        entry = parse_line(line, where, kind)
        content = entry.text
        if content in texts and content[0] not in "@-":
            repeated.append((entry, texts[content]))
        texts[content] = entry
        if content == "*":
            everything = entry
        elif content[0] == "@":
            included = _included(content[1:], kind, entry)
            found.update({n: e for n, e in included.ops.items() if n not in own})
            everything = included.everything or everything
        else:
            name = ops.resolve(content.removeprefix("-"))
            if name is None or not ops.is_castable(name):
                unknown.append(entry)
            elif content[0] == "-":
                if found.pop(name, None) is None and not (everything or _is_covered(name, found)):
                    unknown.append(entry)
                own.pop(name, None)
                removed.add(name)
            elif name in own and own[name].options() != entry.options():
                raise OpListError(
                    f"{entry.where}: {entry.text!r} is the op {name!r}, which stands in this list "
                    f"already, at {own[name].where}, with other dtypes; keep one of the lines"
                )
            elif name not in own:
                found[name] = own[name] = entry
                removed.discard(name)
    return OpList(
        found, tuple(unknown), tuple(repeated), frozenset(removed), everything, is_shipped
    )


def _is_covered(name: str, found: Mapping[str, Entry]) -> bool:
    """Whether ``name`` is an operator of an op in ``found``."""
    return any(name in ops.covered(other) for other in found)


def parse_line(content: str, where: str, kind: str = "low") -> Entry:
    """Returns what one line says: ``"conv2d float16"``, ``"sum accumulate=float32"``.

    Raises:
        OpListError: What stands after the name is no option.
    """
    if not content.isprintable() and "\t" not in content:
        raise OpListError(f"{where}: one op a line, please, not {content!r}")
    name, *words = content.split() or [""]
    if not name:
        raise OpListError(f"{where}: an op name is empty")
    options: dict[str, Any] = {}
    for word in words:
        key, is_option, value = word.partition("=")
        if not is_option:
            key, value = "dtype", word
        if key not in _OPTIONS:
            hint = suggestion(key, _OPTIONS) or f" ({', '.join(_OPTIONS)})"
            raise OpListError(f"{where}: unknown option {key!r} of {name!r}{hint}")
        if _OPTIONS[key] in options:
            raise OpListError(f"{where}: {name!r} is given {key} twice; keep one")
        try:
            is_low = key == "dtype"
            options[_OPTIONS[key]] = parse_low_type(value) if is_low else dtypes.parse_name(value)
        except OptionError as error:
            if not is_option and len(words) == 1 and ops.resolve(word) is not None:
                raise OpListError(f"{where}: one op a line, please, not {content!r}") from None
            raise OpListError(f"{where}: {error}") from None
    if words and name[0] in "@-":
        raise OpListError(f"{where}: {name!r} takes no options; put them after an op's name")
    if options and kind == "pass":
        raise OpListError(f"{where}: {content!r} names a dtype, but is left alone")
    if "dtype" in options and kind not in ("low", "fp16"):
        raise OpListError(
            f"{where}: {content!r} names a dtype, but only low-precision lists have a choice"
        )
    return Entry(name, where, **options)


_OPTIONS: Final[Mapping[str, str]] = {
    "dtype": "dtype",
    "accumulate": "accumulate_dtype",
    "output": "output_dtype",
}


#: Suggesting a name takes milliseconds.
_MOST_FAULTS: Final = 100


def unknown(op_list: OpList) -> list[str]:
    """Returns a message for each line of ``op_list`` that names nothing to cast."""
    shown = [
        f"{entry.where}: {_why_unknown(entry.text)}" for entry in op_list.unknown[:_MOST_FAULTS]
    ]
    more = len(op_list.unknown) - len(shown)
    return [*shown, f"{op_list.unknown[-1].where}: and {more:,} more before"] if more else shown


def repeated(op_list: OpList) -> list[str]:
    """Returns a message for each line of ``op_list`` that stands there twice."""
    return [
        f"{entry.where}: {entry.text!r} stands in this list already, at {earlier.where}; "
        "remove one of the lines"
        for entry, earlier in op_list.repeated
    ]


def _why_unknown(text: str) -> str:
    bare = text.removeprefix("-")
    name = ops.resolve(bare)
    if name is not None and not ops.is_castable(name):
        return f"{bare!r} computes nothing from tensors, so there is nothing to cast"
    if name is not None:
        return f"{text!r} removes an op that no earlier line holds"
    return f"unknown op {bare!r}{suggestion(bare, ops.names())}"


def _included(name: str, kind: str, entry: Entry) -> OpList:
    names = set_names()
    if name not in names:
        raise OpListError(
            f"{entry.where}: no shipped set {name!r} ({', '.join(names)}){suggestion(name, names)}"
        )
    included = read_set(name).get("low" if kind == "fp16" else kind)
    if included is None:
        raise OpListError(f"{entry.where}: the shipped set {name!r} has no {kind} list")
    return included


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise OpListError(f"{path}: no such file; give the path of an op list") from None
    except IsADirectoryError:
        raise OpListError(f"{path}: a directory, not an op list; give a file's path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OpListError(f"{path}: can't be read: {reason}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OpListError(
            f"{path}: no UTF-8 text (byte {error.start}: {data[error.start]:#04x}); save it as UTF-8"
        ) from None
    if "\0" in text:
        raise OpListError(f"{path}: a binary file, not an op list; give a text file's path")
    return text
