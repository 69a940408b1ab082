"""The native low-precision capability of a device, per kind of op: reported by torch, and measured.

A CPU without bfloat16 products computes them many times slower than fp32, and does not report it.
A device is named ``"cpu"`` or, since cards may differ, ``"cuda:1"``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import raised_here
from ..forks import in_own_thread, new_lock
from ..tensors import CAST, long_name
from ..torch_internals import run_when_traced
from ..torch_state import without_casts

LOGGER: Final = logging.getLogger("hmpx")

#: Read before anything is patched. Functions that these call are not cast either: casts are off
#: during a measurement.
_MM, _CONV2D, _LINEAR = torch.mm, torch.conv2d, torch.nn.functional.linear
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_LAYER_NORM, _GELU, _LSTM = torch.layer_norm, torch.nn.functional.gelu, torch.lstm
_LINSPACE, _ONES_LIKE, _VIEW, _ZEROS = torch.linspace, torch.ones_like, Tensor.view, torch.zeros

#: A native kernel is slow if it takes more than this many times as long as the same result via fp32.
SLOW: Final = 2.0

_THREAD_TIME_IS_FINE: Final = time.get_clock_info("thread_time").resolution < 1e-6

#: Products of up to this many multiplications take less time than casts. Fixed rather than measured, so
#: that results are the same in each process.
SMALL_PRODUCT: Final = 8192


@dataclass(frozen=True)
class Capability:
    """How one kind of op runs on one device in one dtype."""

    reported: bool | None  # what torch reports about the hardware; None if it reports nothing
    inference: float | None = None  # native forward's time by fp32's with casts; None: not measured
    training: float | None = None  # the same ratio for forward and backward together
    is_slow: bool = field(init=False)  # calls are legalized, in inference and in training

    def __post_init__(self) -> None:
        """Decides once for both, since a forward must not depend on whether gradients are recorded.

        The worse ratio decides, unless fp32 would slow the other one down by more.
        """
        least, most = sorted((self.inference or 0, self.training or 0))
        vars(self)["is_slow"] = most > SLOW and least * most > 1


#: While a measurement must not run.
UNMEASURED: Final = Capability(None)


class Capturing(Exception):  # noqa: N818  # not an error
    """A CUDA graph is being captured, which a measurement would disturb: retry afterwards."""


@functools.cache
def name_of(device: torch.device) -> str:
    """Returns the name of ``device`` here, with a number if devices of its type may differ."""
    device_type = device.type
    return f"cuda:{device.index}" if device_type == "cuda" else device_type


def is_reported_of_all(device_type: str, dtype: torch.dtype) -> bool:
    """Whether no device of this type is reported to lack ``dtype``, so one's speed represents all."""
    if device_type != "cuda":
        return True
    return all(
        reported(f"cuda:{index}", dtype) is not False for index in range(torch.cuda.device_count())
    )


def reported(device: str, dtype: torch.dtype) -> bool | None:
    """Returns whether torch reports that the hardware computes in ``dtype``; None if it reports nothing."""
    device_type, _, index = device.partition(":")
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
        if index and int(index) >= torch.cuda.device_count():
            return None  # a fake tensor's device
        get = torch.cuda.get_device_capability
        version = get(int(index)) if index else get()
        return version >= least
    return True  # accelerators are built for low precision


@functools.cache
def capability(kind: str, device: str, dtype: torch.dtype) -> Capability:
    """Returns the capability for ops of ``kind``, measured on first use, once per process.

    If the measurement fails, its ratios are None, and ops are left to torch. An accelerator that reports the
    dtype is trusted, since a measurement would start its context.

    Raises `Capturing` if a measurement is needed, but must not run now.
    """
    if device != "cpu" and reported(device, dtype) is not False:
        return Capability(reported(device, dtype))
    question = kind, device, dtype
    if hasattr(_here, "is_measuring"):
        raise Capturing
    with _lock:
        if question not in _known:
            is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if is_initialized and torch.cuda.is_current_stream_capturing():
                raise Capturing
            _known[question] = known = _measured_apart(*question)
            if known.is_slow:
                LOGGER.info(
                    "%s in %s on %s is legalized, in inference and in training: native kernels take %.1f and "
                    "%.1f times as long as fp32 with casts",
                    *(kind, long_name(dtype), device, known.inference, known.training),
                )
        return _known[question]


@run_when_traced
def known_capability(kind: str, device: torch.device, dtype: torch.dtype) -> Capability:
    """Returns the device's capability for ops of ``kind``; an empty one while a measurement must not run."""
    try:
        return capability(kind, name_of(device), dtype)
    except Capturing:
        return UNMEASURED


def forget() -> None:
    """Discards all measurements, so that they are repeated."""
    with _lock:
        _known.clear()
        capability.cache_clear()


_known: Final[dict[tuple[str, str, torch.dtype], Capability]] = {}
_here: Final = threading.local()  # .is_measuring
_lock: Final = new_lock()


def _measured_apart(kind: str, device: str, dtype: torch.dtype) -> Capability:
    """Measures in a separate thread, free of modes, transforms, autocast regions and hooks."""

    def run() -> Capability:
        _here.is_measuring = True
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # in this thread: with more, short times vary
        try:
            with without_casts(), _chosen(device):
                return _measured(kind, device, dtype)
        finally:
            torch.set_num_threads(threads)

    try:
        return in_own_thread(run, "hmpx-capability")
    except raised_here(Exception) as error:  # also: too many threads, or interpreter shutdown
        failure = error
    LOGGER.warning(
        "the speed of %s in %s on %s can't be measured, so torch's kernels compute it: %r",
        *(kind, long_name(dtype), device, failure),
    )
    with without_casts():
        return Capability(reported(device, dtype))


def _chosen(device: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which ``device`` is current; in a new thread, the first of its type is current."""
    _, _, index = device.partition(":")
    return torch.cuda.device(int(index)) if index else contextlib.nullcontext()


def _measured(kind: str, device: str, dtype: torch.dtype) -> Capability:
    """Measures the speed of ops of ``kind``; raises if the op also fails in fp32, or runs out of memory."""
    said = reported(device, dtype)
    function, shapes = _PROBES[kind]
    # Not random: torch's generator is the user's. Independent of the default dtype.
    low = [
        CAST[dtype](
            _VIEW(_LINSPACE(-1, 1, math.prod(shape), device=device, dtype=torch.float32), shape)
        )
        for shape in shapes
    ]

    def legalized(*tensors: Tensor) -> Tensor:
        return CAST[dtype](function(*map(CAST[torch.float32], tensors)))

    try:
        with torch.no_grad():
            forward = _least_times([lambda: function(*low), lambda: legalized(*low)], device)
        for tensor in low:
            tensor.requires_grad_()
        backward = _least_times([_backward(function, low), _backward(legalized, low)], device)
    except torch.OutOfMemoryError:  # unrelated to kernels
        raise
    except raised_here(RuntimeError):
        _backward(legalized, [tensor.requires_grad_() for tensor in low])()
        return Capability(said, float("inf"), float("inf"))  # there is no kernel
    native, by_fp32 = map(sum, zip(forward, backward, strict=True))
    return Capability(said, forward[0] / forward[1], native / by_fp32)


def _backward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Any]:
    """Returns a function that computes the gradients and can be called repeatedly."""
    # Recorded beforehand: recording is slower under modes of all threads, such as anomaly detection.
    result = function(*inputs)
    gradient = _ONES_LIKE(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _least_times(functions: list[Callable[[], Any]], device: str) -> list[float]:
    """Returns the shortest time of each function, called in turns; on a CPU the thread's processor time."""
    synchronize = getattr(torch.get_device_module(device), "synchronize", None)
    clock = time.thread_time if device == "cpu" and _THREAD_TIME_IS_FINE else time.perf_counter
    best = [float("inf")] * len(functions)
    for round_ in range(5):
        for position, function in enumerate(functions):
            start = clock()
            function()
            if synchronize is not None:
                synchronize()
            if round_:  # the first round warms up
                best[position] = min(best[position], clock() - start)
    return best


def _lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state = _ZEROS(1, x.shape[1], r.shape[1], dtype=x.dtype, device=x.device)
    result = _LSTM(x, [state, state], [w, r, b, c], True, 1, 0.0, True, False, False)
    output: Tensor = result[0]
    return output


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

#: Ops of these kinds are slow in low precision if the hardware lacks it, for any policy that casts
#: their inputs to it.
SLOW_KINDS: Final = PRODUCTS | {"attention", "rnn"}
