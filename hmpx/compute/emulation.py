"""Ops in a number format that no hardware has: rounded inputs, a wider kernel, rounded outputs.

Values live in fp32 tensors and are always representable in the format. The kernel computes in fp32,
or in fp64 where rounding the fp32 results a second time would show. Gradients pass as if nothing had
been rounded, or are rounded too. Independent of op lists and of how wrappers are installed in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..number_formats import Custom, Format, Rounder, decode, rounder
from ..tensors import CAST, ELIGIBLE, Args, Kwargs
from ..torch_internals import FunctionalTensor, disable_modes, is_jit_tracing
from ..torch_state import without_casts
from .composition import call_raised, rounded
from .lowering import Lowering

#: fp32 results may be rounded again to formats with up to this many significand bits: 2 * 11 + 2 <= 24.
_MOST_BITS: Final = 11
_FP32_BITS: Final = 24


@dataclass(frozen=True)
class Emulation:
    """Computes one op in a number format.

    Attributes:
        format: The format.
        rounding: How values are rounded, as `formats.quantize` takes it.
        rounds_gradients: Gradients are rounded as well, both incoming and outgoing.
        accumulate_dtype: The dtype the op computes in; None for fp32, or fp64 for a wide format.
        output_dtype: The dtype outputs are cast to after rounding; None for fp32.
        is_view: The op computes nothing, so its outputs need no rounding.
        lowerings: Device type -> the function that computes the op instead of torch; None stands for
            every other device type.
        takes_codes: Its weights may be frozen to codes.
    """

    format: Format
    rounding: str = "nearest"
    rounds_gradients: bool = False
    accumulate_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    is_view: bool = False
    lowerings: Mapping[str | None, Lowering] = field(default_factory=dict)
    takes_codes: bool = False

    _round: Rounder = field(init=False, repr=False, compare=False)
    _computes_in: torch.dtype = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        round_ = rounder(self.format, self.rounding)
        if isinstance(self.format, Custom):  # torch functions called inside it must not be cast
            round_ = without_casts()(round_)
        object.__setattr__(self, "_round", round_)
        is_wide = (
            not isinstance(self.format, Custom)
            and _MOST_BITS < self.format.significand_bits < _FP32_BITS
        )
        usual = torch.float64 if is_wide else torch.float32
        object.__setattr__(self, "_computes_in", self.accumulate_dtype or usual)

    def round(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` rounded to the format, in its own dtype.

        Raises:
            OptionError: It is not a dense tensor, or torch.jit.trace runs, which can't hold roundings.
        """
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise OptionError(
                f"{self.format.name}: number formats take dense tensors, not {kind} ones; leave the "
                "op out of the low-precision list"
            )
        if is_jit_tracing():
            raise OptionError(
                f"{self.format.name}: torch.jit.trace can't hold a number format; use torch.export"
            )
        if _watchers and self.takes_codes and type(tensor) is nn.Parameter:
            for note in _watchers:
                note(tensor, self.format, False)
            with disable_modes():
                return self._round(tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Rounded.apply(tensor, self._round, self.rounds_gradients)  # type: ignore[no-any-return, no-untyped-call]
        return self._round(tensor)

    def decoded(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Returns the arguments, with weights that were frozen to codes decoded to values."""
        if _watchers and args and isinstance(args[0], nn.Parameter):
            for note in _watchers:
                note(args[0], self.format, True)
        if not self.takes_codes or not any(map(_is_integer, (*args[1:], *kwargs.values()))):
            return args, kwargs
        given = (*args, *kwargs.values())
        holds_codes = _is_traced_code if any(map(_is_floating, given)) else _is_frozen

        def value(given: Any) -> Any:
            return decode(given, self.format) if holds_codes(given) else given

        new_args = (args[0], *map(value, args[1:])) if args else args
        return new_args, {name: value(given) for name, given in kwargs.items()}

    def compute(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Returns the result of ``function`` on rounded inputs."""
        if self.is_view:
            return function(*args, **kwargs)
        dtype = self._computes_in
        if dtype is torch.float32:
            result = function(*args, **kwargs)
        else:
            result = call_raised(function, args, kwargs, CAST[dtype], ELIGIBLE)
        lowering = self._lowering(args)
        if lowering is not None:
            with without_casts():
                result = lowering.in_place_of(result, args, kwargs)
        return rounded(result, self._finish, dtype)

    def _finish(self, tensor: Tensor) -> Tensor:
        return CAST[self.output_dtype or torch.float32](self.round(tensor))

    def _lowering(self, args: Args) -> Lowering | None:
        if not self.lowerings:
            return None
        first = next((value for value in args if isinstance(value, Tensor)), None)
        device_type = None if first is None else first.device.type
        return self.lowerings.get(device_type) or self.lowerings.get(None)


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


#: Called with each parameter that is rounded, its format, and whether it is an op's first input,
#: where integers are never codes.
Note = Callable[[Tensor, Format, bool], None]

_watchers: Final[list[Note]] = []


@contextlib.contextmanager
def watched_emulation(note: Note) -> Iterator[None]:
    """Calls ``note`` for each parameter rounded in the block; dispatch modes don't see this rounding."""
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


class _Rounded(torch.autograd.Function):
    """Rounds values, and gradients if requested."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, round_: Rounder, rounds_gradients: bool) -> Tensor:
        result = round_(tensor)
        return tensor.view_as(tensor) if result is tensor else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.round = inputs[1] if inputs[2] else None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.round is None:
            return gradient, None, None
        if gradient.requires_grad and torch.is_grad_enabled():  # create_graph=True
            return _Rounded.apply(gradient, ctx.round, True), None, None  # type: ignore[no-untyped-call]
        return ctx.round(gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent) if ctx.round is None else ctx.round(tangent)
