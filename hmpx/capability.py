"""What a device does natively in low precision, op kind by op kind: as torch reports it, and measured.

A CPU without bfloat16 products computes them many times slower than fp32, and says nothing.
Knows neither policies nor wrappers.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .dtypes import CAST

#: Taken from torch before anything is patched.
_MM, _CONV2D, _LINEAR = torch.mm, torch.conv2d, torch.nn.functional.linear
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_LAYER_NORM, _GELU, _LSTM = torch.layer_norm, torch.nn.functional.gelu, torch._VF.lstm
_SUM = torch.sum

#: A native kernel that takes this many times as long as the same result by way of fp32 is slow.
#: The kinds are far from it on either side, so that noise does not decide.
SLOW: Final = 2.0

_THREAD_TIME_IS_FINE: Final = time.get_clock_info("thread_time").resolution < 1e-6

#: Products of up to so many multiplications take less time than the casts would. Not measured, so
#: that results are the same in each process.
SMALL_PRODUCT: Final = 8192


@dataclass(frozen=True, slots=True)
class Capability:
    """How one kind of op runs on one device type in one dtype.

    Attributes:
        reported: What torch says of the hardware; None if it says nothing.
        inference: Time of the native forward, over that of fp32 with casts; None if not measured.
        training: The same of forward and backward.
    """

    reported: bool | None
    inference: float | None = None
    training: float | None = None

    def is_slow(self, *, training: bool) -> bool:
        """Whether fp32 and casts are clearly faster than the native kernels."""
        ratio = self.training if training else self.inference
        return ratio is not None and ratio > SLOW


def reported(device_type: str, dtype: torch.dtype) -> bool | None:
    """Returns whether torch says that the hardware computes in ``dtype``; None if it doesn't say."""
    if device_type == "cpu":
        name = "bf16" if dtype is torch.bfloat16 else "fp16"
        probe = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        return None if probe is None else bool(probe())
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        if torch.version.hip is not None:
            return True
        least = (8, 0) if dtype is torch.bfloat16 else (5, 3)
        return torch.cuda.get_device_capability() >= least
    return True  # an accelerator is made for low precision


@functools.cache
def capability(kind: str, device_type: str, dtype: torch.dtype) -> Capability:
    """Returns what is known of ops of ``kind``; measures it at the first question.

    An accelerator that is said to have the dtype is taken at its word: measuring would start its
    context, and disturb a graph that is being captured.
    """
    if device_type != "cpu" and reported(device_type, dtype) is not False:
        return Capability(reported(device_type, dtype))
    found: list[Capability] = []

    def measure() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread: more of them make small times vary
        try:
            found.append(_measured(kind, device_type, dtype))
        finally:
            torch.set_num_threads(threads)

    # In a thread of its own there are no modes, transforms, autocast regions and hooks.
    thread = threading.Thread(target=measure, name="hmpx-capability")
    thread.start()
    thread.join()
    if not found:
        raise RuntimeError(
            f"measuring {kind} in {dtype} on {device_type} failed; see the log above"
        )
    return found[0]


def _measured(kind: str, device_type: str, dtype: torch.dtype) -> Capability:
    said = reported(device_type, dtype)
    function, shapes = _PROBES[kind]
    # Not random: torch's generator is the user's.
    low = [
        torch.linspace(-1, 1, _numel(shape), device=device_type).view(shape).to(dtype)
        for shape in shapes
    ]

    def legalized(*tensors: Tensor) -> Tensor:
        return CAST[dtype](function(*[tensor.float() for tensor in tensors]))

    try:
        with torch.no_grad():
            inference = _ratio(function, legalized, low, device_type)
        inputs = [tensor.requires_grad_() for tensor in low]
        training = _ratio(_with_backward(function), _with_backward(legalized), inputs, device_type)
    except RuntimeError:  # no kernel at all
        return Capability(said, float("inf"), float("inf"))
    return Capability(said, inference, training)


def _with_backward(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(*tensors: Tensor) -> None:
        result = function(*tensors)
        torch.autograd.grad(_SUM(result), tensors)

    return run


def _ratio(
    numerator: Callable[..., Any],
    denominator: Callable[..., Any],
    inputs: list[Tensor],
    device_type: str,
) -> float:
    """Returns the least time of a call of one, over that of the other, of calls that take turns.

    On a CPU it is this thread's time of the processor: waiting for one that others use is no part of
    it, and would decide where they are many.
    """
    synchronize = getattr(torch.get_device_module(device_type), "synchronize", None)
    clock = time.thread_time if device_type == "cpu" and _THREAD_TIME_IS_FINE else time.perf_counter
    best = [float("inf"), float("inf")]
    for round_ in range(5):
        for position, function in enumerate((numerator, denominator)):
            start = clock()
            function(*inputs)
            if synchronize is not None:
                synchronize()
            if round_:  # the first warms up
                best[position] = min(best[position], clock() - start)
    return best[0] / best[1]


def _lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state = torch.zeros(1, x.shape[1], r.shape[1], dtype=x.dtype, device=x.device)
    result = _LSTM(x, [state, state], [w, r, b, c], True, 1, 0.0, True, False, False)
    return result[0]


def _numel(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape)


_SIZE = 128

#: Kind -> a typical op, and the shapes of its inputs.
_PROBES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "gemm": (_MM, ((_SIZE, _SIZE), (_SIZE, _SIZE))),
    "gemv": (_LINEAR, ((2, 512), (512, 512))),
    "convolution": (
        lambda x, w: _CONV2D(x, w, None, 1, 1),
        ((2, 16, 24, 24), (16, 16, 3, 3)),
    ),
    "attention": (_ATTENTION, ((2, 4, 128, 32),) * 3),
    "rnn": (_lstm, ((16, 8, 32), (128, 32), (128, 32), (128,), (128,))),
    "norm": (lambda x, w, b: _LAYER_NORM(x, (256,), w, b), ((128, 256), (256,), (256,))),
    "elementwise": (_GELU, ((64, 512),)),
}

KINDS: Final = tuple(_PROBES)

#: Kinds of ops that multiply and add, mostly with weights.
PRODUCTS: Final = frozenset({"convolution", "gemm"})
