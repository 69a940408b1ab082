"""Reads users' text files: whole, as text, and up to a size limit."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..errors import HmpxError, short

#: Test of a file's mode -> the name of such a file.
_SPECIAL: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

#: Opening neither waits for a pipe's writer, nor makes a terminal that of the process.
_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


@dataclass(frozen=True)
class TextKind:
    """A kind of text file.

    Attributes:
        name: The name in messages: ``"an op list"``.
        most_bytes: Larger files are refused.
        error: The class of errors about them.
    """

    name: str
    most_bytes: int
    error: type[HmpxError]


def read(path: str, kind: TextKind) -> str:
    """Returns the text of the file, without a byte-order mark.

    The opened file is asked for its type, so that no other file can take its place between the
    check and the reading. No more than a byte beyond the limit is read, whatever size the
    file claims to have: those of ``/proc`` claim 0, and logs grow.

    Raises:
        HmpxError: ``kind.error``: it can't be opened, is not a regular file, is too large, or is not
            UTF-8.
    """
    where = short(path)
    try:
        data = _bytes(path, kind, where)
    except FileNotFoundError:
        raise kind.error(f"{where}: no such file; give the path of {kind.name}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise kind.error(f"{where}: can't be read: {reason}") from error
    if len(data) > kind.most_bytes:
        raise kind.error(_too_large(where, kind))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind.error(
            f"{where}: not UTF-8 text (byte {error.start}: {error.object[error.start]:#04x}); "
            "save it as UTF-8"
        ) from None


def _bytes(path: str, kind: TextKind, where: str) -> bytes:
    """Returns the file's content, or a byte more of it than is allowed."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of opening a socket, or a device that is gone
            raise kind.error(_special(where, kind, "a socket or device")) from None
        raise
    try:
        status = os.fstat(descriptor)
        for is_special, what in _SPECIAL:
            if is_special(status.st_mode):
                raise kind.error(_special(where, kind, what))
        if status.st_size > kind.most_bytes:
            raise kind.error(_too_large(where, kind, status.st_size))
        parts = []
        left = kind.most_bytes + 1
        while left and (part := os.read(descriptor, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _special(where: str, kind: TextKind, what: str) -> str:
    return f"{where}: {what}, not {kind.name}; give a file's path"


def _too_large(where: str, kind: TextKind, size: int | None = None) -> str:
    what = f"{size / 1e6:.1f} MB is " if size is not None else ""
    return f"{where}: {what}too large for {kind.name}; at most {kind.most_bytes >> 20} MB"
