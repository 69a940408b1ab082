"""The compiled kernels of this process: from the user's cache, newly built, or named explicitly.

Built once for a kind of machine, in the background, and kept in the user's cache. Until they are
there, and where they can't be had, torch ops do the same. ``HMPX_KERNELS`` can say otherwise:
``off``, ``wait`` for the build, or the path of a library that was built before.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import KernelsError, OptionError, suggestion
from . import cache, compiler

_LOGGER: Final = logging.getLogger("hmpx")

#: ``HMPX_KERNELS`` -> what it means.
_WORDS: Final = {
    "": "on",
    **dict.fromkeys(("on", "1", "yes", "true"), "on"),
    **dict.fromkeys(("off", "0", "no", "false"), "off"),
    "wait": "wait",
}

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_builder: threading.Thread | None = None
_is_settled = False

#: Whether anything that is slow without kernels has asked for them, and the warning that waits for that.
_is_missed = False
_unreported = ""


def library(*, is_essential: bool = True) -> ctypes.CDLL | None:
    """Returns the compiled kernels; None while there are none. The first call begins to build.

    Args:
        is_essential: Whether a warning is due if there are none.

    Raises:
        OptionError: ``HMPX_KERNELS`` has a value that it can't have, or names an unusable library.
    """
    global _is_missed
    if is_essential and not _is_missed:
        _is_missed = True
        _report_absence(_unreported)
    if not _is_settled and _builder is None:
        _begin()
    return _library


def kernels_may_come() -> bool:
    """Whether there are kernels, or a build is running, which the first call begins.

    Raises:
        OptionError: As `library` does.
    """
    return library(is_essential=False) is not None or not _is_settled


def check_setting() -> None:
    """Checks ``HMPX_KERNELS``, and loads the library that it names; builds nothing.

    Raises:
        OptionError: As `library` does.
    """
    if not _is_settled and _builder is None and isinstance(_setting(), Path):
        _begin()


def is_off() -> bool:
    """Whether ``HMPX_KERNELS`` says that no kernel is to be used.

    Raises:
        OptionError: It has a value that it can't have.
    """
    return _setting() == "off"


def _setting() -> str | Path:
    """Returns ``on``, ``off``, ``wait``, or the path of a library.

    Raises:
        OptionError: ``HMPX_KERNELS`` is something else.
    """
    value = os.environ.get("HMPX_KERNELS", "").strip()
    known = _WORDS.get(value.lower())
    if known is not None:
        return known
    if Path(value).is_absolute():
        return Path(value)
    raise OptionError(
        f"HMPX_KERNELS={compiler.shown_command(value)}: it can be on, off, wait, or the absolute path of "
        "a library that `hmpx kernels --build --output PATH` wrote"
        + suggestion(value.lower(), [word for word in _WORDS if word.isalpha()])
    )


def _begin() -> None:
    """Finds the kernels, or else builds them: in the background, unless ``HMPX_KERNELS`` says to wait."""
    global _library, _builder, _is_settled
    setting = _setting()
    with _lock:
        if _is_settled or _builder is not None:
            return
        if isinstance(setting, Path):
            _library = _named(setting)
        elif setting != "off":
            fault = ""
            try:
                _library = cache.find()
            except (KernelsError, OSError) as error:
                fault = str(error)
            if _library is None and setting == "wait":
                _provide(fault)
            elif _library is None:
                builder = threading.Thread(
                    target=_provide_later, args=(fault,), name="hmpx-kernels", daemon=True
                )
                try:
                    builder.start()
                except RuntimeError as error:  # too many threads, or the process is about to end
                    _report_absence(str(error))
                else:
                    _builder = builder
                    return
        _is_settled = True


def _provide_later(fault: str) -> None:
    global _is_settled
    try:
        _provide(fault)
    finally:
        _is_settled = True


def _provide(fault: str) -> None:
    """Uses newly built kernels; logs one line if there are none, or if they can't be kept.

    Whatever a compiler or a cache does is no reason to stop a program that needs neither.

    Args:
        fault: Of the kernels in the cache, if there are any.
    """
    global _library
    try:
        found = cache.build_kernels()
    except compiler.StoppedError:
        return  # nobody will round any more
    except Exception as error:
        reason = str(error) or type(error).__name__
        _report_absence(f"{reason} ({fault})" if fault and fault != reason else reason)
        return
    _library = found.library
    if found.fault:
        _LOGGER.warning(
            "the kernels that round to number formats can't be kept, so each process compiles them anew: "
            "%s; set XDG_CACHE_HOME to a folder of your own, or build them once with "
            "`hmpx kernels --build --output PATH` and set HMPX_KERNELS=PATH",
            found.fault,
        )


def _report_absence(reason: str) -> None:
    global _unreported
    _unreported = reason
    if not (reason and _is_missed):
        return
    _unreported = ""
    _LOGGER.warning(
        "number formats are rounded by torch ops, several times slower than by compiled kernels: %s; "
        "install a C compiler or set CC, or build the kernels elsewhere with "
        "`hmpx kernels --build --output PATH` and set HMPX_KERNELS=PATH (HMPX_KERNELS=off hides this)",
        reason,
    )


def _named(path: Path) -> ctypes.CDLL:
    """Returns the library that the user named.

    Raises:
        OptionError: It can't be used.
    """
    try:
        return cache.read(path)
    except (KernelsError, OSError) as error:
        raise OptionError(
            f"HMPX_KERNELS={path} can't be used: {error}; write it anew with "
            f"`hmpx kernels --build --output {path}`, or unset HMPX_KERNELS"
        ) from error


@dataclass(frozen=True)
class State:
    """The state of the kernels.

    Attributes:
        path: Where they are, or would be; None if there is no such place.
        fault: Why they can't be used; empty if they can.
    """

    path: Path | None
    fault: str


def kernels_state() -> State:
    """Returns the state of the kernels that this process would use; builds nothing.

    Raises:
        OptionError: As `library` does.
    """
    setting = _setting()
    if isinstance(setting, Path):
        _named(setting)
        return State(setting, "")
    if setting == "off":
        return State(None, "HMPX_KERNELS=off")
    try:
        path = cache.kernels_path()
    except KernelsError as error:
        return State(None, str(error))
    try:
        return State(path, "" if cache.find() else "not built yet")
    except (KernelsError, OSError) as error:
        return State(path, str(error))


# --- processes ---------------------------------------------------------------------------------


def _stop() -> None:
    """Ends a running build, and waits until it has removed its files."""
    compiler.stop()
    if _builder is not None:
        _builder.join(timeout=5.0)


def _begin_anew() -> None:
    """Makes a forked process begin anew: the thread that was building exists only in its parent."""
    global _builder, _lock
    _lock = threading.RLock()
    if not _is_settled:
        _builder = None


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
