"""Runs calls that gave non-finite values again in float32, to try a remedy before it is reported.

The program does not notice: calls run on copies, without its modes and hooks, and the RNG state is restored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import passing_over
from ..observers import OpCall
from ..ops import facts, is_foreign
from ..tensors import (
    CAST,
    LOW_DTYPES,
    floating_in,
    is_floating,
    is_low,
    leaves,
    map_tensors,
    tensors_in,
    version_of,
)
from ..torch_internals import disable_modes
from ..torch_state import RandomStates, apart, state_of_random_numbers
from .records import NAN, Trial, bits_of
from .slots import Extremes, exact

#: Most inputs of which all combinations of extremes are tried.
_MOST_INPUTS: Final = 3

#: Conversions of the program's own, which op lists don't decide.
CONVERTING: Final = facts("converting").keys() | {"copy"}

#: Number of a result -> its gradient; one element stands for all elements of the result.
Gradients = Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call, kept to run it again, and the versions of its floating tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    versions: tuple[int, ...] = ()

    def replaced(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """Returns the arguments with each tensor replaced."""
        names = self.kwargs.items()
        kwargs = {name: map_tensors(value, function) for name, value in names}
        return Arguments(map_tensors(self.args, function), kwargs)

    def outline(self) -> Arguments:
        """Returns the arguments with each tensor replaced by one with one element and no memory."""
        return self.replaced(lambda tensor: placeholder(tensor.ndim, tensor.requires_grad))

    def values(self) -> list[Any]:
        """Returns all arguments, including those in lists and tuples."""
        return leaves([*self.args, *self.kwargs.values()])


def kept(args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Iterable[Tensor]) -> Arguments:
    """Returns the arguments of a call that has just run."""
    return Arguments(args, kwargs, _versions(inputs))


def is_emulated(call: OpCall) -> bool:
    """Whether a call computed in a number format, some of which overflow to NaN."""
    return call.dtype is not None and not isinstance(call.dtype, torch.dtype)


def is_low_call(call: OpCall) -> bool:
    """Whether a call computed in low precision, or in a number format."""
    dtypes = (*call.cast_dtypes, *call.output_dtypes, call.dtype)
    return is_emulated(call) or not LOW_DTYPES.isdisjoint(dtypes)


def can_change(call: OpCall) -> bool:
    """Whether the call computed in low precision because of a list, or for lack of a line in one."""
    return is_low_call(call) and call.op not in CONVERTING


def tried(call: OpCall, arguments: Arguments, gradients: Gradients | None = None) -> Trial | None:
    """Returns the outcome in float32 of a call, or with ``gradients`` of its backward; None if it can't run."""
    values = arguments.values()
    inputs = floating_in(values)
    if _versions(inputs) != arguments.versions or any(
        isinstance(each, torch.Generator) for each in values
    ):
        return None
    with aside(values):
        exact_inputs = [upcast(each.detach()) for each in inputs]
        given = None if gradients is None else {n: upcast(g) for n, g in gradients.items()}
        dtypes = [each.dtype for each in inputs]
        found = outcome(call, arguments, exact_inputs, given, dtypes)
        bad = next((each for each in found if bits_in([each])), None)
        if bad is None:
            is_rounded = gradients is None and _fails_rounded(call, arguments, exact_inputs)
            return Trial(0, is_underflow=is_rounded)
        values = values_at(call, arguments, exact_inputs, given, bad)
        return Trial(bits_in(found), text_of(values, len(inputs)))
    return None


def results_in_fp32(call: OpCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the results in float32 of a call that has just run, on the same inputs; [] if it can't run."""
    arguments = Arguments(args, kwargs)
    with aside(arguments.values()):
        inputs = [upcast(each.detach()) for each in floating_in(arguments.values())]
        return outcome(call, arguments, inputs, None)
    return []


def tried_forward(call: OpCall, arguments: Arguments, results: Sequence[Tensor]) -> Trial | None:
    """Like `tried`; None if the call only passes on its inputs' values."""
    had = bits_in(floating_in(arguments.values()))
    if had & NAN or not bits_in(results) & ~had:
        return None
    return tried(call, arguments)


def tried_on_extremes(
    call: OpCall, outline: Arguments, extremes: Sequence[Extremes], gradient: Extremes | None = None
) -> Trial | None:
    """Returns the outcome in float32 of a call on one element, for the extremes of its inputs.

    Of its backward, if the extremes of its result's gradient are given.
    """
    if not 0 < len(extremes) <= _MOST_INPUTS or len(extremes) != len(tensors_in(outline.values())):
        return None
    is_underflow = False
    with aside([]):
        for values in itertools.product(*map(_points, extremes)):
            single = _single(outline, values)
            for last in [None] if gradient is None else _points(gradient):
                given = None if last is None else {0: torch.tensor(last)}
                bits = bits_in(outcome(call, outline, single, given))
                if bits:
                    text = text_of([*values, *([] if last is None else [last])], len(values))
                    return Trial(bits, text, is_sure=False)
                is_underflow |= given is None and _fails_rounded(call, outline, single)
        return Trial(0, is_underflow=is_underflow, is_sure=False)
    return None


def has_gradient(call: OpCall, arguments: Arguments, gradients: Gradients) -> bool:
    """Whether float32 has other gradients of a call than zero."""
    inputs = floating_in(arguments.values())
    if _versions(inputs) == arguments.versions:
        with aside(arguments.values()):
            given = {number: upcast(each) for number, each in gradients.items()}
            found = outcome(call, arguments, [upcast(each.detach()) for each in inputs], given)
            return any(bool(each.any()) for each in found)
    return False


def values_at(
    call: OpCall,
    arguments: Arguments,
    inputs: Sequence[Tensor],
    gradients: Gradients | None,
    bad: Tensor,
) -> list[float]:
    """Returns the values of inputs at the first non-finite element, then of gradients; [] if these alone don't determine it."""
    position = int((~torch.isfinite(bad)).flatten().nonzero()[0])
    with passing_over(RuntimeError, TypeError, ValueError, IndexError):
        values = [each.expand_as(bad).flatten()[position].item() for each in inputs]
        given = gradients and {
            number: each.expand_as(bad).flatten()[position] for number, each in gradients.items()
        }
        if bits_in(outcome(call, arguments, _single(arguments, values), given)):
            return [*values, *[each.item() for each in (given or {}).values()]]
    return []


def text_of(values: Sequence[float], inputs: float = math.inf) -> str:
    """Returns the values of inputs, and of gradients after these, as text."""
    names = [f"input {n}" if n < inputs else "the gradient" for n in range(len(values))]
    pairs = zip(names, values, strict=True)
    return " and ".join([f"{name} is {value + 0.0:.4g}" for name, value in pairs])


def outcome(
    call: OpCall,
    arguments: Arguments,
    inputs: Iterable[Tensor],
    gradients: Gradients | None,
    dtypes: Iterable[torch.dtype] = (),
) -> list[Tensor]:
    """Returns a call's results, or its inputs' gradients, with ``inputs`` as its floating arguments.

    Gradients are cast to ``dtypes``, those of the inputs before casts.
    """
    if is_foreign(call.op):  # a function of the program's, with effects of its own
        return []
    following, kinds, wanted = iter(inputs), iter(dtypes), []

    def replace(tensor: Tensor) -> Tensor:
        if not is_floating(tensor):
            return tensor.clone()
        new = next(following)
        leaf = new.to(next(kinds, new.dtype))
        if gradients is None or not tensor.requires_grad:
            return new.clone()
        wanted.append(leaf.detach().requires_grad_())
        with torch.enable_grad():
            return wanted[-1].to(new.dtype, copy=True)

    given = arguments.replaced(replace)
    if gradients is None:
        return floating_in([call.function(*given.args, **given.kwargs)])
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        results = floating_in([call.function(*given.args, **given.kwargs)])
        chosen = [results[number] for number in gradients]
        arrived = [
            each.to(result.dtype).expand_as(result)
            for each, result in zip(gradients.values(), chosen, strict=True)
        ]
        found = torch.autograd.grad(chosen, wanted, arrived, allow_unused=True)
    return [each for each in found if each is not None]


def _fails_rounded(call: OpCall, arguments: Arguments, inputs: Sequence[Tensor]) -> bool:
    """Whether a call fails in float32 on inputs rounded to low precision, some of them to zero."""
    low = next((each for each in (*call.cast_dtypes, call.dtype) if is_low(each)), None)
    if low is None:
        return False
    rounded = [
        CAST[torch.float32](CAST[low](each)) if each.dtype is torch.float32 else each
        for each in inputs
    ]
    if not any(
        bool(((new == 0) & (old != 0)).any()) for new, old in zip(rounded, inputs, strict=True)
    ):
        return False
    return bool(bits_in(outcome(call, arguments, rounded, None)))


@contextlib.contextmanager
def aside(values: Iterable[Any]) -> Iterator[None]:
    """Runs its block unseen by the program; an error of torch ends the block."""
    states = state_of_random_numbers(values), RandomStates(())  # optimizers draw Python's, too
    is_strict = torch.is_anomaly_enabled()
    try:
        with (
            passing_over(RuntimeError, TypeError, ValueError, IndexError),
            apart(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autograd.set_detect_anomaly(False) if is_strict else contextlib.nullcontext(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for state in states:
            state.restore()


def upcast(tensor: Tensor) -> Tensor:
    """Returns a tensor in float32, if it has low precision."""
    return CAST[torch.float32](tensor) if tensor.dtype in LOW_DTYPES else tensor


def _single(arguments: Arguments, values: Iterable[float]) -> list[Tensor]:
    """Returns tensors of one element, with the dimensions of those in the arguments."""
    tensors = floating_in(arguments.values())
    return [torch.full([1] * each.ndim, value) for each, value in zip(tensors, values, strict=True)]


@functools.cache
def placeholder(dimensions: int, requires_grad: bool) -> Tensor:
    """Returns a tensor with one element and no memory."""
    with disable_modes(), torch.inference_mode(False):
        return torch.empty([1] * dimensions, device="meta", requires_grad=requires_grad)


def _points(extremes: Extremes) -> list[float]:
    """Returns the smallest and the largest value, and zero if that lies between them."""
    low, high = extremes
    return sorted({low, high, 0.0} if low < 0 < high else {low, high})


def bits_in(tensors: Iterable[Tensor]) -> int:
    """Returns which non-finite values there are in any of these tensors."""
    found = 0
    for each in tensors:
        found |= bits_of(exact(each))
    return found


def _versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple([version_of(each) for each in tensors])
