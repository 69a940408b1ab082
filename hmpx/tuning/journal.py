"""The journal of a search: JSON lines, from which it goes on after a kill without a repeated evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import OptionError, said_by, short

_VERSION: Final = 1


class Journal:
    """A file of records, the first of which says what they belong to.

    Attributes:
        records: What the file held when it was opened, without its header.
    """

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        """Opens the journal, or begins one.

        A last line that a kill has torn is dropped.

        Args:
            path: The file; ``""`` for none.
            header: What the records belong to.

        Raises:
            OptionError: The file belongs to something else, or can't be read or written.
        """
        self._path = path
        self.records: list[dict[str, Any]] = []
        if not path:
            return
        wanted = {"hmpx journal": _VERSION, **json.loads(json.dumps(header))}
        lines = self._read()
        if not lines:
            self._begin(wanted)
            return
        first = lines[0]
        if first.get("hmpx journal") != _VERSION:
            raise OptionError(f"{short(path)} is not a journal of hmpx.tune; give another path")
        differing = sorted(key for key in wanted | first if wanted.get(key) != first.get(key))
        if differing:
            raise OptionError(
                f"the journal {short(path)} belongs to another search: {', '.join(differing)} "
                f"differ{'s' if len(differing) == 1 else ''}; give another path, or delete the file"
            )
        self.records = lines[1:]

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record, and has it reach the disk."""
        if self._path:
            self._append(record)

    def _read(self) -> list[dict[str, Any]]:
        """Returns the whole lines; cuts what a kill has torn off the file."""
        try:
            data = Path(self._path).read_bytes()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise OptionError(
                f"the journal {short(self._path)} can't be read: {said_by(error)}"
            ) from error
        *whole, torn = data.split(b"\n")
        try:
            found = [json.loads(line) for line in whole]
            if not all(isinstance(each, dict) for each in found):
                raise ValueError("a line is not an object")
        except (ValueError, RecursionError):
            raise OptionError(
                f"{short(self._path)} is not a journal of hmpx.tune; give another path"
            ) from None
        if torn:
            if not found and not torn.startswith(b'{"hmpx journal"'):
                raise OptionError(
                    f"{short(self._path)} is not a journal of hmpx.tune; give another path"
                )
            try:
                os.truncate(self._path, len(data) - len(torn))
            except OSError as error:
                raise self._unwritable(error) from error
        return found

    def _begin(self, header: Mapping[str, Any]) -> None:
        self._append(header)

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            with Path(self._path).open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> OptionError:
        return OptionError(f"the journal {short(self._path)} can't be written: {said_by(error)}")
