"""Errors in hmpx's own observers, which are noted, and don't stop the program that they look at."""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..errors import HmpxError, is_own, raised_here, said_by
from ..places import located
from .log import LOGGER
from .op_calls import user_location

_F = TypeVar("_F", bound=Callable[..., Any])

#: What observers could not look at in this process, the first of each kind -> how often.
LEFT_OUT: Final = Counter[str]()

#: A function and the kind of its error -> the first.
_firsts: Final[dict[tuple[str, type], str]] = {}


def spared(function: _F) -> _F:
    """Makes a function that a program's call, module, gradient or optimizer runs end at an error of hmpx's own.

    It then returns None. Deliberate errors go on, and those of the program's code, such as an alarm's function.
    """
    name = f"{function.__module__.rpartition('.')[0]}.{function.__qualname__}"

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except raised_here(Exception) as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            if isinstance(error, HmpxError) or not all(map(is_own, frames)):
                raise
            _note(name, error)

    return wrapper  # type: ignore[return-value]


def _note(name: str, error: Exception) -> None:
    key = name, type(error)
    if key not in _firsts:
        entry = traceback.extract_tb(error.__traceback__)[-1]
        _firsts[key] = (
            f"{name} could not look at {located(user_location()) or 'a call'} ({said_by(error)}, "
            f"{located(f'{entry.filename}:{entry.lineno}')}); it left that out, and the program went on"
        )
        LOGGER.warning("%s; please report this as a fault of hmpx", _firsts[key])
    LEFT_OUT[_firsts[key]] += 1
