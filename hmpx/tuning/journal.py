"""The journal of a search: JSON lines, from which a killed search continues without repeated evaluations."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import OptionError, said_by, short

_VERSION: Final = 2


class Journal:
    """A file of records, the first of which identifies the search.

    Attributes:
        records: The records in the file when it was opened, without the header.
        parsed: Key -> the parsed records with this key.
    """

    def __init__(
        self,
        path: str,
        header: Mapping[str, Any],
        parsers: Mapping[str, Callable[[Any], Any]] = {},
    ) -> None:
        """Opens the journal, or starts a new one.

        Drops a last line that a kill has cut short.

        Args:
            path: The file; ``""`` for none.
            header: Identifies the search.
            parsers: Key -> the parser of records with this key. The file stays unchanged if one fails.

        Raises:
            OptionError: The file belongs to another search, can't be read or written, or is damaged.
        """
        self._path = path
        self.records: list[dict[str, Any]] = []
        self.parsed: defaultdict[str, list[Any]] = defaultdict(list)
        if not path:
            return
        wanted = {"hmpx journal": _VERSION, **json.loads(json.dumps(header))}
        lines, torn = self._read()
        if not lines and torn and not b'{"hmpx journal"'.startswith(torn[:15]):
            raise self._foreign()
        if lines:
            self._check(lines[0], wanted)
            self.records = lines[1:]
            for number, record in enumerate(self.records, 2):
                for key in parsers.keys() & record.keys():
                    try:
                        self.parsed[key].append(parsers[key](record))
                    except (TypeError, ValueError, LookupError, AttributeError) as error:
                        raise self._damaged(number, error) from error
        if torn:
            try:
                os.truncate(path, Path(path).stat().st_size - len(torn))
            except OSError as error:
                raise self._unwritable(error) from error
        if not lines:
            self.write(wanted)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record and flushes it to disk."""
        if not self._path:
            return
        try:
            with Path(self._path).open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def _check(self, header: dict[str, Any], wanted: dict[str, Any]) -> None:
        if header.get("hmpx journal") != _VERSION:
            raise self._foreign()
        differing = sorted(key for key in wanted | header if wanted.get(key) != header.get(key))
        if differing:
            raise OptionError(
                f"the journal {short(self._path)} belongs to another search: {', '.join(differing)} "
                f"differ{'s' if len(differing) == 1 else ''}; give another path, or delete the file"
            )

    def _read(self) -> tuple[list[dict[str, Any]], bytes]:
        """Returns the whole lines, and the bytes cut short by a kill; the file stays unchanged."""
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

    def _foreign(self) -> OptionError:
        return OptionError(f"{short(self._path)} is not a journal of hmpx.tune; give another path")

    def _damaged(self, number: int, error: Exception) -> OptionError:
        return OptionError(
            f"{short(self._path)}:{number}: the journal is damaged ({said_by(error)}); delete the lines "
            "from there on, or the file"
        )

    def _unwritable(self, error: Exception) -> OptionError:
        return OptionError(f"the journal {short(self._path)} can't be written: {said_by(error)}")
