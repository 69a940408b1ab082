"""Journals: files of results by key, from which a killed search continues."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, raised_here, short, warn
from ..files import JOURNAL, damaged, parsed, read, shaped, unwritable


@dataclass(frozen=True)
class _JournalLine:
    """A result in a journal."""

    key: Any
    value: Any


class Journal:
    """A file of results by key, in JSON lines, from which a killed search continues."""

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        """Opens the journal, or starts a new one; drops a last line that a kill has cut short.

        An empty path means no file. A file of another search, or a damaged one, is an error and stays unchanged.
        """
        self._path, self._known = path, dict[str, tuple[str, Any]]()
        if not path:
            return
        wanted = {"hmpx journal": 3, **json.loads(json.dumps(header))}
        content = read(path, JOURNAL) if os.path.exists(path) else b""  # noqa: PTH110  # any text
        if not content.startswith(b'{"hmpx journal"'[: len(content)]):
            raise OptionError(f"{short(path)} is not a journal of hmpx.tune; give another path")
        *lines, torn = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            where, record = f"{short(path)}:{number}", parsed(line, short(path), JOURNAL, number)
            try:
                if number > 1:
                    written = shaped(record, _JournalLine)
                    self._known[json.dumps(written.key)] = where, written.value
                    continue
                record = shaped(record, Mapping[str, Any])
            except raised_here(ValueError) as error:
                raise damaged(where, JOURNAL, error) from None
            if differing := sorted(
                key for key in wanted | record if wanted.get(key) != record.get(key)
            ):
                raise OptionError(
                    f"the journal {short(path)} belongs to another search: {', '.join(differing)} "
                    f"differ{'s' if len(differing) == 1 else ''}; give another path, or delete the file"
                )
        self._write(b"" if lines else json.dumps(wanted).encode() + b"\n", len(content) - len(torn))

    def remembered(self, key: Any, compute: Callable[[], Any], kind: Any) -> Any:
        """Returns the value of a key, of a type that JSON has; computes and writes it if it is not known."""
        name = json.dumps(key)
        if name not in self._known:
            text = json.dumps({"key": key, "value": compute()})
            self._known[name] = self._path, json.loads(text)["value"]
            try:
                if self._path:
                    self._write(text.encode() + b"\n")
            except raised_here(OptionError) as error:
                self._path = ""  # a full disk ends the journal, not the search
                warn(f"{error}; the search goes on without its journal")
        where, value = self._known[name]
        try:
            return shaped(value, kind)
        except raised_here(ValueError) as error:
            raise damaged(where, JOURNAL, error) from None

    def by_spot(self, key: Any, compute: Callable[[], Any], *kinds: type) -> Any:
        """Returns the value of a key that is a mapping of spots to tuples of these types, or None."""

        def rows() -> list[list[Any]] | None:
            found = compute()
            return None if found is None else [[*spot, *each] for spot, each in found.items()]

        row = types.GenericAlias(tuple, (str, str, *kinds))
        known = self.remembered(key, rows, tuple[row, ...] | None)  # type: ignore[valid-type]
        return None if known is None else {(op, module): tuple(each) for op, module, *each in known}

    def _write(self, data: bytes, size: int | None = None) -> None:
        """Appends to the file, cut to ``size`` before if given, and flushes it to disk."""
        try:
            with Path(self._path).open("ab") as file:
                if size is not None:
                    file.truncate(size)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except raised_here(OSError, ValueError) as error:
            raise unwritable(self._path, error) from error
