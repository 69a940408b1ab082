"""The verbose log: one line per call, or per distinct decision; or the lines that HMP printed.

These observers write to ``logging.getLogger("hmpx")``, or HMP's lines to stdout.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, TextIO

import torch

from ..errors import printable
from ..patching import Draft, Patch
from ..places import is_ours, located
from ..tensors import short_name
from ..torch_state import disable_casts
from .attached import Observer
from .op_calls import OpCall

LOGGER: Final = logging.getLogger("hmpx")


def _escape(record: logging.LogRecord) -> bool:
    """Makes strings in the log's lines printable: names of modules and files."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            [printable(each) if isinstance(each, str) else each for each in record.args]
        )
    return True


LOGGER.addFilter(_escape)


def log_observer(verbose: bool | str) -> Observer:
    """Returns the observer that logs calls for this value of ``verbose``."""
    if verbose == "once":
        return VerboseOnceLog()
    return HmpLog() if verbose == "hmp" else VerboseLog()


class VerboseLog:
    """Logs each call in HMP's shape: ``casting  <built-in function linear>  to_bf16``."""

    def __call__(self, call: OpCall) -> None:
        """Logs ``call``."""
        LOGGER.info("casting  %r  %s", call.function, _outcome(call))


class VerboseOnceLog:
    """Logs each distinct decision once, with its reason, the module and the user's line."""

    def __init__(self) -> None:
        """Starts empty."""
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, call: OpCall) -> None:
        """Logs ``call`` unless one with the same op, dtypes, module and line was logged."""
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
            located(call.location),
        )


class HmpLog:
    """Prints the lines that HMP printed, for programs that parse them.

    ``casting  <...> to_bf16`` for ops of its two lists, ``casting  <...>  to  to_fp32`` for ops with
    several inputs and for ops that write. HMP had no others.
    """

    def __call__(self, call: OpCall) -> None:
        """Prints ``call`` if HMP would have printed it."""
        if call.dtype is None or call.cast_policy not in _HMPS:
            return
        is_listed = call.cast_policy in ("LOW", "FP32")
        separator = " " if is_listed else "  to  "
        _print(f"casting  {call.function!r}{separator}{_outcome(call)}")


#: HMP's kinds of decisions: its two lists, its list of ops with several inputs, and writes.
_HMPS: Final = frozenset({"LOW", "FP32", "WIDEST", "TARGET"})


def announcing(draft: Draft) -> Iterator[Patch]:
    """Yields the patches that print a program's own regions without casts, as HMP did."""
    for name, line in (("__enter__", "Disabled HMP casting"), ("__exit__", "Enabled HMP casting")):
        yield Patch(disable_casts, name, _saying(line, draft.attribute(disable_casts, name)))


def _saying(line: str, method: Callable[..., None]) -> Callable[..., None]:
    """Returns ``method`` of `disable_casts`, which prints ``line`` after each call."""

    @functools.wraps(method)
    def call(*args: Any) -> None:
        method(*args)
        if not torch.compiler.is_dynamo_compiling() and _is_programs(sys._getframe(1)):
            _print(line)

    return call


def _is_programs(frame: FrameType) -> bool:
    """Whether a region is the program's, rather than hmpx's for an op or an optimizer."""
    module = frame.f_globals.get("__name__")
    if module == disable_casts.__module__:
        module = getattr(frame.f_locals.get("function"), "__module__", module)
    return not (is_ours(module) or str(module).partition(".")[0] == "torch")


def announce_conversion(opt_level: str) -> None:
    """Prints HMP's line about the conversion."""
    _print("hmp:verbose_mode  True")
    _print(f"hmp:opt_level {opt_level}")


def _print(line: str) -> None:
    with contextlib.suppress(ValueError):  # the program may have closed it
        sys.stdout.write(f"{line}\n")


class _StdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stdout`.

    Ends the program if the reader has closed the pipe, as printing does: ``python script.py | head``.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream of print."""
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Raises a broken pipe; reports other errors as logging does, unless the program has closed stdout."""
        if isinstance(error := sys.exc_info()[1], BrokenPipeError):
            raise error
        if self.stream.closed:
            return
        super().handleError(record)


def show_log() -> None:
    """Shows the log on stdout as long as the program has not configured logging itself."""
    if LOGGER.getEffectiveLevel() > logging.INFO:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        handler = _StdoutHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        # If the program configures logging later, its own handlers get each line once.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        LOGGER.addHandler(handler)


def _outcome(call: OpCall) -> str:
    return "as_is" if call.dtype is None else f"to_{short_name(call.dtype)}"
