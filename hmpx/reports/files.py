"""Writing reports to files."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import OptionError, said_by


def written(found: str, path: str | os.PathLike[str] | None) -> str:
    """Returns text, having written it to ``path`` if that is given.

    Raises:
        OptionError: The file can't be written.
    """
    if path is not None:
        try:
            # Names of files may hold halves of characters, which no encoding has.
            data = found.encode("utf-8", "backslashreplace")
            Path(path).write_bytes(data)
        except (OSError, ValueError) as error:
            raise OptionError(f"can't write {os.fspath(path)}: {said_by(error)}") from error
    return found
