"""The journal of a search: JSON lines, from which it goes on after a kill without a repeated evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import OptionError, said_by, short

_VERSION: Final = 1
_Parsed = TypeVar("_Parsed")


class Journal:
    """A file of records, the first of which says what they belong to.

    Attributes:
        records: What the file held when it was opened, without its header.
    """

    def __init__(
        self,
        path: str,
        header: Mapping[str, Any],
        parsers: Mapping[str, Callable[[Any], object]] | None = None,
    ) -> None:
        """Opens the journal, or begins one.

        A last line that a kill has torn is dropped.

        Args:
            path: The file; ``""`` for none.
            header: What the records belong to.
            parsers: A key -> what parses records that have it. The file stays as it is if one can't.

        Raises:
            OptionError: The file belongs to something else, can't be read or written, or is damaged.
        """
        self._path = path
        self.records: list[dict[str, Any]] = []
        if not path:
            return
        wanted = {"hmpx journal": _VERSION, **json.loads(json.dumps(header))}
        lines, torn = self._read()
        if not lines:
            if torn and not b'{"hmpx journal"'.startswith(torn[:15]):
                raise self._foreign()
            self._cut(torn)
            self._append(wanted)
            return
        first = lines[0]
        if first.get("hmpx journal") != _VERSION:
            raise self._foreign()
        differing = sorted(key for key in wanted | first if wanted.get(key) != first.get(key))
        if differing:
            raise OptionError(
                f"the journal {short(path)} belongs to another search: {', '.join(differing)} "
                f"differ{'s' if len(differing) == 1 else ''}; give another path, or delete the file"
            )
        self.records = lines[1:]
        for key, parse in (parsers or {}).items():
            self.parsed(key, parse)
        self._cut(torn)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record, and has it reach the disk."""
        if self._path:
            self._append(record)

    def parsed(self, key: str, parse: Callable[[Any], _Parsed]) -> list[_Parsed]:
        """Parses each record that has ``key``.

        Raises:
            OptionError: A record is damaged.
        """
        found = []
        for number, record in enumerate(self.records, 2):
            if key in record:
                try:
                    found.append(parse(record))
                except (TypeError, ValueError, LookupError, AttributeError) as error:
                    raise self._damaged(number, error) from error
        return found

    def _read(self) -> tuple[list[dict[str, Any]], bytes]:
        """Returns the whole lines, and what a kill has torn; the file is left as it is."""
        try:
            data = Path(self._path).read_bytes()
        except FileNotFoundError:
            return [], b""
        except (OSError, ValueError) as error:
            raise OptionError(
                f"the journal {short(self._path)} can't be read: {said_by(error)}"
            ) from error
        *whole, torn = data.split(b"\n")
        found: list[dict[str, Any]] = []
        for number, line in enumerate(whole, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise TypeError("not an object")
            except (ValueError, TypeError, RecursionError) as error:
                if not found or "hmpx journal" not in found[0]:
                    raise self._foreign() from None
                raise self._damaged(number, error) from error
            found.append(record)
        return found, torn

    def _cut(self, torn: bytes) -> None:
        """Takes off the file's end what a kill has torn."""
        if torn:
            try:
                os.truncate(self._path, Path(self._path).stat().st_size - len(torn))
            except OSError as error:
                raise self._unwritable(error) from error

    def _foreign(self) -> OptionError:
        return OptionError(f"{short(self._path)} is not a journal of hmpx.tune; give another path")

    def _damaged(self, number: int, error: Exception) -> OptionError:
        return OptionError(
            f"{short(self._path)}:{number}: the journal is damaged ({said_by(error)}); delete the lines "
            "from there on, or the file"
        )

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
