"""The errors and warnings that users' mistakes raise, and how messages show values.

Each message has three parts: what is wrong, where, and the remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import opcode
import os
import reprlib
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


_Hmpx = TypeVar("_Hmpx", bound="HmpxError")


class HmpxError(Exception):
    """Base of every error that hmpx raises deliberately."""

    def __str__(self) -> str:
        return lined(super().__str__().split("\n"))


class OpListError(HmpxError, ValueError):
    """An op list can't be read, or contradicts itself or another list."""


class OptionError(HmpxError, ValueError, TypeError):
    """An argument of a public function has an invalid value or type."""


class PolicyFileError(HmpxError, ValueError):
    """A policy file can't be read, or is not a policy."""


class RuleError(HmpxError):
    """A rule raised an error, or returned something other than a decision."""


class FreezeError(HmpxError):
    """A model can't be frozen, or a frozen model does not support a call."""


class BenchError(HmpxError):
    """A step can't be measured: there is none, or it fails in float32."""


class PlanError(HmpxError):
    """A step can't be planned: the model needs values, or can't be copied."""


class TorchError(HmpxError):
    """hmpx does not work with the installed torch."""


class CheckpointError(HmpxError):
    """A checkpoint can't be recomputed in the way its forward ran."""


class NonFiniteError(HmpxError):
    """An op of a watched program has turned finite values into NaN or infinity.

    Attributes:
        offence: The report of `hmpx.watch`.
    """

    def __init__(self, offence: Any) -> None:
        super().__init__(str(offence))
        self.offence = offence


class ContractError(HmpxError):
    """A program does not have the precision that a contract expects.

    Attributes:
        breach: The `Breach`.
    """

    def __init__(self, breach: Any) -> None:
        super().__init__(str(breach))
        self.breach = breach


class AlarmError(HmpxError):
    """A figure of a monitored training is beyond its limit.

    Attributes:
        alarm: The `Alarm`.
    """

    def __init__(self, alarm: Any) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm


#: Classes made by `also`.
_ALSO: Final[dict[tuple[type, type], Any]] = {}


def also(error: type[_Hmpx], builtin: type[Exception], *args: Any) -> _Hmpx:
    """Returns an error that is one of Python's, too: an `OSError` for a file, a `TypeError`."""
    if (error, builtin) not in _ALSO:
        members = {
            "__module__": error.__module__,
            "__doc__": error.__doc__,  # and pickle finds no class by this name
            "__reduce__": lambda self: (also, (error, builtin, *self.args)),
        }
        _ALSO[error, builtin] = type(error.__name__, (error, builtin), members)
    return _ALSO[error, builtin](*args)  # type: ignore[no-any-return]


class HmpxWarning(UserWarning):
    """Part of the user's input was ignored, and hmpx went on without it."""

    def __str__(self) -> str:
        return lined(super().__str__().split("\n"))


#: Packages whose frames stand between a line of the user's and a warning about it.
_BETWEEN: Final = frozenset(
    {str(__package__), "torch", "contextlib", "functools", "importlib", "_frozen_importlib"}
)


def warn(message: str, category: type[Warning] = HmpxWarning) -> None:
    """Warns about something in the user's input, at the user's line."""
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# --- whose errors are caught ---------------------------------------------------------------------


def raised_here(*kinds: type[_Error]) -> tuple[type[_Error], ...]:
    """Returns ``kinds``, for an ``except`` clause, unless a signal handler or a mode of the program has raised the error.

    A deliberate error is none of Python's kinds here, although users may catch it as one.
    """
    if isinstance(sys.exc_info()[1], HmpxError):
        kinds = tuple(
            each
            for each in kinds
            if each in (Exception, BaseException) or issubclass(each, HmpxError)
        )
    entry, frames, is_raised = sys.exc_info()[2], [], False
    while entry and (entry := entry.tb_next):  # the first one is of the code itself
        frames.append(entry.tb_frame)
        code = entry.tb_frame.f_code
        is_raised = opcode.opname[code.co_code[entry.tb_lasti]] == "RAISE_VARARGS"  # not in C++
    handlers = _handlers() if frames else ()
    if any(frame.f_code in handlers for frame in frames):
        return ()
    # Methods of the program's modes; those of tensors' classes get the class first.
    modes = [
        frame
        for frame in frames
        if frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__")
    ]
    modes = [m for m in modes if not isinstance(next(iter(m.f_locals.values()), None), type)]
    is_foreign = is_raised and any(not is_own(m) and not is_own(frames[-1]) for m in modes)
    return () if is_foreign else kinds


def is_own(frame: types.FrameType, *packages: str) -> bool:
    """Whether a frame's code is that of hmpx, torch, Python or ``packages``, rather than the program's.

    Checkpoints, and data loaders, whose signal handler raises errors, count as the program's.
    """
    module = str(frame.f_globals.get("__name__"))
    is_known = module.partition(".")[0] in {*_OWN, *packages} and not module.startswith(_TOOLS)
    return is_known and frame.f_code not in _handlers()


_OWN: Final = {str(__package__), "torch", *sys.stdlib_module_names}
_TOOLS: Final = ("torch.utils.checkpoint", "torch.utils.data")


def _handlers() -> set[object]:
    """Returns the code of the program's signal handlers: functions, partials, and objects with ``__call__``."""
    found = [signal.getsignal(number) for number in signal.valid_signals()]
    found += [getattr(each, "func", None) or vars(type(each)).get("__call__") for each in found]
    return {getattr(each, "__code__", None) for each in found}


@contextlib.contextmanager
def passing_over(*kinds: type[BaseException]) -> Iterator[None]:
    """Ends its block at an error of these kinds, if it was `raised_here`."""
    try:
        yield
    except raised_here(*kinds):
        return


def to_the_end(restore: Callable[[], object]) -> None:
    """Calls a function that may be repeated, again where an error has stopped it: a signal handler's, perhaps.

    Raises the first error at the end.
    """
    errors: list[BaseException] = []
    while len(errors) < 20:
        try:
            restore()
            break
        except HmpxError:  # deliberate
            raise
        except BaseException as error:
            end_contexts_left_open(error)
            errors.append(error)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # else they would keep their frames alive


def end_contexts_left_open(error: BaseException) -> None:
    """Ends contexts whose own beginning or end a signal handler's error has stopped, by letting go of what frames hold.

    They would end with the error's traceback, amid what follows, and restore a state that is out of date. The
    frames of the program keep their variables, for debuggers.
    """
    handlers, frames = _handlers(), list[types.FrameType]()
    seen: BaseException | None = error
    while seen is not None:
        frames += [frame for frame, _ in traceback.walk_tb(seen.__traceback__)]
        seen = seen.__context__
    if isinstance(error, KeyboardInterrupt) or any(each.f_code in handlers for each in frames):
        for frame in frames:
            if is_own(frame):
                with passing_over(RuntimeError):  # it is still running
                    frame.clear()


# --- values in messages ------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""Returns text on one line, with unprintable characters escaped: ``\n``, ``\x1b``.

    Names of modules and files may hold anything: terminal escapes, marks that reverse the direction
    of writing, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def lined(lines: Iterable[str]) -> str:
    """Returns a text of these lines, each `printable`. All tools print through this."""
    return "\n".join(map(printable, lines))


#: How many faults of one kind are shown; the others are only counted.
MOST_SHOWN: Final = 20

_MOST_CHARACTERS: Final = 160

_repr: Final = reprlib.Repr()
_repr.maxlevel, _repr.maxdict = 3, 6
_repr.maxstring = _repr.maxother = _MOST_CHARACTERS // 2


def shown(value: object) -> str:
    """Returns ``repr(value)`` on one short line, even where that would raise."""
    try:
        return cut(_repr.repr(value))
    except raised_here(Exception):  # raised by the value's own class: not the mistake to report
        return f"<{type(value).__name__} object>"


def cut(text: str) -> str:
    """Returns ``text`` on one line, without the end of a long one."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def said_by(error: BaseException) -> str:
    """Returns an error's class and its message, on one short line: ``"ValueError: no such thing"``."""
    try:
        message = cut(str(error))
    except raised_here(Exception):  # an error of the user's own class
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def brief(self: object) -> str:
    """The ``__repr__`` of results that print as several lines: their class and first line."""
    return f"<hmpx.{type(self).__name__}: {cut(str(self).partition(chr(10))[0])}>"


def fielded(self: Any) -> str:
    """The ``__repr__`` of rows: their class, and as many fields as three lines hold."""
    fields = ", ".join(
        f"{each.name}={shown(getattr(self, each.name))}" for each in dataclasses.fields(self)
    )
    return f"{type(self).__name__}({fields if len(fields) <= 200 else f'{fields[:197]}...'})"


def noted(error: _Error, note: str) -> _Error:
    """Adds a note to an error; tracebacks show it below the message.

    Before Python 3.11, hmpx's own errors get it in their message, and others don't change.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif isinstance(error, HmpxError):
        error.args = (f"{error}\n{note}",)
    else:
        vars(error).setdefault("__notes__", []).append(note)
    return error


def _directory() -> str:
    try:
        return os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118  # slow
    except FileNotFoundError:
        return os.sep


#: The directory in which the program was started.
_START: Final = _directory()


def relative(path: str) -> str:
    """Returns a path relative to the directory in which the program was started, or is now, if it is inside."""
    for directory in (_START, _directory()):
        if path.startswith(directory) and directory != os.sep:
            return path[len(directory) :]
    return path


def short(path: str) -> str:
    """Returns a path as messages show it: `relative`, and cut if it is longer than any real path."""
    path, most = relative(path), 2 * _MOST_CHARACTERS
    return path if len(path) <= most else f"{path[:most]}... ({len(path):,} characters)"


def gathered(faults: Iterable[str], count: int, most: int = MOST_SHOWN) -> list[str]:
    """Returns the first ``most`` of ``count`` faults, and how many more there are. Reads no more of an iterator."""
    first = list(itertools.islice(faults, most))
    more = count - len(first)
    return [*first, f"and {more:,} more"] if more > 0 else first


def suggestion(
    name: str, candidates: Iterable[str], spellings: Mapping[str, str] | None = None
) -> str:
    """Returns ``"; did you mean 'matmul'?"`` for the nearest candidate, or ``""`` if none is near.

    ``spellings`` are other names, in lower case and with ``_`` for ``-`` and blanks, of some candidates.
    """
    spelled = name.strip().lower().replace("-", "_").replace(" ", "_")
    near = [spellings[spelled]] if spellings and spelled in spellings else []
    likeness = 0.65 if len(name) > 2 else 0.7
    near = near or difflib.get_close_matches(name[:_MOST_CHARACTERS], candidates, 1, likeness)
    return f"; did you mean {near[0]!r}?" if near else ""
