"""Weights that are frozen to codes: which arguments they are, and who is told of roundings meanwhile.

Codes do not state their format: that of the op's weights is theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..number_formats import Format, decode
from ..tensors import SEQUENCES, Args, Kwargs
from ..torch_internals import FunctionalTensor

_CODES: Final = frozenset({torch.uint8, torch.uint16, torch.int32})


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _CODES


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _is_frozen(value: Any) -> bool:
    """Whether ``value`` is a weight frozen to codes: no other parameters are integers."""
    return _is_integer(value) and isinstance(value, nn.Parameter)


def _is_traced_code(value: Any) -> bool:
    """The same, for a value beside floating-point tensors.

    What AOTAutograd traces is no longer marked as a parameter. But it was traced before with tensors
    that are, and any other integer beside floating-point tensors was an error of torch's there.
    """
    return _is_frozen(value) or (_is_integer(value) and isinstance(value, FunctionalTensor))


#: Called with each parameter that is rounded, its format, and how an op takes it where integers are never
#: codes: as one of `AS_DATA`; ``""`` where they may be.
Note = Callable[[Tensor, Format, str], None]

#: As what integers are data for an op.
AS_DATA: Final = ("as a first input", "in a list")

_watchers: Final[list[Note]] = []


@contextlib.contextmanager
def watched_emulation(note: Note) -> Iterator[None]:
    """Calls ``note`` for each parameter rounded in the block; dispatch modes don't see this rounding."""
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


def note_rounding(parameter: Tensor, format: Format, as_data: str = "") -> bool:
    """Tells of a parameter that is rounded; returns whether anybody wanted to know."""
    for note in _watchers:
        note(parameter, format, as_data)
    return bool(_watchers)


def note_data(args: Args, kwargs: Kwargs, format: Format) -> None:
    """Tells of the parameters among the arguments of a call that `decoded` takes for data."""
    if not _watchers:
        return
    if args and isinstance(args[0], nn.Parameter):
        note_rounding(args[0], format, AS_DATA[0])
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, SEQUENCES) else ():
            if isinstance(item, nn.Parameter):
                note_rounding(item, format, AS_DATA[1])


def decoded(args: Args, kwargs: Kwargs, format: Format) -> tuple[Args, Kwargs]:
    """Returns the arguments of a product, with weights that were frozen to codes decoded to values."""
    if not any(map(_is_integer, (*args[1:], *kwargs.values()))):
        return args, kwargs
    given = (*args, *kwargs.values())
    holds_codes = _is_traced_code if any(map(_is_floating, given)) else _is_frozen

    def value(given: Any) -> Any:
        return decode(given, format) if holds_codes(given) else given

    new_args = (args[0], *map(value, args[1:])) if args else args
    return new_args, {name: value(given) for name, given in kwargs.items()}
