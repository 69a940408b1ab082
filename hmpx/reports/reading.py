"""Reports read from JSON; each fault names the file."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from ..errors import OptionError, said_by, shown, suggestion
from .report import SCHEMA, Report
from .rows import Row, Waste

_T = TypeVar("_T", Row, Waste)


def _is_number(value: Any) -> bool:
    # Larger whole numbers of seconds have no float.
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


#: Type of a field -> its description, and whether a value from JSON has it.
_KINDS: Final[Mapping[Any, Any]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    int: ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    tuple[str, ...]: ("a list of texts", _is_texts),
    float | None: ("a number or null", lambda value: value is None or _is_number(value)),
}


def read_json(path: str | os.PathLike[str]) -> Report:
    """Returns the report that `Report.to_json` wrote to ``path``.

    Raises:
        OptionError: The file can't be read, or holds no report.

    Example:
        >>> import os, tempfile
        >>> from hmpx.reports import Report, read_json
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Report(rows=()).to_json(os.path.join(folder, "report.json"))
        ...     read_json(os.path.join(folder, "report.json"))
        Report(rows=(), waste=(), about={}, error=None)
    """
    name = os.fspath(path)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{name}: {error.strerror or said_by(error)}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is not JSON, or was cut short: {said_by(error)}") from error
    if not isinstance(found, dict) or found.get("hmpx_report") != SCHEMA:
        raise OptionError(
            f"{name} is not a report of this version of hmpx; write one with "
            "`hmpx run --report report.json script.py`"
        )
    try:
        return _report(found)
    except OptionError as error:
        raise OptionError(f"{name} is damaged: {error}; write the report anew") from None


def _report(found: Mapping[str, Any]) -> Report:
    about, error = found.get("about"), found.get("error")
    if not isinstance(about, dict) or not _is_texts([*about.values()]):
        raise OptionError(f"'about' must map texts to texts, not {shown(about)}")
    if not isinstance(error, (str, types.NoneType)):
        raise OptionError(f"'error' must be a text or null, not {shown(error)}")
    location = found.get("error_location", "")
    if not isinstance(location, str):
        raise OptionError(f"'error_location' must be a text, not {shown(location)}")
    return Report(_items(Row, found, "rows"), _items(Waste, found, "waste"), about, error, location)


def _items(kind: type[_T], found: Mapping[str, Any], key: str) -> tuple[_T, ...]:
    items = found.get(key)
    if not isinstance(items, list):
        raise OptionError(f"{key!r} must be a list, not {shown(items)}")
    hints = get_type_hints(kind)
    return tuple([_item(kind, hints, item, f"{key}[{i}]") for i, item in enumerate(items)])


def _item(kind: type[_T], hints: Mapping[str, Any], item: Any, where: str) -> _T:
    if not isinstance(item, dict):
        raise OptionError(f"{where} must be an object, not {shown(item)}")
    for name in item:
        if name not in hints:
            raise OptionError(f"{where} has an unknown {shown(name)}{suggestion(name, hints)}")
    for name, hint in hints.items():
        if name not in item:
            raise OptionError(f"{where} has no {name!r}")
        said, is_one = _KINDS[hint]
        if not is_one(item[name]):
            raise OptionError(f"{name!r} of {where} must be {said}, not {shown(item[name])}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in item.items()
    }
    return kind(**values)
