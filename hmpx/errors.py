"""The errors and warnings that users' mistakes raise, and how messages show values.

Each message has three parts: what is wrong, where, and the remedy. Values in messages are short, and
showing one can't fail, since they come from users, files and other programs.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class HmpxError(Exception):
    """Base of every error that hmpx raises deliberately."""

    def __str__(self) -> str:
        return lined(super().__str__().split("\n"))


class OpListError(HmpxError):
    """An op list can't be read, or contradicts itself or another list."""


class OptionError(HmpxError):
    """An argument of a public function has an invalid value."""


class PolicyFileError(HmpxError):
    """A policy file can't be read, or is not a policy."""


class RuleError(HmpxError):
    """A rule raised an error, or returned something other than a decision."""


class FreezeError(HmpxError):
    """A model can't be frozen, or a frozen model does not support a call."""


class BenchError(HmpxError):
    """A step can't be measured: there is none, or it fails in float32."""


class PlanError(HmpxError):
    """A step can't be planned: the model needs values, or can't be copied."""


class TorchError(HmpxError):
    """hmpx does not work with the installed torch."""


class CheckpointError(HmpxError):
    """A checkpoint can't be recomputed in the way its forward ran."""


class NonFiniteError(HmpxError):
    """An op of a watched program has turned finite values into NaN or infinity.

    Attributes:
        offence: The report of `hmpx.watch`.
    """

    def __init__(self, offence: Any) -> None:
        """Uses the offence's text as the message."""
        super().__init__(str(offence))
        self.offence = offence

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.offence,)


class HmpxWarning(UserWarning):
    """Part of the user's input was ignored, and hmpx went on without it."""

    def __str__(self) -> str:
        return lined(super().__str__().split("\n"))


# --- values in messages ------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""Returns text on one line, with unprintable characters escaped: ``\n``, ``\x1b``.

    Names of modules and files may hold anything: terminal escapes, marks that reverse the direction
    of writing, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def lined(lines: Iterable[str]) -> str:
    """Returns a text of these lines, each `printable`. All tools print through this."""
    return "\n".join(map(printable, lines))


#: How many faults of one kind are shown; the others are only counted.
MOST_SHOWN: Final = 20

_MOST_CHARACTERS: Final = 80
_MOST_ITEMS: Final = 6
_MOST_LEVELS: Final = 3

#: Longer than every op's name: comparing takes time quadratic in the length.
_MOST_COMPARED: Final = 100

#: How many names with similar letters are compared letter by letter.
_MOST_ALIKE: Final = 8

_BRACKETS: Final[dict[type, tuple[str, str]]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def shown(value: object) -> str:
    """Returns ``repr(value)`` on one short line, even where that would raise or never end.

    Long values are cut: ``"'xxxxx'... (1,000,000 characters)"``.
    """
    return cut(_shown(value, _MOST_LEVELS))


def _shown(value: Any, levels: int) -> str:
    kind = type(value)
    if isinstance(value, (str, bytes, bytearray)):
        part = repr(value[:_MOST_CHARACTERS])
        return part if len(value) <= _MOST_CHARACTERS else f"{part}... ({len(value):,} characters)"
    if kind is int and value.bit_length() > 200:  # conversion to digits is slow or an error
        return f"an integer of {value.bit_length():,} bits"
    if kind in _BRACKETS:
        opening, closing = _BRACKETS[kind]
        inside = _shown_items(([each] for each in value), len(value), levels)
        if not inside and kind in (set, frozenset):
            return f"{kind.__name__}()"
        return f"{opening}{inside}{',' if kind is tuple and len(value) == 1 else ''}{closing}"
    if kind is dict:
        return f"{{{_shown_items(value.items(), len(value), levels)}}}"
    try:
        return cut(repr(value))
    except Exception:  # raised by the value's own class: not the mistake to report
        return f"<{kind.__name__} object>"


def _shown_items(items: Iterable[Iterable[Any]], count: int, levels: int) -> str:
    if count and not levels:
        return "..."
    first = itertools.islice(items, _MOST_ITEMS)
    found = [": ".join([_shown(part, levels - 1) for part in item]) for item in first]
    return ", ".join(found + ["..."] * (count > _MOST_ITEMS))


def cut(text: str) -> str:
    """Returns ``text`` on one line, without the end of a long one."""
    most = 2 * _MOST_CHARACTERS
    text = " ".join(str.split(text))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def said_by(error: BaseException) -> str:
    """Returns an error's class and its message, on one short line: ``"ValueError: no such thing"``."""
    try:
        message = cut(str(error))
    except Exception:  # an error of the user's own class
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def brief(self: object) -> str:
    """The ``__repr__`` of results that print as several lines: their class and first line."""
    return f"<hmpx.{type(self).__name__}: {cut(str(self).partition(chr(10))[0])}>"


def noted(error: _Error, note: str) -> _Error:
    """Adds a note to an error; tracebacks show it below the message.

    Before Python 3.11, hmpx's own errors get it in their message, and others don't change.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif isinstance(error, HmpxError):
        error.args = (f"{error}\n{note}",)
    else:
        vars(error).setdefault("__notes__", []).append(note)
    return error


def short(path: str) -> str:
    """Returns a path as messages show it: unchanged, unless it is longer than any real path."""
    most = 4 * _MOST_CHARACTERS
    return path if len(path) <= most else f"{path[:most]}... ({len(path):,} characters)"


def gathered(faults: Iterable[str], count: int, most: int = MOST_SHOWN) -> list[str]:
    """Returns the first ``most`` of ``count`` faults, and how many more there are. Reads no more of an iterator."""
    first = list(itertools.islice(faults, most))
    more = count - len(first)
    return [*first, f"and {more:,} more"] if more > 0 else first


def suggestion(
    name: str, candidates: Iterable[str], spellings: Mapping[str, str] | None = None
) -> str:
    """Returns ``"; did you mean 'matmul'?"`` for the nearest candidate, or ``""`` if none is near.

    Near means that a third of the letters or fewer differ.

    Args:
        name: The name that the user wrote.
        candidates: The known names.
        spellings: Other names, in lower case and with ``_`` for ``-`` and blanks, of some candidates.
    """
    if len(name) > _MOST_COMPARED:
        return ""
    spelled = name.strip().lower().replace("-", "_").replace(" ", "_")
    if spellings and spelled in spellings:
        return f"; did you mean {spellings[spelled]!r}?"
    alike = difflib.get_close_matches(name, candidates, n=_MOST_ALIKE)
    near = [(_distance(name, each), each) for each in alike]
    near = [(d, each) for d, each in near if 3 * d <= max(len(name), len(each))]
    return f"; did you mean {min(near, key=lambda pair: pair[0])[1]!r}?" if near else ""


def _distance(a: str, b: str) -> int:
    """Returns how many letters to change, add, remove or swap to turn ``a`` into ``b``."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(b, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, other) == (b[j - 2], a[i - 2]):
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]
