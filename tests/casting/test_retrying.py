"""Whose exception it is: only what torch's kernels refuse is tried again; all else passes untouched."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx

#: As torch's kernels say it.
TEXT = "\"addmm_impl_cpu_\" not implemented for 'BFloat16'"


class Raising:
    """Raises what it is given, once, and counts how often it is asked to."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def __call__(self, *args: object) -> None:
        self.asked += 1
        if self.asked == 1:
            raise self.error


def functions(error: BaseException) -> list[str]:
    """Returns the names of the functions that ``error`` came through."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@contextlib.contextmanager
def dispatch_mode(raising: Raising) -> Iterator[None]:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in str(func):
                raising()
            return func(*args, **(kwargs or {}))

    with Mode():
        yield


@contextlib.contextmanager
def function_mode(raising: Raising) -> Iterator[None]:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raising()
            return func(*args, **(kwargs or {}))

    with Mode():
        yield


@contextlib.contextmanager
def saving_hook(raising: Raising) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(raising, lambda tensor: tensor):
        yield


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("op", ["mm", "matrix_power"])
@pytest.mark.parametrize("error", [RuntimeError(TEXT), TimeoutError(), AssertionError("budget")])
@pytest.mark.parametrize("raised_by", [dispatch_mode, function_mode, saving_hook])
def test_what_others_raise_amid_a_call_passes(
    raised_by: Callable[[Raising], Any], error: Exception, op: str, verbose: bool
) -> None:
    """Whatever it says, and whether the op is in a list or merely lacks kernels: with its traceback, once."""
    raising = Raising(error.with_traceback(None))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "mm": lambda x: torch.mm(x, x),
        "matrix_power": lambda x: torch.linalg.matrix_power(x.bfloat16(), 2),
    }
    x = torch.rand(3, 3, requires_grad=True)
    options: dict[str, Any] = {"legalize": "never", "isVerbose": verbose}
    conversion = hmpx.convert(device_types={"cpu"}, **options)
    with conversion, raised_by(raising), pytest.raises(type(error)) as caught:
        calls[op](x)
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert raising.asked == 1
    assert any(name == "__call__" for name in functions(error))
    assert not any("in_fp32" in name for name in functions(error))


def checkpointed(note: Callable[[Tensor], Tensor]) -> None:
    """Non-reentrant checkpoints end each recomputation by an exception."""
    x = torch.randn(8, 16, requires_grad=True)
    for layer in [torch.nn.Linear(16, 16) for _ in range(4)]:
        x = checkpoint(lambda x, layer=layer: layer(note(torch.tanh(x))), x, use_reentrant=False)
    x.sum().backward()


def out_of_memory(note: Callable[[Tensor], Tensor]) -> None:
    raising = Raising(torch.OutOfMemoryError("out of memory"))
    with contextlib.suppress(torch.OutOfMemoryError), dispatch_mode(raising):
        torch.mm(note(torch.randn(8, 4)), note(torch.randn(4, 8)))
    raising.error = None  # type: ignore[assignment]  # and the frames that it came through


def refused_in_fp32_too(note: Callable[[Tensor], Tensor]) -> None:
    """As `pdist` of one dimension is, and a product of what doesn't match."""
    with contextlib.suppress(RuntimeError):
        torch.pdist(note(torch.rand(3)).bfloat16())
    with contextlib.suppress(RuntimeError):
        torch.mm(note(torch.rand(3, 3)), note(torch.rand(3, 3).double()))


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("step", [checkpointed, out_of_memory, refused_in_fp32_too])
def test_exceptions_that_are_caught_keep_no_tensor(
    step: Callable[[Callable[[Tensor], Tensor]], None], verbose: bool
) -> None:
    """No cycle of frame and exception waits for a collection of garbage."""
    made: list[weakref.ref[Tensor]] = []

    def note(tensor: Tensor) -> Tensor:
        made.append(weakref.ref(tensor))
        return tensor

    with hmpx.convert(device_types={"cpu"}, isVerbose=verbose):
        gc.collect()
        gc.disable()
        try:
            step(note)
            alive = [each for each in made if each() is not None]
        finally:
            gc.enable()
    assert made and not alive


def test_a_wrong_call_raises_torchs_error_once() -> None:
    """An error about shapes is not about dtypes."""
    raised = []
    for convert in (contextlib.nullcontext, lambda: hmpx.convert(device_types={"cpu"})):
        with convert(), pytest.raises(RuntimeError) as caught:
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        raised.append(caught.value)
    assert str(raised[0]) == str(raised[1])
    assert raised[1].__context__ is None
    assert not any("in_fp32" in name for name in functions(raised[1]))


# --- operators of torch.ops ----------------------------------------------------------------------

ATEN = torch.ops.aten
LOW, WIDE = torch.rand(4, 8).bfloat16(), torch.rand(8, 8)

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": ATEN.mm,
    "mm.default": ATEN.mm.default,
    "linear": ATEN.linear,
    "bmm": lambda low, wide: ATEN.bmm(low[None], wide[None]),
    "conv1d": lambda low, wide: ATEN.conv1d(low[None].mT, wide[..., None], None, [1], [1]),
    "attention": lambda low, wide: ATEN.scaled_dot_product_attention(
        low[None], wide[None], wide[None]
    ),
    "lerp": lambda low, wide: ATEN.lerp.Scalar(low, wide[:4], 0.5),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_refuse_mixed_dtypes_compute_in_fp32(name: str) -> None:
    """The result has the dtype of the first input, and gradients have those of the inputs."""
    call = OPERATORS[name]
    low, wide = LOW.clone().requires_grad_(), WIDE.clone().requires_grad_()
    with hmpx.convert(device_types={"cpu"}):
        result = call(low, wide)
        result.sum().backward()
    assert torch.equal(result, call(LOW.float(), WIDE).bfloat16())
    assert low.grad is not None
    assert wide.grad is not None
    assert (low.grad.dtype, wide.grad.dtype) == (torch.bfloat16, torch.float32)


def test_operators_write_to_their_targets() -> None:
    index, ones = torch.arange(4), torch.ones(4, 8)
    with hmpx.convert(device_types={"cpu"}):
        out = torch.zeros(4, 8)
        assert ATEN.mm.out(LOW, WIDE, out=out) is out
        wide, low = torch.zeros(4, 8), torch.zeros(4, 8).bfloat16()
        assert ATEN.index_add_(wide, 0, index, ones.bfloat16()) is wide
        assert ATEN.index_add_.default(low, 0, index, ones) is low
    torch.testing.assert_close(out, LOW.float() @ WIDE)
    assert torch.equal(wide, ones)
    assert torch.equal(low, ones.bfloat16())


@pytest.mark.parametrize(
    "around", [hmpx.disable_casts, lambda: dispatch_mode(Raising(RuntimeError(TEXT)))]
)
def test_operators_raise_where_nothing_is_cast_and_what_others_raise(around: Any) -> None:
    with hmpx.convert(device_types={"cpu"}), around(), pytest.raises(RuntimeError) as caught:
        ATEN.mm(LOW, WIDE)
    assert caught.value.__context__ is None
    assert not any("in_fp32" in name for name in functions(caught.value))
