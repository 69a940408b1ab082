"""Tracebacks of the programs that hmpx runs, without the frames of hmpx itself."""

from __future__ import annotations

import sys
import traceback
import types

#: Packages whose functions merely pass the program's calls on: their frames are hidden.
_PASSING_ON = {f"hmpx.{room}" for room in ("cli", "compute", "gaudi", "torch_state", "wrappers")}


def show_uncaught(error: BaseException) -> None:
    """Reports an uncaught exception as python does, but without hmpx's frames."""
    _hide_frames(error)
    kind, trace = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    try:
        sys.excepthook(kind, error, trace)
    except SystemExit:
        raise
    except BaseException as failure:
        _hide_frames(failure)
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _hide_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_hmpx(error.__traceback__)
        if error.__cause__ is not None:
            _hide_frames(error.__context__)
        error = error.__cause__ or error.__context__


def _without_hmpx(trace: types.TracebackType | None) -> types.TracebackType | None:
    entries = []
    while trace is not None:
        if not _is_passing_on(trace.tb_frame.f_globals.get("__name__")):
            entries.append(trace)
        trace = trace.tb_next
    following = None
    for entry in reversed(entries):
        entry.tb_next = following
        following = entry
    return following


def _is_passing_on(module: object) -> bool:
    return ".".join(str(module).split(".")[:2]) in _PASSING_ON
