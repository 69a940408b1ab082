"""Reads users' text files: whole, as text, and up to a size limit."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import HmpxError, short

#: Test of a file's mode -> the name of such a file.
_SPECIAL: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket or device"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True)
class TextKind:
    """A kind of text file: its name in messages, its size limit, the class of its errors."""

    name: str
    most_bytes: int
    error: type[HmpxError]


def read(path: str, kind: TextKind) -> str:
    """Returns the text of the file, without a byte-order mark."""
    where = short(path)
    try:
        status = Path(path).stat()
        for is_special, what in _SPECIAL:  # opening a pipe would wait for its writer
            if is_special(status.st_mode):
                raise kind.error(f"{where}: {what}, not {kind.name}; give a file's path")
        data = b""
        if status.st_size <= kind.most_bytes:
            with Path(path).open("rb") as file:
                data = file.read(kind.most_bytes + 1)
    except FileNotFoundError:
        raise kind.error(f"{where}: no such file; give the path of {kind.name}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise kind.error(f"{where}: can't be read: {reason}") from error
    size = max(status.st_size, len(data))
    if size > kind.most_bytes:
        raise kind.error(
            f"{where}: {size / 1e6:.1f} MB is too large for {kind.name}; at most "
            f"{kind.most_bytes >> 20} MB"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind.error(
            f"{where}: not UTF-8 text (byte {error.start}: {error.object[error.start]:#04x}); "
            "save it as UTF-8"
        ) from None
