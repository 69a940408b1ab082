"""Products summed up in fp32 by kernels that only CUDA has: a stand-in on the CPU shows their numerics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.compute import accumulation
from tests.values import normal

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Kernels:
    """Stands in for the kernels of CUDA, on the CPU; notes the dtype of each call."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def multiply(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.dtype is b.dtype and a.dtype in (BF16, FP16) and out_dtype is FP32
        self.dtypes.append(a.dtype)
        with hmpx.disable_casts():
            return a.float() @ b.float()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Has the CPU multiply as CUDA does."""
    found = Kernels()
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm.dtype", "bmm.dtype"):
        library.impl(name, found.multiply, "CPU")
    monkeypatch.setattr(accumulation, "has_kernel", lambda device, dtype: dtype in (BF16, FP16))
    yield found
    library._destroy()


tensor = functools.partial(normal, drawn_in=FP64)


#: Op, shapes of its inputs, and the call; each form that two matrices' product takes.
CASES: list[tuple[str, list[tuple[int, ...]], Callable[..., Tensor]]] = [
    ("mm", [(5, 7), (7, 3)], lambda a, b: torch.mm(a, b)),
    ("mm", [(5, 7), (7, 3)], lambda a, b: torch.mm(a, mat2=b)),
    ("bmm", [(2, 5, 7), (2, 7, 3)], lambda a, b: torch.bmm(a, b)),
    ("mv", [(5, 7), (7,)], lambda a, b: torch.mv(a, b)),
    ("dot", [(7,), (7,)], lambda a, b: torch.dot(a, b)),
    ("matmul", [(7,), (7,)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(5, 7), (7,)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(7,), (7, 3)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(2, 5, 7), (7, 3)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(2, 5, 7), (7,)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(7,), (2, 7, 3)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(4, 1, 5, 7), (2, 7, 3)], lambda a, b: a @ b),
    ("matmul", [(5, 7), (4, 2, 7, 3)], lambda a, b: a.matmul(b)),
    ("matmul", [(0, 7), (7, 3)], lambda a, b: torch.matmul(a, b)),
    ("matmul", [(2, 5, 0), (0, 3)], lambda a, b: torch.matmul(a, b)),
    ("linear", [(5, 7), (3, 7)], lambda *t: F.linear(*t)),
    ("linear", [(5, 7), (3, 7), (3,)], lambda *t: F.linear(*t)),
    ("linear", [(7,), (3, 7), (3,)], lambda *t: F.linear(*t)),
    ("linear", [(2, 4, 5, 7), (3, 7), (3,)], lambda x, w, b: F.linear(x, w, bias=b)),
    ("linear", [(2, 5, 7), (3, 7)], lambda x, w: F.linear(x, w, None)),
    ("addmm", [(3,), (5, 7), (7, 3)], lambda c, a, b: torch.addmm(c, a, b)),
    ("addmm", [(5, 1), (5, 7), (7, 3)], lambda c, a, b: torch.addmm(c, a, b)),
    ("addmm", [(5, 3), (5, 7), (7, 3)], lambda c, a, b: c.addmm(a, b)),
    ("baddbmm", [(2, 5, 3), (2, 5, 7), (2, 7, 3)], lambda c, a, b: torch.baddbmm(c, a, b)),
    ("baddbmm", [(1, 3), (2, 5, 7), (2, 7, 3)], lambda c, a, b: torch.baddbmm(c, a, b)),
]  # fmt: skip

#: Calls that these kernels do not compute.
OTHERS: list[tuple[str, list[tuple[int, ...]], Callable[..., Tensor]]] = [
    ("addmm", [(3,), (5, 7), (7, 3)], lambda c, a, b: torch.addmm(c, a, b, beta=0.5)),
    ("baddbmm", [(2, 5, 3), (2, 5, 7), (2, 7, 3)], lambda c, a, b: torch.baddbmm(c, a, b, alpha=2)),
    ("einsum", [(5, 7), (7, 3)], lambda a, b: torch.einsum("ij,jk", a, b)),
    ("linear", [(5, 7), (7,)], lambda *t: F.linear(*t)),
]


def outcome(
    call: Callable[..., Tensor], inputs: list[Tensor], cotangent_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Returns the result, its gradients, and gradients of these."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    result = call(*inputs)
    cotangent = tensor(*result.shape, dtype=result.dtype, seed=9).requires_grad_()
    gradients = torch.autograd.grad(result, inputs, cotangent, create_graph=True)
    total = sum(g.float().square().sum() for g in gradients)
    again = torch.autograd.grad(
        total, [*inputs, cotangent], allow_unused=True, materialize_grads=True
    )
    return [result.detach(), *[g.detach() for g in gradients], *again]


def by_casts(
    call: Callable[..., Tensor], dtype: torch.dtype, output: torch.dtype
) -> Callable[..., Tensor]:
    return lambda *inputs: call(*[t.to(dtype).float() for t in inputs]).to(output)


def words(op: str, output: torch.dtype | None) -> str:
    ending = "" if output is None else f" output={str(output)[6:]}"
    return f"{op} accumulate=float32{ending}"


@pytest.mark.parametrize("output", [None, FP16, FP32, FP64])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_results_and_gradients_are_those_of_casts(
    kernels: Kernels, dtype: torch.dtype, output: torch.dtype | None
) -> None:
    """To the second order. Sums may be in another order: the last bit of fp32, of the output at most."""
    faults, outcomes = [], []
    given = [[tensor(*shape, seed=i) for i, shape in enumerate(shapes)] for _, shapes, _ in CASES]
    for (_, _, call), inputs in zip(CASES, given, strict=True):
        outcomes.append(outcome(by_casts(call, dtype, output or dtype), inputs))
    lines = sorted({words(op, output) for op, *_ in CASES})
    policy = {"lists": "none", "low": lines, "low_precision_type": dtype}
    found = []
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        for (_, _, call), inputs in zip(CASES, given, strict=True):
            kernels.dtypes.clear()
            found.append((outcome(call, inputs), [*kernels.dtypes]))
    for (op, shapes, _), inputs, expected, (actual, dtypes) in zip(
        CASES, given, outcomes, found, strict=True
    ):
        # Forward, gradients of two inputs where the gradient that comes in is low, and so on.
        is_low = output in (None, dtype)
        if len(dtypes) < (3 if is_low else 1) or set(dtypes) != {dtype}:
            faults.append(f"{op} {shapes}: kernels of {dtypes}")
        ulp = 2.0 ** (-7 if dtype is BF16 else -10)
        for position, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            # Gradients of gradients are rounded before they are summed up.
            part = 0.01 if position <= len(inputs) else 1
            same_dtype = got.dtype is wanted.dtype and got.shape == wanted.shape
            scale = wanted.double().abs().max().item() if wanted.numel() else 0.0
            close = torch.allclose(got.double(), wanted.double(), rtol=ulp, atol=ulp * scale * part)
            if not same_dtype or not close:
                faults.append(f"{op} {shapes}: {got} instead of {wanted}")
        got, wanted = actual[0].double(), expected[0].double()
        # What sums in another order differ by: they are not rounded where the output is wide.
        scale = wanted.abs().max().item() if wanted.numel() else 0.0
        last_bits = 0.0 if output in (None, FP16) else 2.0**-22 * scale
        differing = int(((got - wanted).abs() > last_bits).sum())
        if differing > 1:
            faults.append(f"{op} {shapes}: {differing} elements differ")
    assert not faults, "\n".join(faults)


def test_other_calls_are_left_to_the_composition(kernels: Kernels) -> None:
    """With factors, and ops that are several products."""
    given = [[tensor(*shape, seed=i) for i, shape in enumerate(shapes)] for _, shapes, _ in OTHERS]
    calls = [call for *_, call in OTHERS]
    expected = [by_casts(f, BF16, BF16)(*inputs) for f, inputs in zip(calls, given, strict=True)]
    lines = sorted({words(op, None) for op, *_ in OTHERS})
    with hmpx.convert(policy={"lists": "none", "low": lines}, device_types={"cpu"}):
        actual = [f(*inputs) for f, inputs in zip(calls, given, strict=True)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert not kernels.dtypes


def test_what_autograd_keeps_is_low(kernels: Kernels) -> None:
    """Two matrices in low precision, nothing in fp32."""
    kept: list[torch.dtype] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each.dtype)
        return each

    layer, x = nn.Linear(7, 3), tensor(5, 7).requires_grad_()
    policy = {"lists": "none", "low": [words("linear", None)]}
    with (
        hmpx.convert(policy=policy, device_types={"cpu"}),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each),
    ):
        layer(x)
    assert kept == [BF16, BF16]
    assert kernels.dtypes == [BF16]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by vmap's import
def test_under_transforms_checkpoints_and_forward_mode(kernels: Kernels) -> None:
    """Each gives what casts give."""
    a, b = tensor(3, 5, 7), tensor(3, 7, 4, seed=1)
    by_hand = by_casts(lambda a, b: a @ b, BF16, BF16)

    def results(call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaf = a.detach().requires_grad_()
        checkpoint(call, leaf, b, use_reentrant=False).float().sum().backward()
        once = a.detach().requires_grad_()
        result = call(once, b)
        many = torch.eye(result.numel(), dtype=BF16).view(-1, *result.shape)[:4]
        (batched,) = torch.autograd.grad(result, once, many, is_grads_batched=True)
        with forward_ad.dual_level():
            dual = call(forward_ad.make_dual(a, b.mT[:, :1].expand_as(a)), b)
            tangent = forward_ad.unpack_dual(dual).tangent.clone()
        grad = torch.func.grad(lambda a, b: call(a, b).float().sum(), argnums=(0, 1))
        assert leaf.grad is not None
        return [leaf.grad, batched, tangent, torch.func.vmap(call)(a, b), *grad(a, b)]

    expected = results(by_hand)
    with hmpx.convert(
        policy={"lists": "none", "low": ["matmul accumulate=float32"]}, device_types={"cpu"}
    ):
        actual = results(lambda a, b: torch.matmul(a, b))
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-4)
    assert kernels.dtypes


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by inductor's import
@pytest.mark.parametrize("keeps_casts", [False, True])
def test_graphs_hold_the_kernels(kernels: Kernels, keeps_casts: bool) -> None:
    """Without a break, forward and backward; whole numbers are exact in any order."""
    torch._dynamo.reset()
    x, weight, bias = (
        tensor(*s, seed=i).mul(4).round() for i, s in enumerate([(2, 5, 7), (3, 7), (3,)])
    )
    policy = {"lists": "none", "low": ["linear accumulate=float32"]}

    def first_order(call: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
        result = call(*inputs)
        return [result, *torch.autograd.grad(result, inputs, torch.ones_like(result))]

    expected = first_order(by_casts(F.linear, BF16, BF16))
    setting = torch._inductor.config.patch(emulate_precision_casts=keeps_casts)
    with setting, hmpx.convert(policy=policy, device_types={"cpu"}):
        compiled = torch.compile(lambda *t: F.linear(*t), backend="aot_eager", fullgraph=True)
        actual = first_order(compiled)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert len(kernels.dtypes) == 3


def test_which_devices_have_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's, unless they lack the type or sum up in float16."""
    assert accumulation.has_kernel(torch.device("cuda", 0), BF16)
    assert accumulation.has_kernel(torch.device("cuda", 0), FP16)
    assert not accumulation.has_kernel(torch.device("cuda", 0), FP32)
    assert not accumulation.has_kernel(torch.device("cpu"), BF16)
    monkeypatch.setattr(hmpx.compute.capabilities, "reported", lambda device, dtype: dtype is FP16)
    assert not accumulation.has_kernel(torch.device("cuda", 0), BF16)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not accumulation.has_kernel(torch.device("cuda", 0), FP16)
