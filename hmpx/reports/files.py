"""Writing reports to files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

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


def plain(value: Any) -> Any:
    """Returns a value that JSON has: what is no finite number becomes ``"nan"`` or ``"inf"``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
