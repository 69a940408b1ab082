"""Checks single arguments of public functions, and raises an `OptionError` for invalid ones.

Each check returns a plain value: text as `str`, collections as new lists that end. Also the
environment variables by which commands of hmpx pass settings to each other.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from .errors import OptionError, raised_here, said_by, shown, suggestion

#: A policy file that overrides the lists of ``hmpx run``: the one that ``hmpx tune`` tries.
POLICY_VARIABLE: Final = "HMPX_POLICY"

#: Where ``hmpx run`` writes a report, as JSON.
REPORT_VARIABLE: Final = "HMPX_REPORT"

Choice = TypeVar("Choice", bound=str)

#: Objects that run later, and how to run them.
_LATER: Final = (
    (inspect.isgenerator, "a generator", "list(model(*inputs))"),
    (inspect.iscoroutine, "a coroutine", "asyncio.run(model(*inputs))"),
    (inspect.isasyncgen, "an asynchronous generator", "asyncio.run(collected(model(*inputs)))"),
)

#: More than there are ops, modules or devices: a generator may never end.
_MOST_ITEMS: Final = 100_000


def text(name: str, value: object, what: str = "a string") -> str:
    """Returns ``value`` as a plain string."""
    if not isinstance(value, str):
        raise OptionError(f"{name} must be {what}, not {shown(value)}")
    return str.__str__(value)  # an enum's own differs


def choice(
    name: str,
    value: object,
    known: Iterable[Choice],
    spellings: Mapping[str, str] | None = None,
) -> Choice:
    """Returns ``value``, which is one of ``known``; ``spellings`` are other names, for hints."""
    known = tuple(known)
    is_text = isinstance(value, str)
    found = [each for each in known if is_text and each == value]
    if found:
        return found[0]
    listed = " or ".join(map(repr, known))
    if len(known) > 2:
        listed = f"one of {', '.join(map(repr, known))}"
    hint = suggestion(str.__str__(value), known, spellings) if is_text else ""
    raise OptionError(f"{name} must be {listed}, not {shown(value)}{hint}")


def whole(name: str, value: object, least: int) -> int:
    """Returns ``value``, an int of at least ``least``."""
    if type(value) is not int or value < least:
        raise OptionError(f"{name} must be an int of at least {least}, not {shown(value)}")
    return value


def truth(name: str, value: object) -> bool:
    """Returns ``value`` as a bool; 0 and 1 are accepted."""
    if value is True or value is False:
        return value
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name} must be True or False, not {shown(value)}")


def path(name: str, value: object) -> str:
    """Returns the path ``value`` as a string; ``""`` for None."""
    if value is None:
        return ""
    found: object = value
    if not isinstance(value, (str, bytes)) and hasattr(type(value), "__fspath__"):
        try:
            found = os.fspath(value)  # type: ignore[call-overload]
        except raised_here(Exception) as error:
            raise OptionError(f"{name} has no path: {said_by(error)}") from error
    if isinstance(found, str):
        return str.__str__(found)
    remedy = "; os.fsdecode makes a string of bytes" if isinstance(found, bytes) else ""
    raise OptionError(f"{name} must be a string or a path, not {shown(value)}{remedy}")


def items(name: str, value: object, what: str) -> list[Any]:
    """Returns the items of the collection ``value``."""
    try:
        iterator = iter(value)  # type: ignore[call-overload]
    except raised_here(Exception):
        raise OptionError(f"{name} must be {what}, not {shown(value)}") from None
    try:
        found = list(itertools.islice(iterator, _MOST_ITEMS + 1))
    except raised_here(Exception) as error:
        raise OptionError(f"{name} can't be iterated: {said_by(error)}") from error
    if len(found) > _MOST_ITEMS:
        raise OptionError(f"{name} holds more than {_MOST_ITEMS:,} items; give {what}")
    return found


def texts(name: str, value: object, what: str = "a list of strings") -> list[str]:
    """Returns the strings in ``value``; a single string counts as one of them."""
    if isinstance(value, str):
        return [text(name, value)]
    return [text(f"each of {name}", item) for item in items(name, value, what)]


def mapping(name: str, value: object, what: str = "a dict") -> dict[Any, Any]:
    """Returns the mapping ``value`` as a dict."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be {what}, not {shown(value)}")
    try:
        return dict(value)
    except raised_here(Exception) as error:
        raise OptionError(f"{name} can't be read: {said_by(error)}") from error


def has_run(name: str, returned: Any) -> Any:
    """Returns ``returned``, the result of the function ``name``, unless that has run nothing yet."""
    for is_kind, what, remedy in _LATER:
        if is_kind(returned):
            if not inspect.isasyncgen(returned):
                returned.close()
            raise OptionError(
                f"{name} returns {what}, which has run nothing yet; give a function that runs it, such as "
                f"lambda *inputs: {remedy}"
            )
    return returned


def chosen_steps(steps: Any, every: int) -> Callable[[int], bool]:
    """Returns whether a step is chosen: of ``steps`` (None: of all) the first, and then one in ``every``."""
    every = whole("every", every, 1)
    try:
        chosen = steps if steps is None or isinstance(steps, range) else frozenset(steps)
        first = 0 if chosen is None else min(chosen)
    except raised_here(TypeError, ValueError):
        raise OptionError(
            f"steps must be numbers of steps, such as range(100, 200), not {shown(steps)}"
        ) from None
    if not isinstance(first, int) or first < 0:
        raise OptionError(f"steps are numbered from 0: {shown(steps)} begins with {shown(first)}")
    return lambda number: (chosen is None or number in chosen) and (number - first) % every == 0


def progress(value: Any) -> Callable[[str], object]:
    """Returns the function that takes lines on what a tool does: ``value``, or for True one that prints some to stderr."""
    if callable(value):
        return value  # type: ignore[no-any-return]
    is_shown, last_s = truth("progress", value), time.monotonic()

    def show(line: str) -> None:
        nonlocal last_s
        if is_shown and time.monotonic() - last_s >= 10.0:
            last_s = time.monotonic()
            sys.stderr.write(f"{line}\n")

    return show
