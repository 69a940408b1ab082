"""Writing reports to files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError, said_by, short


def written(found: str, path: str | os.PathLike[str] | None) -> str:
    """Returns text, and writes it to ``path`` if given, as `write` does."""
    if path is not None:
        # File names may contain lone surrogates, which can't be encoded.
        write(found.encode("utf-8", "backslashreplace"), path)
    return found


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
    except (OSError, ValueError) as error:
        # Its text may name the temporary file.
        why = (isinstance(error, OSError) and error.strerror) or said_by(error)
        raise OptionError(f"can't write {short(os.fspath(path))}: {why}") from error


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
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


class Written:
    """Base of results that are written as JSON and as a page; a subclass has `_data` and `_page`."""

    def _data(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all figures as JSON, and writes it to ``path`` if given.

        Non-finite numbers become the strings ``"nan"``, ``"inf"``, ``"-inf"``.

        Raises:
            OptionError: The file can't be written.
        """
        found = json.dumps(plain(self._data()), indent=1, allow_nan=False)
        return written(found + "\n", path)[:-1]

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that needs no network, and writes it to ``path`` if given.

        Raises:
            OptionError: The file can't be written.
        """
        return written(self._page(), path)


def plain(value: Any) -> Any:
    """Returns a JSON value; non-finite numbers become ``"nan"`` or ``"inf"``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
