"""What the command line prints: results to stdout, messages to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any


def show(lines: Iterable[str], status: int = 0) -> int:
    """Prints ``lines`` to stdout and returns ``status``; a closed pipe is not an error."""
    try:
        for line in lines:
            try:
                print(line)
            except UnicodeEncodeError:  # names of files may be any bytes
                print(line.encode("utf-8", "backslashreplace").decode("ascii", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        # discards what is still buffered, or the interpreter complains when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def complain(message: str) -> None:
    """Prints a message to stderr; each of its lines begins with ``hmpx:``."""
    for line in message.splitlines():
        print(f"hmpx: {line}", file=sys.stderr)


def with_warnings_shown(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls ``function`` and prints its warnings as messages of the command line."""
    with warnings.catch_warnings(record=True) as caught:
        result = function(**arguments)
    for warning in caught:
        complain(f"warning: {warning.message}")
    return result


def counted(count: int, noun: str) -> str:
    """Returns ``"1 file"``, ``"2 files"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
