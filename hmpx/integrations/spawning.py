"""Prepares processes that a program starts by spawn or forkserver like their parent.

Such a process imports the program's main module first, and that may need the stand-in for
``habana_frameworks``. So the preparation travels with the first data that `multiprocessing` sends. Forked
processes need nothing: they are copies.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing.spawn
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .. import patching, session
from ..errors import raised_here
from ..patching import Patch
from . import shim

#: Run in the new process, which needs the parent's path to import hmpx.
_PREPARING: Final = """
import sys
sys.path.insert(0, path)
from hmpx.integrations import spawning
sys.path.remove(path)
spawning.restore(state)
"""


class _Restored:
    """Calls `restore` when it is unpickled."""

    def __init__(self, state: bytes) -> None:
        self._state = state

    def __reduce__(self) -> tuple[Any, ...]:
        path = str(Path(__file__).parent.parent.parent)
        return exec, (_PREPARING, {"path": path, "state": self._state})


def follow() -> Callable[[], None]:
    """Makes processes started from now on resemble this one at that time; returns a function to stop."""
    prepare = multiprocessing.spawn.get_preparation_data
    if hasattr(prepare, "__hmpx__"):
        return lambda: None

    @functools.wraps(prepare)
    def prepare_more(name: str) -> dict[str, Any]:
        data = prepare(name)
        state = _state()
        return data if state is None else {"hmpx": _Restored(state), **data}

    prepare_more.__hmpx__ = True  # type: ignore[attr-defined]
    applied = patching.apply([Patch(multiprocessing.spawn, "get_preparation_data", prepare_more)])
    return functools.partial(patching.undo, applied)  # type: ignore[return-value]


def _state() -> bytes | None:
    """Returns the stand-in's options and the conversion, pickled; None if there is nothing to restore."""
    options = shim.options()
    current = session.current()
    if options is None and current is None:
        return None
    stand_in = None if options is None else dict(options)
    conversion = None if current is None else current.arguments()
    try:
        state = pickle.dumps((stand_in, conversion))
        # The new process has not imported the program's main module yet, so it finds nothing there.
        why = "the policy holds a function of the main module" if b"__main__" in state else ""
    except raised_here(Exception) as error:  # a format's functions may raise anything
        state, why = b"", str(error)
    remedy = "define number formats in a module of their own"
    if current is not None and current.options.within is not None:
        why, remedy = "convert(within=...) names a module of this one", "convert there, too"
    if not why:
        return state
    logging.getLogger("hmpx").warning("started processes are not converted: %s; %s", why, remedy)
    return pickle.dumps((stand_in, None))


def restore(state: bytes) -> None:
    """Puts this process into ``state``."""
    stand_in, conversion = pickle.loads(state)
    if stand_in is not None:
        shim.install(stand_in)
    if conversion is not None:
        session.restore(**conversion)
    follow()  # for the processes that it starts in turn
