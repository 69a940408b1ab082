"""The verbose log: one line a call, or one a distinct decision; or the lines that HMP printed.

Observers like any other; write through ``logging.getLogger("hmpx")``, HMP's lines to stdout.
"""

from __future__ import annotations

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
    """Returns the observer that logs calls in the way of this ``isVerbose``."""
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
            located(call.location),
        )


class HmpLog:
    """Prints the lines that HMP printed, for programs that look for them.

    ``casting  <...> to_bf16`` for ops of its two lists, ``casting  <...>  to  to_fp32`` for those of
    several inputs and for writing ones. HMP knew of no others.
    """

    def __call__(self, call: OpCall) -> None:
        """Prints ``call``, if HMP would have."""
        if call.dtype is None or call.cast_policy not in _HMPS:
            return
        is_listed = call.cast_policy in ("LOW", "FP32")
        separator = " " if is_listed else "  to  "
        _print(f"casting  {call.function!r}{separator}{_outcome(call)}")


#: What HMP decided by: its two lists, its list of ops of several inputs, and where a call writes.
_HMPS: Final = frozenset({"LOW", "FP32", "WIDEST", "TARGET"})


def announcing(draft: Draft) -> Iterator[Patch]:
    """Yields the patches by which a program's own regions without casts are announced, as by HMP."""
    for name, line in (("__enter__", "Disabled HMP casting"), ("__exit__", "Enabled HMP casting")):
        yield Patch(disable_casts, name, _saying(line, draft.attribute(disable_casts, name)))


def _saying(line: str, method: Callable[..., None]) -> Callable[..., None]:
    """Returns ``method`` of `disable_casts`, which says ``line`` when it was called."""

    @functools.wraps(method)
    def call(*args: Any) -> None:
        method(*args)
        if not torch.compiler.is_dynamo_compiling() and _is_programs(sys._getframe(1)):
            _print(line)

    return call


def _is_programs(frame: FrameType) -> bool:
    """Whether a region is the program's, rather than hmpx's for an op or an optimizer.

    Args:
        frame: That of the ``with``: of the program, or of what stands for a decorated function.
    """
    module = frame.f_globals.get("__name__")
    if module == disable_casts.__module__:
        module = getattr(frame.f_locals.get("function"), "__module__", module)
    return not (is_ours(module) or str(module).partition(".")[0] == "torch")


def announce_conversion(opt_level: str) -> None:
    """Prints what HMP printed when it converted."""
    _print("hmp:verbose_mode  True")
    _print(f"hmp:opt_level {opt_level}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


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


def show_log() -> None:
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
