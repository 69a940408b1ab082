"""Reads and writes users' files: regular ones up to a size, checked against the shape that they must have, written whole."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import itertools
import json
import os
import secrets
import shutil
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from .errors import (
    CheckpointError,
    HmpxError,
    OpListError,
    OptionError,
    PolicyFileError,
    also,
    cut,
    passing_over,
    raised_here,
    said_by,
    short,
    shown,
)


class Kind(NamedTuple):
    """A kind of file that hmpx reads."""

    name: str  # ``"an op list"``
    error: type[HmpxError] = OptionError  # Raised for each fault of such a file
    most: int = 10 << 20  # Bytes that it may have
    remedy: str = ""  # For damaged ones


OP_LIST: Final = Kind("an op list", OpListError)
POLICY: Final = Kind("a policy file", PolicyFileError)
CONTRACT: Final = Kind("a contract", PolicyFileError)
OPTIONS: Final = Kind("a file of options beside lists", PolicyFileError)
BASELINE: Final = Kind("a baseline, which hmpx lint --write-baseline writes")
SOURCE: Final = Kind("Python code")
STATE: Final = Kind("a file of tensors", most=1 << 50)
REPORT: Final = Kind(
    "a report in JSON", most=1 << 28, remedy="hmpx run --report report.json writes one"
)
TRACE: Final = Kind("a trace", most=1 << 36, remedy="hmpx run --trace writes one")
CHECKPOINT: Final = Kind(
    "a checkpoint's config.json", CheckpointError, most=1 << 28, remedy="Frozen.save writes one"
)
ONNX: Final = Kind("an ONNX file", most=1 << 31)
MONITORED: Final = Kind(
    "a file of hmpx.monitor", most=1 << 34, remedy='hmpx.monitor(log="run.jsonl") writes one'
)
JOURNAL: Final = Kind(
    "a journal of hmpx.tune", most=1 << 28, remedy="delete the lines from there on, or the file"
)

_LONGEST_LINE: Final = 1 << 24


# --- reading -------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], kind: Kind) -> Iterator[BinaryIO]:
    """Opens a regular file for reading, unless it is larger than files of its kind."""
    name = short(os.fspath(path))
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                said = f"{name}: a pipe or a device, not {kind.name}; write its content to a file"
                raise also(kind.error, OSError, said)
            if found.st_size > kind.most:
                raise kind.error(
                    f"{name}: {found.st_size:,} bytes; {kind.name} has {kind.most:,} at most"
                )
            yield file
    except raised_here(FileNotFoundError):
        said = f"{name}: no such file; give the path of {kind.name}"
        raise also(kind.error, FileNotFoundError, said) from None
    except raised_here(IsADirectoryError):
        said = f"{name}: a directory, not {kind.name}; give a file's path"
        raise also(kind.error, IsADirectoryError, said) from None
    except raised_here(OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise also(kind.error, OSError, f"{name}: can't be read: {reason}") from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # else a pipe waits for a writer


def read(path: str | os.PathLike[str], kind: Kind) -> bytes:
    """Returns the content of a file."""
    with opened(path, kind) as file:
        content = file.read(kind.most + 1)  # files of /proc have no size
        if len(content) > kind.most:
            raise ValueError(f"{kind.name} has {kind.most:,} bytes at most")
        return content


def read_text(path: str | os.PathLike[str], kind: Kind) -> str:
    """Returns the text of a file, without a byte-order mark."""
    content, name = read(path, kind), short(os.fspath(path))
    try:
        text = content.decode("utf-8-sig")
    except raised_here(UnicodeDecodeError) as fault:
        line = content.count(b"\n", 0, fault.start) + 1
        raise kind.error(
            f"{name}:{line}: not UTF-8 text (byte {fault.start}: {content[fault.start]:#04x}); "
            "save it as UTF-8"
        ) from None
    if "\0" in text:
        raise kind.error(f"{name}: a binary file, not {kind.name}; give a text file's path")
    return text


# --- JSON ----------------------------------------------------------------------------------------


def damaged(where: str, kind: Kind, error: BaseException) -> HmpxError:
    """Returns an error about the content of a file at ``where``: ``"a.hmpx:12"``."""
    return kind.error(f"{where}: not {kind.name}, or damaged: {cut(str(error))}; {kind.remedy}")


def parsed(text: str | bytes, name: str, kind: Kind, line: int = 1) -> Any:
    """Returns the value of JSON that begins at a line of the file ``name``."""
    try:
        return json.loads(text)
    except raised_here(ValueError, RecursionError) as error:
        line += getattr(error, "lineno", 1) - 1
        raise damaged(f"{name}:{line}", kind, error) from None


def json_lines(path: str | os.PathLike[str], kind: Kind) -> Iterator[tuple[str, Any]]:
    """Yields the place and the JSON of each line; leaves out a last one that a kill has cut short."""
    name = short(os.fspath(path))
    with opened(path, kind) as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST_LINE)
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                return
            yield f"{name}:{number}", parsed(line.rstrip(), name, kind, number)


#: JSON may have longer numbers, which floats would not hold.
_LARGEST: Final = 1 << 127


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...], Mapping[str, Any], frozenset[str]]:
    """Returns a type without its arguments, its arguments, and of dataclasses the fields' types and those without defaults."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    hints = typing.get_type_hints(kind) if fields else {}
    needed = [
        each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING
    ]
    known = {each.name: hints[each.name] for each in fields}
    return typing.get_origin(kind) or kind, typing.get_args(kind), known, frozenset(needed)


def shaped(value: Any, kind: Any) -> Any:
    """Returns a value of JSON as a type; a dataclass is an object, or a list of its fields.

    Raises:
        ValueError: It is of another type; the message says where in the value.
    """
    origin, args, fields, needed = _parts(kind)
    if origin is Any or (
        type(value) is origin and (origin is not int or -_LARGEST < value < _LARGEST)
    ):
        return value
    if origin is float and type(value) is int and -_LARGEST < value < _LARGEST:
        return float(value)
    if origin is types.UnionType:
        return None if value is None else shaped(value, args[0])
    if origin is Mapping and type(value) is dict:
        return {key: _part(key, each, args[1]) for key, each in value.items()}
    if origin is tuple and type(value) is list:
        kinds = args[:1] * len(value) if args[-1] is ... else args
        if len(kinds) == len(value):
            return tuple(map(_part, range(len(value)), value, kinds))
    if fields and type(value) is list and len(value) == len(fields):
        value = dict(zip(fields, value, strict=True))
    if fields and type(value) is dict:
        wrong = [f"lacks {key}" for key in sorted(needed - value.keys())]
        wrong += [f"has an unknown {shown(key)}" for key in value if key not in fields]
        if wrong:
            raise ValueError(f" {wrong[0]}")
        return kind(**{key: _part(key, each, fields[key]) for key, each in value.items()})
    name = "an object" if fields else kind if args else kind.__name__
    raise ValueError(f" must be {name}, not {shown(value)}")


def _part(key: object, value: Any, kind: Any) -> Any:
    try:
        return shaped(value, kind)
    except raised_here(ValueError) as error:
        raise ValueError(f"[{shown(key)}]{error}") from None


# --- writing -------------------------------------------------------------------------------------


def write(data: bytes, path: str | os.PathLike[str]) -> None:
    """Writes a file completely or not at all. An error or a kill leaves the earlier file unchanged.

    Devices and pipes, such as ``/dev/stdout``, are written in place. A symbolic link stays, and its target is
    replaced.

    Raises:
        OptionError: The file can't be written.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe has no earlier content to lose
        else:
            _replace(data, target)
    except raised_here(OSError, ValueError) as error:
        raise unwritable(path, error) from error


def append(data: bytes, path: str | os.PathLike[str], size: int | None = None) -> None:
    """Appends to a file, cut to ``size`` before if given, and flushes it to disk.

    Raises:
        OptionError: The file can't be written.
    """
    try:
        with Path(path).open("ab") as file:
            if size is not None:
                file.truncate(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except raised_here(OSError, ValueError) as error:
        raise unwritable(path, error) from error


def unwritable(path: str | os.PathLike[str], error: BaseException) -> HmpxError:
    """Returns the error about a file that can't be written."""
    # The error's text may name a temporary file.
    why = (isinstance(error, OSError) and error.strerror) or said_by(error)
    return also(OptionError, OSError, f"can't write {short(os.fspath(path))}: {why}")


def make_directory(path: str | os.PathLike[str]) -> Path:
    """Makes a directory, with those above it, unless it is there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except raised_here(OSError, ValueError) as error:
        raise unwritable(path, error) from error
    return Path(path)


@contextlib.contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Makes a temporary folder in the target's directory, and removes it at the end.

    Raises:
        OptionError: It can't be made.
    """
    folder = target.parent / f".hmpx-{secrets.token_hex(8)}.part"
    try:
        folder.mkdir()
    except raised_here(OSError, ValueError) as error:
        raise unwritable(target, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(data: bytes, target: Path) -> None:
    """Writes a temporary file next to the target, then renames it. Keeps the target's permissions."""
    unfinished = target.parent / f".hmpx-{secrets.token_hex(8)}.part"
    try:
        with unfinished.open("xb") as file:
            if target.is_file():
                unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException:
        with passing_over(OSError):
            unfinished.unlink()
        raise


# --- files of facts ------------------------------------------------------------------------------


def read_sections(package: str, name: str) -> Mapping[str, Mapping[str, str]]:
    """Returns the file ``name`` in ``package``: section -> key -> value, ``""`` for keys without one."""
    text = importlib.resources.files(package).joinpath(name).read_text("utf-8")
    found: dict[str, dict[str, str]] = {}
    section: dict[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line[0] == "#":
            continue
        if line[0] == "[" and line[-1] == "]":
            if line in found:
                raise ValueError(f"{name}:{number}: {line} is there twice")
            section = found[line] = {}
            continue
        key, _, value = line.partition("=")
        key = key.rstrip()
        if section is None or not key or key[0].isspace() or key in section:
            raise ValueError(f"{name}:{number}: expected one new name, or a section: {line!r}")
        section[key] = value.strip()
    return {header[1:-1]: keys for header, keys in found.items()}
