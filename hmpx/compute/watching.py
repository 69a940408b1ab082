"""Users' functions for ops in number formats; reports about calls: for `hmpx.freeze`, and whether one computed in fp32."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch import Tensor, nn

from ..registry import Registry
from ..tensors import SEQUENCES, Args, Kwargs
from ..torch_internals import run_when_traced

if TYPE_CHECKING:
    from ..number_formats import Format
    from .emulation import Formats
    from .lowering import Lowering

#: Op and format -> device type -> the function.
Lowerings: TypeAlias = "Mapping[tuple[str, str], Mapping[str | None, Lowering]]"

LOWERINGS: Final[Registry[Lowerings]] = Registry({})


#: Called with the name of an op and some of its inputs.
Note = Callable[[str, list[Tensor]], None]

#: Called with each rounded parameter, its format, and the formats of the op; or with one of `AS_DATA` if the op
#: never treats integers there as codes.
RoundingNote = Callable[[Tensor, "Format", "Formats | str"], None]

#: The places in which integers are data for an op.
AS_DATA: Final = ("as a first input", "in a list")

# Globals, which cost less per call than a context variable; so calls in other threads are also reported.
#: Called with inputs whose dtype, beyond their cast, affects the result of a call.
DECIDING_WATCHERS: Final[list[Note]] = []
#: Called for each rounded parameter; dispatch modes don't see this rounding.
EMULATION_WATCHERS: Final[list[RoundingNote]] = []

_unrounded: Final = contextvars.ContextVar[Note | None]("hmpx_watcher", default=None)


@contextlib.contextmanager
def watched(watchers: list[Any], note: Any) -> Iterator[None]:
    """Calls ``note`` as the other ``watchers`` of the same kind in the block."""
    watchers.append(note)
    try:
        yield
    finally:
        watchers.remove(note)


def note_deciding(op: str, inputs: list[Tensor]) -> None:
    """Reports that the dtype of ``inputs`` affects the result of ``op``."""
    for note in DECIDING_WATCHERS:
        note(op, inputs)


def note_rounding(parameter: Tensor, format: Format, of_op: Formats | str) -> None:
    """Reports a rounded parameter."""
    for note in EMULATION_WATCHERS:
        note(parameter, format, of_op)


def note_data(args: Args, kwargs: Kwargs, format: Format) -> None:
    """Reports the parameters among the arguments that can't be codes."""
    if args and isinstance(args[0], nn.Parameter):
        note_rounding(args[0], format, AS_DATA[0])
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, SEQUENCES) else ():
            if isinstance(item, nn.Parameter):
                note_rounding(item, format, AS_DATA[1])


@contextlib.contextmanager
def watched_rounding(note: Note) -> Iterator[None]:
    """Calls ``note`` whenever the mode ``"fast"`` leaves inputs unrounded inside the block.

    That depends on a call's size, and on whether gradients are recorded. Inside the block every call
    leaves inputs unrounded.
    """
    token = _unrounded.set(note)
    try:
        yield
    finally:
        _unrounded.reset(token)


def is_watched() -> bool:
    """Whether the call is in a block of `watched_rounding`."""
    return _unrounded.get() is not None


def note_unrounded(op: str, inputs: list[Tensor]) -> None:
    """Reports that ``op`` uses ``inputs`` unrounded that other modes would round."""
    note = _unrounded.get()
    if note is not None:
        note(op, inputs)


class _LegalizedState(threading.local):
    """Whether this thread has computed a low-precision call in fp32, or a number format's by a kernel; readers reset it."""

    is_legalized = False
    is_on_hardware = False


COMPUTED: Final = _LegalizedState()


def note_legalized() -> None:
    """Records that a call with low-precision inputs or results computes in fp32."""
    COMPUTED.is_legalized = True


run_when_traced(is_watched)  # compiled code is never watched
run_when_traced(note_legalized)
