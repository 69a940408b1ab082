"""Processes of a check: one search at a time in a directory, and an end for all that a command has started."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..errors import OptionError

#: How long what is asked to end may take to do so.
_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.02


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Holds a directory inside the block, against other processes. The system lets go of it after a kill.

    Raises:
        OptionError: Another process holds it.
        OSError: The file of the lock can't be written.
    """
    if importlib.util.find_spec("fcntl") is None:  # on Windows
        yield
        return
    fcntl: Any = importlib.import_module("fcntl")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(directory / "lock", flags, 0o666), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"another hmpx tune is running in {directory}; wait for it, or give another --output"
            ) from None
        yield


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a command and of what it has started: all processes of its session's group.

    They are asked first, and killed if they take their time; at once where one more Ctrl-C comes.
    """
    try:
        if _signal(process, signal.SIGTERM):
            _wait(process, _PATIENCE_S)
    finally:
        if _signal(process, signal.SIGKILL):
            _wait(process, _PATIENCE_S)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Sends a signal; returns whether there is anybody to get it."""
    process.poll()  # takes away what has ended
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait(process: subprocess.Popen[bytes], patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while _signal(process, 0) and time.monotonic() < end_s:
        time.sleep(_PAUSE_S)
