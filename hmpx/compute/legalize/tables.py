"""Functions of one bfloat16 number, and their derivatives, as tables: there are only 65,536 numbers.

A table holds what torch's own kernel gives for each number, so what is looked up has the same bits. Whether
that also holds for a derivative, which must be exact enough for every gradient that it is multiplied by, is
tried with each significand that a gradient may have. Independent of which calls look something up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...torch_state import without_casts

if TYPE_CHECKING:
    from ...number_formats import Bfloat16Kernels

_BF16, _F32, _BITS = torch.bfloat16, torch.float32, torch.int16
_NUMBERS: Final = 1 << 16

#: Significands of bfloat16, and how many are tried at once.
_SIGNIFICANDS: Final = 128
_AT_ONCE: Final = 16

#: What they are multiplied by, so that not even the smallest derivative makes a subnormal product.
_LARGE: Final = 2.0**64

#: Gradients beside them: other signs and sizes.
_OTHERS: Final = (-1.5, 0.0, -0.0, 2.0**-70 * 1.25, -(2.0**100), float("inf"), float("nan"))

#: A table must take at most this share of the kernel's time.
_WORTHWHILE: Final = 0.8

Forward = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Tables:
    """What is looked up for one function.

    Attributes:
        values: bfloat16: the function's values in the order of the numbers' bits; None if torch's kernel
            is as fast.
        derivatives: float32: what a gradient is multiplied by; None if torch's kernel is as fast, or
            computes in a way that no factor gives the same bits as.
        kernels: What looks up.
    """

    values: Tensor | None
    derivatives: Tensor | None
    kernels: Bfloat16Kernels


def made(forward: Forward, backward: Backward, kernels: Bfloat16Kernels) -> Tables:
    """Returns the tables of a function, on the CPU; takes some 50 ms.

    Args:
        forward: Its kernel for contiguous bfloat16 tensors.
        backward: That of its gradient, for gradients and arguments alike.
        kernels: What looks up.
    """
    with torch.no_grad(), torch.inference_mode(False), without_casts():
        bits = torch.arange(_NUMBERS, dtype=torch.int32, device="cpu").to(_BITS)
        many = bits.view(_BF16).expand(_AT_ONCE, _NUMBERS).contiguous()
        values, out = forward(many[0]), torch.empty_like(many)
        looked_up = _time(lambda: kernels.look_up(many, out, values))
        is_worthwhile = looked_up <= _WORTHWHILE * _time(lambda: forward(many))
        derivatives = _derivatives(many, backward, kernels)
    return Tables(values if is_worthwhile else None, derivatives, kernels)


def _derivatives(many: Tensor, backward: Backward, kernels: Bfloat16Kernels) -> Tensor | None:
    """Returns what gradients are multiplied by; None if that is slower, or gives other bits.

    Args:
        many: All numbers, `_AT_ONCE` times.
        backward: As for `made`.
        kernels: What looks up.
    """
    numbers, out = many[0], torch.empty_like(many)
    fractions = torch.arange(_SIGNIFICANDS, dtype=_F32, device="cpu") / _SIGNIFICANDS
    gradients = ((1 + fractions) * _LARGE).to(_BF16)[:, None]
    found = backward(torch.ones_like(numbers, dtype=_F32), numbers.to(_F32))
    part = gradients[:_AT_ONCE].expand_as(many).contiguous()
    looked_up = _time(lambda: kernels.scale(many, part, out, found))
    if looked_up > _WORTHWHILE * _time(lambda: backward(part, many)):
        return None

    def fits(source: Tensor, gradient: Tensor, derivatives: Tensor) -> Tensor:
        """Whether the kernel's results are those of the table, for each element of the last dimension."""
        by_table = kernels.scale(source, gradient, torch.empty_like(source), derivatives)
        return (_plain(by_table) == _plain(backward(gradient, source))).all(0)

    is_right = torch.ones_like(numbers, dtype=torch.bool)
    for first in range(0, _SIGNIFICANDS, _AT_ONCE):
        part = gradients[first : first + _AT_ONCE].expand_as(many).contiguous()
        is_right &= fits(many, part, found)
    wrong = (~is_right).nonzero()[:, 0]
    if len(wrong):
        few = numbers[wrong].expand(_SIGNIFICANDS, len(wrong)).contiguous()
        part = gradients.expand_as(few).contiguous()
        results = backward(part, few)
        for guess in (_between(gradients, results), results[0].to(_F32) / _LARGE):
            is_better = fits(few, part, found.index_copy(0, wrong, guess)) & ~is_right[wrong]
            found[wrong] = torch.where(is_better, guess, found[wrong])
            is_right[wrong] |= is_better
    others = torch.tensor(_OTHERS, dtype=_BF16, device="cpu")[:, None].expand(-1, _NUMBERS)
    source = numbers.expand_as(others).contiguous()
    is_right &= fits(source, others.contiguous(), found)
    return found if is_right.all() else None


def _between(gradients: Tensor, results: Tensor) -> Tensor:
    """Returns float32 numbers that, times the gradients, round to the results, if there are any.

    Args:
        gradients: bfloat16: [gradients, 1], positive.
        results: bfloat16: [gradients, numbers].
    """
    bits, exact, by = results.view(_BITS).int(), results.double(), gradients.double()
    away, back = (
        (exact + (bits + step).to(_BITS).view(_BF16).double()) / 2 / by for step in (1, -1)
    )
    low, high = torch.minimum(away, back).amax(0), torch.maximum(away, back).amin(0)
    return ((low + high) / 2).to(_F32)


def _plain(results: Tensor) -> Tensor:
    """Returns the bits of bfloat16 results, where all NaN have those that casts give them."""
    nan = torch.full((1,), float("nan"), dtype=_F32, device="cpu").to(_BF16).view(_BITS)
    return results.view(_BITS).masked_fill(results.isnan(), nan[0])


def _time(run: Callable[[], object]) -> float:
    """Returns the least processor time of a call."""
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best
