"""One line of an op list: ``conv2d float16 output=float32; torch >= 2.14``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final

from ... import arguments, number_formats, ops, tensors
from ...errors import OpListError, OptionError, shown, suggestion
from ...number_formats import OVERFLOWS, ROUNDING_MODES
from ...torch_internals import torch_version
from ..decisions import INPUT, OPTIONS, ROLES, parse_format, parse_low_type
from .kinds import KINDS
from .op_list import Entry

#: Word before ``=`` -> attribute of `Entry`.
_OPTIONS: Final[Mapping[str, str]] = {"dtype": "dtype", **OPTIONS}

#: Options of more words than there are: such a line is wrong however it goes on.
_MOST_WORDS: Final = 2 * len(_OPTIONS)

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "rounding": ROUNDING_MODES,
    "overflow": OVERFLOWS,
}

#: What lines of every kind of list may say.
_OF_ALL: Final = frozenset({"accumulate_dtype", "output_dtype"})

_CONDITION: Final = re.compile(
    r"torch\s*(?P<sign><|>=)\s*(?P<major>\d{1,4})\.(?P<minor>\d{1,4})", re.ASCII
)


def without_condition(line: str, where: str) -> str:
    """Returns a line without its ``; torch >= 2.14``; ``""`` if the condition does not hold.

    Raises:
        OpListError: There is no valid condition after the semicolon.
    """
    content, _, condition = line.partition(";")
    found = _CONDITION.fullmatch(condition.strip())
    if found is None:
        raise OpListError(
            f"{where}: after a semicolon expected a version such as 'torch >= 2.14' or 'torch < 2.14', "
            f"found {shown(condition.strip())}"
        )
    is_newer = torch_version() >= (int(found["major"]), int(found["minor"]))
    return content.strip() if is_newer is (found["sign"] == ">=") else ""


def parse_line(content: str, where: str, kind: str = "low") -> Entry:
    """Returns the entry of a line: ``"conv2d float16"``, ``"sum accumulate=float32"``.

    Raises:
        OpListError: A word after the name is not an option.
    """
    if not content.isprintable() and "\t" not in content:
        raise OpListError(f"{where}: expected one op per line, found {shown(content)}")
    name, *words = content.split(maxsplit=_MOST_WORDS) or [""]
    if not name:
        raise OpListError(f"{where}: an op name is empty")
    if not words:
        return Entry(name, where)
    options: dict[str, Any] = {}
    for word in words:
        key, is_option, value = word.partition("=")
        if not is_option:
            key, value = "dtype", word
        if key not in _OPTIONS:
            hint = suggestion(key, _OPTIONS) or f" ({', '.join(_OPTIONS)})"
            raise OpListError(f"{where}: unknown option {shown(key)} of {shown(name)}{hint}")
        if _OPTIONS[key] in options:
            raise OpListError(f"{where}: {shown(name)} is given {key} twice; keep one")
        try:
            options[_OPTIONS[key]] = _option(key, value)
        except OptionError as error:
            is_op = ops.resolve(word.strip(",")) in ops.table() and not number_formats.said_of(word)
            if not is_option and is_op:
                raise OpListError(
                    f"{where}: expected one op per line, found {shown(content)}"
                ) from None
            raise OpListError(f"{where}: {error}") from None
    if name[0] in "@-":
        raise OpListError(f"{where}: {shown(name)} takes no options; put them after an op's name")
    if not KINDS[kind].takes_options:
        raise OpListError(f"{where}: {shown(content)} names a dtype, but is left alone")
    if not KINDS[kind].takes_dtype and not options.keys() <= _OF_ALL:
        raise OpListError(
            f"{where}: {shown(content)} names a dtype, but only low-precision lists have a choice"
        )
    return Entry(name, where, **options)


@functools.lru_cache(maxsize=256)
def _option(key: str, value: str) -> Any:
    if key == "dtype":
        return parse_low_type(value)
    if key == "output" and value == INPUT:
        return INPUT
    if key in ROLES:
        return parse_format(key, value)
    if key in _CHOICES:
        return arguments.choice(key, value, _CHOICES[key])
    return tensors.parse_name(value)
