"""Activations of bfloat16 tensors that are looked up: torch's own kernels are the oracle, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.compute.legalize import activations
from hmpx.number_formats import Bfloat16Kernels, bfloat16_kernels

BF16, FP32 = torch.bfloat16, torch.float32
ATEN = torch.ops.aten

#: Functions by the names under which programs find them, which are patched.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (lambda x: F.gelu(x), ATEN.gelu_backward),
    "gelu tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda gradient, x: ATEN.gelu_backward(gradient, x, approximate="tanh"),
    ),
    "silu": (lambda x: F.silu(x), ATEN.silu_backward),
    "mish": (lambda x: F.mish(x), ATEN.mish_backward),
}


@pytest.fixture(scope="module")
def compiled() -> Bfloat16Kernels:
    """Returns the kernels."""
    if (kernels := bfloat16_kernels()) is None:
        pytest.skip("hmpx was installed without a C compiler")
    return kernels


@pytest.fixture(autouse=True)
def every_call_is_looked_up(compiled: Bfloat16Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"_LEAST": 0, "_UNTIL": 0, "_WORTHWHILE": float("inf"), "_activations": {}}
    for name, value in limits.items():
        monkeypatch.setattr(activations, name, value)


def numbers() -> Tensor:
    """Returns all numbers of bfloat16."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)


def bits(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor, the same for all NaN."""
    return tensor.detach().masked_fill(tensor.isnan(), 0).view(torch.int16) + tensor.isnan()


def is_looked_up(result: Tensor) -> bool:
    return "LookedUp" in type(result.grad_fn).__name__


@pytest.mark.parametrize("kind", KINDS)
def test_every_number(kind: str) -> None:
    function, _ = KINDS[kind]
    x = numbers()
    expected = function(x)
    with hmpx.convert(), torch.no_grad():
        assert torch.equal(bits(function(x)), bits(expected))
        for (op, _), activation in activations._activations.items():
            assert kind.startswith(op)
            assert activation._tables is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, -(2.0**-20), 2.0**90])
def test_every_number_and_every_significand_of_a_gradient(kind: str, size: float) -> None:
    function, backward = KINDS[kind]
    x = numbers().requires_grad_()
    significands = (size * (1 + torch.arange(128) / 128)).to(BF16)
    with hmpx.convert():
        y = function(x)
        assert is_looked_up(y)
        for significand in significands:
            gradient = significand.expand(x.shape).contiguous()
            (found,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
            assert torch.equal(bits(found), bits(backward(gradient, x.detach())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_gradients_of_gradients(kind: str, is_checkpointed: bool) -> None:
    """Torch has formulas of its own for these: its kernels of SiLU's and Mish's gradients have no derivative."""
    x = torch.linspace(-8, 8, 1 << 12).to(BF16).requires_grad_()
    gradient = torch.ones_like(x, requires_grad=True)
    function, _ = KINDS[kind]

    def both() -> tuple[Tensor, ...]:
        y = checkpoint(function, x, use_reentrant=False) if is_checkpointed else function(x)
        (first,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return first, second, *torch.autograd.grad(second.sum(), [x, gradient])

    expected = both()
    with hmpx.convert():
        assert is_looked_up(function(x))
        for a, b in zip(both(), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_in_batches(kind: str) -> None:
    """Of what is vectorized, too."""
    x = torch.linspace(-3, 3, 32).to(BF16)
    function, _ = KINDS[kind]
    hessian = torch.autograd.functional.hessian
    expected = hessian(lambda x: function(x).sum(), x, vectorize=True)
    with hmpx.convert():
        found = hessian(lambda x: function(x).sum(), x, vectorize=True)
    assert torch.equal(found, expected)


def test_without_kernels_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "bfloat16_kernels", lambda: None)
    x = torch.ones(64, dtype=BF16, requires_grad=True)
    with hmpx.convert():
        assert not is_looked_up(F.gelu(x))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(64),
        torch.ones(64, dtype=torch.float16),
        torch.ones(63, dtype=BF16),  # torch computes the last few by other instructions
        torch.ones(64, 64, dtype=BF16).t()[::2],
    ],
    ids=["fp32", "fp16", "odd", "strided"],
)
def test_others_are_left_to_torch(x: Tensor) -> None:
    x = x.detach().requires_grad_()
    with hmpx.convert():
        assert not is_looked_up(F.gelu(x))


def test_writing_to_the_input_is_noticed() -> None:
    x = torch.ones(64, dtype=BF16, requires_grad=True)
    with hmpx.convert():
        inner = x * 1
        y = F.gelu(inner)
        assert is_looked_up(y)
        inner.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_is_kept_for_the_backward_is_the_input() -> None:
    x = torch.ones(64, dtype=BF16, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with hmpx.convert(), saved_tensors_hooks(pack, lambda tensor: tensor):
        y = F.gelu(x)
    assert is_looked_up(y)
    assert [(each.dtype, each.shape) for each in kept] == [(BF16, x.shape)]


def test_a_batch_of_gradients() -> None:
    x = torch.linspace(-3, 3, 64).to(BF16).requires_grad_()
    gradients = torch.randn(4, 64).to(BF16)
    (expected,) = torch.autograd.grad(F.gelu(x), x, gradients, is_grads_batched=True)
    with hmpx.convert():
        y = F.gelu(x)
        assert is_looked_up(y)
        (found,) = torch.autograd.grad(y, x, gradients, is_grads_batched=True)
    assert torch.equal(found, expected)


def test_compiled_code_has_torchs_op() -> None:
    x = torch.linspace(-3, 3, 64).to(BF16).requires_grad_()
    expected = F.gelu(x)
    with hmpx.convert():
        compiled = torch.compile(lambda x: F.gelu(x), backend="aot_eager", fullgraph=True)
        y = compiled(x)
    assert torch.equal(y, expected)


def test_an_op_of_the_low_list_is_cast_and_looked_up() -> None:
    x = torch.linspace(-3, 3, 64).requires_grad_()
    expected = F.gelu(x.to(BF16))
    policy = hmpx.Policy.from_ops(low=["gelu"])
    with hmpx.convert(policy=policy):
        y = F.gelu(x)
    assert is_looked_up(y)
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_never_and_other_devices_leave_torch_alone() -> None:
    before = F.gelu, torch._C._nn.silu
    with hmpx.convert(legalize="never"):
        assert (F.gelu, torch._C._nn.silu) == before
    with hmpx.convert(device_types={"cuda"}):
        assert (F.gelu, torch._C._nn.silu) == before
    with hmpx.convert():
        assert F.gelu is not before[0]
    assert (F.gelu, torch._C._nn.silu) == before
