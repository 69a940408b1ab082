"""The verbose log: one line a call, or one a distinct decision.

An observer like any other; writes through ``logging.getLogger("hmpx")``.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

from .dtypes import short_name
from .records import OpCall

LOGGER: Final = logging.getLogger("hmpx")


class VerboseLog:
    """Logs each call in HMP's shape: ``casting  <built-in function linear>  to_bf16``."""

    def __call__(self, call: OpCall) -> None:
        """Logs ``call``."""
        LOGGER.info("casting  %r  %s", call.function, _outcome(call))


class VerboseOnceLog:
    """Logs each distinct decision once, with its reason, the module and the user's line."""

    def __init__(self) -> None:
        """Starts with nothing logged."""
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, call: OpCall) -> None:
        """Logs ``call`` unless one of the same op, dtypes, module and line was."""
        key = (call.site, call.dtype, call.input_dtypes, call.module, call.location)
        if key in self._seen:
            return
        self._seen.add(key)
        inputs = ", ".join(map(short_name, call.input_dtypes))
        LOGGER.info(
            "casting  %s(%s)  %s  %s by %s%s  at %s",
            call.op,
            inputs,
            _outcome(call),
            call.cast_policy,
            call.reason,
            f"  in {call.module}" if call.module else "",
            call.location,
        )


class _StdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stdout` is by then.

    Ends the program where its reader has gone, as printing does: ``python script.py | head``.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream of print."""
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Raises a broken pipe on; reports any other error as ever."""
        if isinstance(error := sys.exc_info()[1], BrokenPipeError):
            raise error
        super().handleError(record)


def show() -> None:
    """Makes the log visible: on stdout while the program has not configured logging itself."""
    if LOGGER.getEffectiveLevel() > logging.INFO:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        handler = _StdoutHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        # A program that configures logging later gets each line once, through its own handlers.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        LOGGER.addHandler(handler)


def _outcome(call: OpCall) -> str:
    return "as_is" if call.dtype is None else f"to_{short_name(call.dtype)}"
