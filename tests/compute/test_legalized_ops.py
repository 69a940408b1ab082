"""Ops computed in fp32 and rounded: their numerics, what autograd keeps, and what they compose with."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Policy
from tests.casting.test_call_forms import FORMS, SPELLED, tensors
from tests.values import normal, same_or_nan

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = (BF16, FP16)

Function = Callable[..., Any]


def low(
    *names: str, legalize: str = "always", dtype: torch.dtype = BF16, verbose: bool | str = False
) -> hmpx.Session:
    policy = Policy.from_ops(low=names, low_precision_type=dtype)
    return hmpx.convert(policy=policy, legalize=legalize, isVerbose=verbose)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Returns how many numbers of their dtype lie from ``a`` to ``b``, element by element."""
    wide = a.dtype.itemsize == 4

    def ordered(tensor: Tensor) -> Tensor:
        bits = tensor.detach().contiguous().view(torch.int32 if wide else torch.int16).long()
        return torch.where(bits < 0, -(bits & (0x7FFFFFFF if wide else 0x7FFF)), bits)

    assert a.dtype is b.dtype
    return (ordered(a) - ordered(b)).abs()


# --- the ops, and what torch's own low-precision kernels make of them -----------------------------

EQUAL = "equal"  #: bit for bit but for some that the order of fp32 sums decides: see `are_equal`
NO_WORSE = "no worse"  #: torch's kernel rounds more often: not as near to float64 as the op in fp32

#: Least share of equal elements. fp32 sums in another order differ by some 2**-23 of them, half a
#: unit of bf16 is 2**-9 and one of fp16 2**-12: so about one in 2**14, or 2**11, is rounded the other
#: way; more where the sum is smaller than what it is made of.
LEAST_EQUAL = {BF16: 0.999, FP16: 0.998, FP32: 0.0}


@dataclass(frozen=True)
class Case:
    """One way to call an op.

    Attributes:
        op: Op name.
        function: Calls it on tensors of ``shapes``.
        shapes: Of its inputs.
        output: How the output compares with that of torch's low-precision kernel, and
        gradient: how the gradients do.
        parameters: Positions of a norm's weight and bias, which the cast leaves in fp32.
    """

    op: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    output: str = EQUAL
    gradient: str = EQUAL
    parameters: tuple[int, ...] = ()


def batch_norm(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if a.dtype is FP64:
        return F.batch_norm(a, None, None, w, b, training=True)
    return F.batch_norm(a, torch.zeros(16), torch.ones(16), w, b, training=True, momentum=0.1)


def batch_norm_in_evaluation(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
    dtype = FP64 if a.dtype is FP64 else FP32
    statistics = torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16)
    return F.batch_norm(a, *[each.to(dtype) for each in statistics], w, b)


def attention_with_a_float_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = normal(48, 48, dtype=BF16, seed=9).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask)


CAUSAL = torch.ones(48, 48, dtype=torch.bool).tril()
HEADS = ((4, 4, 48, 32),) * 3
IMAGES = ((8, 16, 13, 13), (16,), (16,))
ROWS = ((160, 128),)
ADDED = ((150, 140), (150, 64), (64, 140))
STACKS = ((4, 80, 70), (4, 80, 32), (4, 32, 70))

#: A name that begins with that of the op, or another one's as `OP_OF` says -> how it is called, and the shapes.
CALLS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda a, w, b: F.linear(a, w, b), ((160, 64), (136, 64), (136,))),
    "linear 3-D": (lambda a, w, b: F.linear(a, w, b), ((4, 40, 64), (136, 64), (136,))),
    "linear without bias": (lambda a, w: F.linear(a, w), ((160, 64), (136, 64))),
    "linear, transposed weight": (lambda a, w: F.linear(a, w.t()), ((160, 64), (64, 136))),
    "matmul 1-D 1-D": (lambda a, b: torch.matmul(a, b), ((20000,), (20000,))),
    "matmul 2-D 1-D": (lambda a, b: torch.matmul(a, b), ((20000, 8), (8,))),
    "matmul 1-D 2-D": (lambda a, b: torch.matmul(a, b), ((8,), (8, 20000))),
    "matmul 2-D": (lambda a, b: torch.matmul(a, b), ((150, 64), (64, 140))),
    "matmul 3-D": (lambda a, b: torch.matmul(a, b), ((4, 80, 32), (4, 32, 70))),
    "matmul 4-D broadcast": (lambda a, b: torch.matmul(a, b), ((2, 3, 60, 32), (3, 32, 60))),
    "matmul 3-D 2-D": (lambda a, b: a @ b, ((4, 40, 64), (64, 136))),
    "matmul transposed": (lambda a, b: a.t() @ b.t(), ((64, 150), (140, 64))),
    "matmul transposed 3-D": (lambda a, b: a @ b.transpose(-2, -1), ((4, 80, 32), (4, 70, 32))),
    "matmul permuted": (
        lambda a, b: a.permute(0, 2, 1, 3) @ b.permute(0, 2, 3, 1),
        ((2, 80, 3, 32), (2, 70, 3, 32)),
    ),
    "matmul sliced": (lambda a, b: a[:, ::2] @ b[1:, 3:], ((150, 64), (33, 143))),
    "mm": (lambda a, b: torch.mm(a, b), ((150, 64), (64, 140))),
    "bmm": (lambda a, b: torch.bmm(a, b), ((4, 80, 32), (4, 32, 70))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), ADDED),
    "addmm of a row": (lambda c, a, b: torch.addmm(c, a, b), ((140,), *ADDED[1:])),
    "addmm alpha, beta": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), ADDED),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), STACKS),
    "baddbmm alpha, beta": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), STACKS),
    "mv": (lambda a, b: torch.mv(a, b), ((20000, 8), (8,))),
    "dot": (lambda a, b: torch.dot(a, b), ((20000,), (20000,))),
    "conv1d": (lambda a, w, b: F.conv1d(a, w, b, padding=1), ((8, 8, 200), (16, 8, 3), (16,))),
    "conv2d": (
        lambda a, w, b: F.conv2d(a, w, b, padding=1),
        ((4, 8, 24, 24), (16, 8, 3, 3), (16,)),
    ),
    "conv2d strided, dilated, grouped": (
        lambda a, w: F.conv2d(a, w, stride=2, padding=2, dilation=2, groups=4),
        ((4, 16, 40, 40), (16, 4, 3, 3)),
    ),
    "conv2d depthwise": (
        lambda a, w, b: F.conv2d(a, w, b, padding=1, groups=16),
        ((4, 16, 24, 24), (16, 1, 3, 3), (16,)),
    ),
    "conv3d": (
        lambda a, w, b: F.conv3d(a, w, b, padding=1),
        ((2, 4, 10, 12, 12), (8, 4, 3, 3, 3), (8,)),
    ),
    "conv_transpose1d": (
        lambda a, w, b: F.conv_transpose1d(a, w, b, stride=2, padding=1),
        ((8, 8, 100), (8, 16, 4), (16,)),
    ),
    "conv_transpose2d": (
        lambda a, w, b: F.conv_transpose2d(a, w, b, stride=2, padding=1, output_padding=1),
        ((4, 8, 12, 12), (8, 16, 3, 3), (16,)),
    ),
    "conv_transpose2d grouped, dilated": (
        lambda a, w: F.conv_transpose2d(a, w, padding=1, groups=4, dilation=2),
        ((4, 8, 24, 24), (8, 4, 3, 3)),
    ),
    "conv_transpose3d": (
        lambda a, w, b: F.conv_transpose3d(a, w, b, padding=1),
        ((2, 8, 8, 12, 12), (8, 8, 3, 3, 3), (8,)),
    ),
    "layer_norm": (
        lambda a, w, b: F.layer_norm(a, (128,), w, b),
        ((160, 128), (128,), (128,)),
    ),
    "layer_norm without parameters": (lambda a: F.layer_norm(a, (128,)), ROWS),
    "batch_norm in training": (batch_norm, IMAGES),
    "batch_norm in evaluation": (batch_norm_in_evaluation, IMAGES),
    "group_norm": (lambda a, w, b: F.group_norm(a, 4, w, b), IMAGES),
    "instance_norm": (lambda a, w, b: F.instance_norm(a, weight=w, bias=b), IMAGES),
    "rms_norm": (lambda a, w: F.rms_norm(a, (128,), w), ((160, 128), (128,))),
    "relu": (lambda a: F.relu(a), ROWS),
    "gelu": (lambda a: F.gelu(a), ROWS),
    "gelu tanh": (lambda a: F.gelu(a, approximate="tanh"), ROWS),
    "silu": (lambda a: F.silu(a), ROWS),
    "tanh": (lambda a: torch.tanh(a), ROWS),
    "sigmoid": (lambda a: torch.sigmoid(a), ROWS),
    "leaky_relu": (lambda a: F.leaky_relu(a, 0.1), ROWS),
    "softplus": (lambda a: F.softplus(a), ROWS),
    "elu": (lambda a: F.elu(a), ROWS),
    "hardswish": (lambda a: F.hardswish(a), ROWS),
    "mish": (lambda a: F.mish(a), ROWS),
    "softmax": (lambda a: F.softmax(a, -1), ROWS),
    "log_softmax": (lambda a: F.log_softmax(a, -1), ROWS),
    "exp": (lambda a: torch.exp(a), ROWS),
    "mul": (lambda a, b: a * b, ((160, 128), (160, 128))),
    "mul broadcast": (lambda a, b: a * b, ((160, 128), (128,))),
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), HEADS),
    "sdpa causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        HEADS,
    ),
    "sdpa float mask": (attention_with_a_float_mask, HEADS),
    "sdpa bool mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, CAUSAL), HEADS),
}
OP_OF = {"sdpa": "scaled_dot_product_attention"}

#: Ops whose kernels round midway, in the forward too and in the backward alone.
ROUNDS_MIDWAY = {
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "instance_norm", "log_softmax"),
    "scaled_dot_product_attention",
}
GRADIENT_ROUNDS_MIDWAY = {
    *ROUNDS_MIDWAY,
    *("conv1d", "conv2d", "conv3d", "layer_norm", "batch_norm", "group_norm", "sigmoid"),
    *("matmul 4-D broadcast", "mul broadcast"),
}
NORMS_WITH_FP32_PARAMETERS = {"layer_norm", "batch_norm", "group_norm", "instance_norm"}


def case_of(name: str, function: Function, shapes: tuple[tuple[int, ...], ...]) -> Case:
    first = name.replace(",", "").partition(" ")[0]
    op = OP_OF.get(first, first)
    return Case(
        op,
        function,
        shapes,
        output=NO_WORSE if op in ROUNDS_MIDWAY else EQUAL,
        gradient=NO_WORSE if {op, name} & GRADIENT_ROUNDS_MIDWAY else EQUAL,
        parameters=tuple(range(1, len(shapes))) if op in NORMS_WITH_FP32_PARAMETERS else (),
    )


CASES = {name: case_of(name, *call) for name, call in CALLS.items()}


def results(
    function: Function, inputs: Sequence[Tensor], incoming: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Returns the output, and the gradients of ``inputs`` for the gradient ``incoming``."""
    with hmpx.disable_casts():  # lists may hold any op
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
    output = function(*leaves)
    with hmpx.disable_casts():
        incoming = normal(*output.shape, seed=99) if incoming is None else incoming
        incoming = incoming.to(output.dtype)
    found = torch.autograd.grad(output, leaves, incoming)
    return output.detach(), list(found)


def share_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Returns the share of elements that are equal bit for bit."""
    distances = torch.cat([ulp_distance(p, q).flatten() for p, q in zip(a, b, strict=True)])
    return float((distances == 0).double().mean())


def errors(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Returns how far each element is from the exact one: [n] float64."""
    pairs = zip(actual, exact, strict=True)
    return torch.cat([(a.double() - e.double()).abs().flatten() for a, e in pairs])


def are_equal(
    actual: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor] | None = None
) -> None:
    """Nearly all elements are equal, and the others neighbours, or as near to ``exact``."""
    dtype = actual[0].dtype
    if not any(a.numel() for a in actual):
        return
    assert share_equal(actual, expected) >= LEAST_EQUAL[dtype]
    scale = max(e.double().abs().max() for e in expected if e.numel())
    for a, e in zip(actual, expected, strict=True):
        is_apart = ulp_distance(a, e) > 1  # sums near zero
        apart = (a.double() - e.double()).abs()[is_apart]
        assert not apart.numel() or apart.max() <= scale * 2**-18
    if exact is not None:
        assert errors(actual, exact).mean() <= 1.001 * errors(expected, exact).mean()


def compared(
    case: Case, dtype: torch.dtype
) -> Iterator[tuple[str, str, list[Tensor], list[Tensor], list[Tensor]]]:
    """Yields what is compared, and how: legalized, native and exact tensors."""
    inputs = [
        normal(*shape, dtype=dtype, seed=i).to(FP32 if i in case.parameters else dtype)
        for i, shape in enumerate(case.shapes)
    ]
    shape = case.function(*inputs).shape
    incoming = normal(*shape, dtype=dtype, seed=99)
    native = results(case.function, inputs, incoming)
    exact = results(case.function, [t.double() for t in inputs], incoming)
    with low(case.op, dtype=dtype):
        legalized = results(case.function, inputs, incoming)
    for i, (actual, expected) in enumerate(zip(legalized[1], native[1], strict=True)):
        assert actual.dtype is expected.dtype is (FP32 if i in case.parameters else dtype)
    yield "output", case.output, [legalized[0]], [native[0]], [exact[0]]
    yield "gradient", case.gradient, legalized[1], native[1], exact[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_low_precision_kernels_or_is_more_accurate(name: str, dtype: torch.dtype) -> None:
    """In output and gradients: the same numbers, or nearer to float64 where torch rounds midway."""
    for what, criterion, legalized, native, exact in compared(CASES[name], dtype):
        if criterion == EQUAL:
            are_equal(legalized, native, exact)
        else:
            ours, theirs = errors(legalized, exact), errors(native, exact)
            # But for the order of fp32 sums.
            assert ours.mean() <= 1.001 * theirs.mean(), what
            assert ours.max() <= 1.001 * theirs.max(), what


@pytest.mark.parametrize("legalize", ["always", "never"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_kept_in_fp32(
    kind: Callable[..., nn.Module], dtype: torch.dtype, legalize: str
) -> None:
    """Small updates are not lost, nor variances above the largest number of fp16."""
    data = 2 * normal(16, 4, 12)
    module = kind(4, track_running_stats=True, momentum=0.002)
    expected = copy.deepcopy(module)
    for _ in range(50):
        expected(data)
    with hmpx.convert(device_types={"cpu"}, low_precision_type=dtype, legalize=legalize):
        for _ in range(50):
            module(data.to(dtype))
        torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-3)
        module.eval().running_var.fill_(90_000)
        given = (150 * data).to(dtype).requires_grad_()
        found = module(given)
        found.sum().backward()
    assert found.dtype is given.grad.dtype is dtype
    expected.eval().running_var.fill_(90_000)
    torch.testing.assert_close(found.float(), expected(150 * data), rtol=0.01, atol=0.01)


# --- where it rounds ------------------------------------------------------------------------------


def lstm(a: Tensor, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state = torch.zeros(1, a.shape[1], r.shape[1], dtype=a.dtype)
    return torch._VF.lstm(a, [state, state], [w, r, b, c], True, 1, 0.0, True, False, False)[0]


def gru(a: Tensor, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state = torch.zeros(1, a.shape[1], r.shape[1], dtype=a.dtype)
    return torch._VF.gru(a, state, [w, r, b, c], True, 1, 0.0, True, False, False)[0]


def attention(*tensors: Tensor) -> Tensor:
    q, k, v, w, b, o, p = tensors
    return F.multi_head_attention_forward(
        q, k, v, 16, 2, w, b, None, None, False, 0.0, o, p, need_weights=False
    )[0]


COMPOSED_CASES = {
    **CASES,
    "einsum": Case(
        "einsum",
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        ((3, 8, 9), (3, 9, 7)),
    ),
    "einsum of three": Case(
        "einsum", lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), ((8, 9), (9, 7), (7, 5))
    ),
    "tensordot": Case(
        "tensordot", lambda a, b: torch.tensordot(a, b, dims=2), ((6, 8, 9), (8, 9, 7))
    ),
    "lstm": Case("lstm", lstm, ((5, 4, 8), (24, 8), (24, 6), (24,), (24,))),
    "gru": Case("gru", gru, ((5, 4, 8), (18, 8), (18, 6), (18,), (18,))),
    "multi_head_attention_forward": Case(
        "multi_head_attention_forward",
        attention,
        (*((5, 3, 16),) * 3, (48, 16), (48,), (16, 16), (16,)),
    ),
}

#: Their inputs are laid out anew for fp32's product, which may add up in another order.
RELAID = {"matmul transposed 3-D", "matmul permuted"}


#: Autograd keeps the outputs of these as exact as fp32 is.
KEPT_WHOLE = {"lstm", "gru", "scaled_dot_product_attention"}


def composed(
    function: Function,
    dtype: torch.dtype,
    parameters: Sequence[int] = (),
    *,
    rounds_kept_output: bool = True,
) -> Function:
    """Returns ``function`` on inputs cast to ``dtype`` and back, its output cast too.

    With ``rounds_kept_output`` an output that autograd keeps is kept as it was rounded, as
    low-precision kernels do.
    """

    def composition(*tensors: Tensor) -> Tensor:
        wide: list[Tensor] = []

        def unpack(kept: Tensor) -> Tensor:
            is_output = rounds_kept_output and kept.data_ptr() == wide[0].data_ptr()
            return kept.to(dtype).float() if is_output else kept

        inputs = [t if i in parameters else t.to(dtype).float() for i, t in enumerate(tensors)]
        with saved_tensors_hooks(lambda t: t, unpack):
            wide.append(function(*inputs))
        return wide[0].to(dtype)

    return composition


def is_representable(tensor: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", COMPOSED_CASES)
def test_it_is_the_composition_of_casts(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, whether leaves are fp32 or low: each gradient is rounded, and has its leaf's dtype."""
    case = COMPOSED_CASES[name]
    for leaf_dtype in (FP32, dtype):
        inputs = [
            normal(*shape, seed=i).to(FP32 if i in case.parameters else leaf_dtype)
            for i, shape in enumerate(case.shapes)
        ]
        composition = composed(
            case.function,
            dtype,
            case.parameters,
            rounds_kept_output=case.op not in KEPT_WHOLE,
        )
        expected = results(composition, inputs)
        with low(case.op, dtype=dtype):
            actual = results(case.function, inputs)
        assert actual[0].dtype is dtype
        for i, gradient in enumerate(actual[1]):
            assert gradient.dtype is inputs[i].dtype
            assert i in case.parameters or is_representable(gradient, dtype)
        if name in RELAID:
            are_equal([actual[0]], [expected[0]])
            are_equal([t.to(dtype) for t in actual[1]], [t.to(dtype) for t in expected[1]])
        else:
            same_or_nan(actual, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPOSED_CASES)
def test_inference_gives_what_training_does(name: str) -> None:
    """The forward's numbers do not depend on whether a graph is recorded."""
    case = COMPOSED_CASES[name]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(case.shapes)]
    with low(case.op):
        expected = results(case.function, inputs)[0]
        with torch.no_grad():
            are_equal([case.function(*inputs)], [expected])
        with torch.inference_mode():
            are_equal([case.function(*inputs)], [expected])
        are_equal([case.function(*inputs)], [expected])  # nothing requires gradients


@pytest.mark.parametrize("legalize", ["always", "never"])
def test_memory_formats_are_those_of_torch(legalize: str) -> None:
    """A channels_last image gives a channels_last one, in inference and in training."""
    image = normal(2, 8, 9, 9).to(memory_format=torch.channels_last)
    weight = normal(8, 8, 3, 3)
    expected = F.conv2d(image.bfloat16(), weight.bfloat16()).stride()
    with low("conv2d", legalize=legalize):
        assert F.conv2d(image, weight).stride() == expected
        assert F.conv2d(image, weight.requires_grad_()).stride() == expected


VIEWS: dict[str, Function] = {
    "atleast_2d": lambda t: torch.atleast_2d(t),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, t[None])[0],
    "chunk": lambda t: torch.chunk(t, 2)[0],
    "flatten": lambda t: torch.flatten(t),
    "meshgrid": lambda t: torch.meshgrid(t, t, indexing="ij")[0],
    "squeeze": lambda t: torch.squeeze(t),
}


@pytest.mark.usefixtures("lacks_low_precision")
@pytest.mark.parametrize("legalize", ["auto", "always", "fast"])
@pytest.mark.parametrize("name", FORMS)
def test_however_a_call_gives_its_arguments(name: str, legalize: str) -> None:
    """By position or by name, the bits are the same."""
    op, forms = FORMS[name]
    with low(op, legalize=legalize):
        results = [form(SPELLED[op](), tensors(FP32)) for form in forms]
    for result in results:
        assert result.dtype is BF16
        assert torch.equal(result, results[0])


@pytest.mark.usefixtures("lacks_low_precision")
@pytest.mark.parametrize("legalize", ["auto", "always", "fast"])
def test_a_missing_input_fails_as_torch_has_it_fail(legalize: str) -> None:
    weight = torch.ones(2, 3, 4)
    with pytest.raises(TypeError) as expected:
        F.linear(weight=weight)  # type: ignore[call-arg]
    with low("linear", legalize=legalize), pytest.raises(TypeError) as actual:
        F.linear(weight=weight)  # type: ignore[call-arg]
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("legalize", ["always", "never"])
@pytest.mark.parametrize("op", VIEWS)
def test_views_of_low_precision_tensors_stay_views(op: str, legalize: str) -> None:
    """There is nothing to compute; a copy would lose what is written through it."""
    tensor = normal(4, dtype=BF16)
    with low(op, legalize=legalize):
        view = VIEWS[op](tensor)
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


# --- what is kept for the backward ----------------------------------------------------------------

STATISTICS = {  # op -> most fp32 elements kept beside the parameters
    "layer_norm": 2 * 160,
    "batch_norm": 2 * 16 + 2 * 16,
    "group_norm": 2 * 8 * 4,
    "instance_norm": 4 * 8 * 16,
    "rms_norm": 2 * 160 + 160 * 128,  # torch makes it of several ops, in fp32 natively too
    "scaled_dot_product_attention": 4 * 4 * 48 + 48 * 48,  # a boolean mask is made a float one
}


@contextlib.contextmanager
def seen_by_hooks() -> Iterator[list[Tensor]]:
    """Yields the list of tensors that outer hooks are given to keep."""
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def bytes_besides(parameters: Sequence[Tensor], kept: Sequence[Tensor]) -> int:
    """Returns the size of the storages of ``kept``, each once, without those of ``parameters``."""
    known = {t.untyped_storage().data_ptr() for t in parameters}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_in_low_precision(name: str) -> None:
    """Only parameters, and the statistics of norms and attention, are kept in fp32."""
    case = CASES[name]
    inputs: list[Tensor] = [
        (nn.Parameter if i else Tensor.requires_grad_)(normal(*shape, seed=i))
        for i, shape in enumerate(case.shapes)
    ]
    with low(case.op), seen_by_hooks() as kept:
        case.function(*inputs)
    parameters = {t.data_ptr() for t in inputs[1:]}
    others = [t for t in kept if t.dtype is FP32 and t.data_ptr() not in parameters]
    assert sum(t.numel() for t in others) <= STATISTICS.get(case.op, 0), [t.shape for t in others]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers)


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
    )


MODELS = {"mlp": (mlp, (512, 64)), "conv net": (conv_net, (4, 3, 32, 32))}


@pytest.mark.parametrize("legalize", ["auto", "always"])
@pytest.mark.parametrize("model", MODELS)
def test_activations_take_half_the_memory(model: str, legalize: str) -> None:
    """What is kept besides the parameters is at most 0.6 times what fp32 keeps."""
    factory, shape = MODELS[model]
    module = factory()
    with seen_by_hooks() as kept_fp32:
        module(normal(*shape))
    with hmpx.convert(legalize=legalize), seen_by_hooks() as kept:
        module(normal(*shape))
    parameters = list(module.parameters())
    assert bytes_besides(parameters, kept) <= 0.6 * bytes_besides(parameters, kept_fp32)


#: Ops whose backward formula reads the output and inputs, or what was made of these -> the function
#: and its inputs.
READ_TOGETHER: dict[str, tuple[str, Function, tuple[Tensor, ...]]] = {
    "maximum norm of differences": (
        "pairwise_distance",
        lambda a, b: F.pairwise_distance(a, b, p=math.inf),
        (normal(40, 50), normal(40, 50, seed=1)),
    ),
    "distances of pairs": ("pdist", lambda a: F.pdist(a, p=math.inf), (normal(30, 20),)),
    "distances": (
        "cdist",
        lambda a, b: torch.cdist(a, b, p=math.inf),
        (normal(30, 20), normal(25, 20, seed=1)),
    ),
    "least singular value": (
        "linalg_matrix_norm",
        lambda a: torch.linalg.matrix_norm(a, -2),
        (normal(2, 2),),
    ),
    "small differences": (
        "special_log_ndtr",
        lambda a: torch.special.log_ndtr(a),
        (torch.linspace(-12, 3, 100),),
    ),
    "power": ("pow", lambda a, b: torch.pow(a, b), (normal(20, 20).abs(), normal(20, 20, seed=1))),
    "product": ("prod", lambda a: torch.prod(a, -1), (normal(20, 9),)),
    "of views": (
        "linalg_tensorinv",
        lambda a: torch.linalg.tensorinv(a, ind=2),
        (torch.eye(24).reshape(4, 6, 8, 3) + 0.1 * normal(4, 6, 8, 3),),
    ),
    "of vectors": (
        "linalg_tensorsolve",
        lambda a, b: torch.linalg.tensorsolve(a, b),
        (torch.eye(24).reshape(6, 4, 2, 3, 4) + 0.1 * normal(6, 4, 2, 3, 4), normal(6, 4, seed=1)),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize("legalize", ["always", "auto", "fast"])
@pytest.mark.parametrize("is_rounded", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", READ_TOGETHER)
def test_an_output_is_not_rounded_where_the_formula_reads_others_too(
    name: str, is_rounded: bool, legalize: str
) -> None:
    """Equal elements stay equal, small differences stay; gradients are those of fp32, rounded."""
    op, function, inputs = READ_TOGETHER[name]
    if is_rounded or legalize != "fast":
        expected_of = [t.to(BF16).float() for t in inputs]
    else:
        expected_of = list(inputs)
    given = [t.to(BF16) for t in inputs] if is_rounded else list(inputs)
    incoming = normal(*function(*expected_of).shape, dtype=BF16, seed=99)
    expected = results(function, expected_of, incoming)[1]
    with low(op, legalize=legalize):
        actual = results(function, given, incoming)[1]
    for gradient, each in zip(actual, expected, strict=True):
        rounded = each.to(BF16).to(gradient.dtype)
        distance = (gradient.double() - rounded.double()).abs()
        assert bool((distance <= torch.finfo(BF16).eps * each.double().abs()).all())


@pytest.mark.parametrize("dtype", LOW)
def test_attention_keeps_what_rounding_takes_from_its_output(dtype: torch.dtype) -> None:
    """The difference of two sums, one over the output: equal attention has no gradient at all."""
    query, key = normal(1, 1, 64, 32, dtype=dtype), normal(1, 1, 64, 32, dtype=dtype, seed=1)
    value = normal(1, 1, 1, 32, dtype=dtype, seed=2).expand(1, 1, 64, 32)
    incoming = normal(1, 1, 64, 32, dtype=dtype, seed=3)
    attend = CASES["sdpa"].function
    with low("scaled_dot_product_attention", dtype=dtype):
        _, (of_query, of_key, _) = results(attend, [query, key, value * 1.01], incoming)
    assert of_query.abs().max() < 2**-14
    assert of_key.abs().max() < 2**-12


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize(
    "name", ["linear", "matmul permuted", "conv2d", "layer_norm", "tanh", "softmax", "sdpa", "mul"]
)
def test_what_is_kept_is_freed_without_garbage_collection(name: str, has_backward: bool) -> None:
    """By the backward, or with the output: nothing refers to itself."""
    case = CASES[name]
    with low(case.op), no_collection():
        leaves = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(case.shapes)]
        inputs = [leaf.bfloat16() for leaf in leaves]
        storages = [torch._C.StorageBase._weak_ref(t.untyped_storage()) for t in inputs]
        output = case.function(*inputs)
        storages.append(torch._C.StorageBase._weak_ref(output.untyped_storage()))
        node = weakref.ref(output)
        del inputs
        if has_backward:
            output.float().sum().backward()
        del output
        expired = [torch.UntypedStorage._expired(reference) for reference in storages]
    assert node() is None
    assert all(expired)
    for reference in storages:
        torch.UntypedStorage._free_weak_ref(reference)


# --- writing in between ---------------------------------------------------------------------------

MODIFIED: dict[str, tuple[tuple[str, ...], Function, str]] = {
    "low-precision input of mm": (("mm",), lambda a, w: torch.mm(a, w), "input"),
    "low-precision view": (("matmul",), lambda a, w: a.t() @ w, "input"),
    "low-precision input of conv": (
        ("conv1d",),
        lambda a, w: F.conv1d(a[None], w[:, :, None]),
        "input",
    ),
    "fp32 parameter of linear": (("linear",), lambda a, w: F.linear(a, w), "parameter"),
    "fp32 parameter of a norm": (
        ("layer_norm",),
        lambda a, w: F.layer_norm(a, w.shape, w),
        "parameter",
    ),
    "output of tanh": (("tanh",), lambda a, w: torch.tanh(a), "output"),
    "output of softmax": (("softmax",), lambda a, w: F.softmax(a, -1), "output"),
    "output of sdpa": (
        ("scaled_dot_product_attention",),
        lambda a, w: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]),
        "output",
    ),
}


@pytest.mark.parametrize("name", MODIFIED)
def test_writing_to_what_is_kept_is_an_error(name: str) -> None:
    """With torch's own words, in the backward; nothing is computed from what was written meanwhile."""
    ops, function, written = MODIFIED[name]
    leaf = normal(8, 8).requires_grad_()
    weight = nn.Parameter(normal(8, 8, seed=1))
    with low(*ops):
        low_input = leaf.bfloat16()
        output = function(low_input, weight)
        target = {"input": low_input, "parameter": weight, "output": output}[written]
        with torch.no_grad():
            target.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


# --- what it composes with ------------------------------------------------------------------------


#: torch does, the first time that it needs some derivative.
scripts_decompositions = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


def net(a: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(F.linear(a, w)) @ v


NET_OPS = ("linear", "tanh", "matmul")


def net_inputs(dtype: torch.dtype = FP32) -> list[Tensor]:
    return [
        normal(6, 16, seed=0).to(dtype),
        normal(12, 16, seed=1).to(dtype),
        normal(12, 5, seed=2).to(dtype),
    ]


def composed_net(a: Tensor, w: Tensor, v: Tensor) -> Tensor:
    linear = composed(lambda p, q: F.linear(p, q), BF16)
    matmul = composed(lambda p, q: p @ q, BF16)
    return matmul(composed(lambda p: torch.tanh(p), BF16)(linear(a, w)), v)


def plainly_composed_net(a: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """As `composed_net`, without hooks, for what does not take them."""
    h = F.linear(a.bfloat16().float(), w.bfloat16().float()).bfloat16().float()
    return (torch.tanh(h).bfloat16().float() @ v.bfloat16().float()).bfloat16()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_save_on_cpu(dtype: torch.dtype) -> None:
    """It changes nothing."""
    expected = results(composed_net, net_inputs(dtype))
    with low(*NET_OPS), save_on_cpu():
        same_or_nan(results(net, net_inputs(dtype)), expected)


def test_disabled_hooks() -> None:
    """Where hooks are forbidden, ops are computed all the same, as their plain composition."""
    expected = results(plainly_composed_net, net_inputs())
    with low(*NET_OPS), disable_saved_tensors_hooks("none here"):
        actual = results(net, net_inputs())
    same_or_nan(actual, expected)


@pytest.mark.parametrize("name", ["linear", "conv2d", "tanh", "softmax", "sdpa", "layer_norm"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(name: str, use_reentrant: bool) -> None:
    """Gradients are those without, and the forward keeps nothing but its inputs."""
    case = CASES[name]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(case.shapes)]
    with low(case.op):
        expected = results(case.function, inputs)

        def function(*tensors: Tensor) -> Tensor:
            return checkpoint(case.function, *tensors, use_reentrant=use_reentrant)

        leaves = [t.clone().requires_grad_() for t in inputs]
        with seen_by_hooks() as kept:
            output = function(*leaves)
        known = {t.data_ptr() for t in leaves}
        assert {t.data_ptr() for t in kept} <= known
        output.backward(normal(*output.shape, seed=99).to(output.dtype))
    same_or_nan((output.detach(), [t.grad for t in leaves]), expected)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_double_backward(dtype: torch.dtype) -> None:
    """Second-order gradients are those of the composition."""

    def second(function: Function) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in net_inputs(dtype)]
        loss = function(*leaves).float().pow(2).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum(g.float().pow(2).sum() for g in first)
        return [*first, *torch.autograd.grad(penalty, leaves)]

    linear = composed(lambda p, q: F.linear(p, q), BF16)
    matmul = composed(lambda p, q: p @ q, BF16)
    expected = second(lambda a, w, v: matmul(linear(a, w), v))
    with low("linear", "matmul"):
        actual = second(lambda a, w, v: F.linear(a, w) @ v)
    same_or_nan(actual, expected)


@pytest.mark.parametrize("name", ["tanh", "softmax", "layer_norm", "silu", "gelu", "exp"])
def test_second_order_gradients_are_near_to_exact_ones(name: str) -> None:
    """Of ops that keep their output too."""
    case = CASES[name]
    inputs = [normal(*shape, dtype=BF16, seed=i) for i, shape in enumerate(case.shapes)]

    def second(tensors: Sequence[Tensor]) -> Tensor:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        output = case.function(*leaves)
        first = torch.autograd.grad(
            output, leaves[0], normal(*output.shape, seed=9).to(output.dtype), create_graph=True
        )[0]
        return torch.autograd.grad(first.float().pow(2).sum(), leaves[0])[0]

    exact = second([t.double() for t in inputs])
    with low(case.op):
        actual = second(inputs)
    assert actual.dtype is BF16
    # Each of the two backwards rounds: some units in the last place of the greatest element.
    assert (actual.double() - exact).abs().max() <= 8 * torch.finfo(BF16).eps * exact.abs().max()


@scripts_decompositions
def test_func_transforms() -> None:
    """torch.func's grad, vmap, jvp and their mixtures give what they give of the composition."""
    a, w, v = net_inputs()
    batch = normal(3, 6, 16, seed=5)

    def loss_of(function: Function) -> Function:
        return lambda a, w, v: function(a, w, v).float().pow(2).sum()

    def transformed(function: Function) -> list[Any]:
        return [
            grad(loss_of(function), argnums=(0, 1, 2))(a, w, v),
            vmap(function, in_dims=(0, None, None))(batch, w, v),
            vmap(grad(loss_of(function), argnums=(0, 1)), in_dims=(0, None, None))(batch, w, v),
            jvp(function, (a, w, v), (a, w, v)),
            grad(lambda a: grad(loss_of(function))(a, w, v).pow(2).sum())(a),
        ]

    expected = transformed(plainly_composed_net)
    with low(*NET_OPS):
        actual = transformed(net)
    same_or_nan(actual, expected)


@scripts_decompositions
@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("form", ["linear", "mm", "addmm", "mul"])
def test_forward_mode_differentiation(form: str, requires_grad: bool, which: str) -> None:
    """Dual tensors outside of torch.func, small and as large as products by blocks take."""
    function = {
        "linear": lambda a, w: F.linear(a, w),
        "mm": lambda a, w: torch.mm(a, w),
        "addmm": lambda a, w: torch.addmm(a, a, w),
        "mul": lambda a, w: a * w[: a.shape[0]],
    }[form]
    a, w = normal(4, 256, dtype=BF16), normal(256, 256, dtype=BF16, seed=1)
    tangents = (normal(4, 256, dtype=BF16, seed=2), None)
    if which == "weight":
        tangents = (None, normal(256, 256, dtype=BF16, seed=2))
    values = (a, w)

    def tangent(call: Function) -> Tensor:
        with fwAD.dual_level():
            duals = [
                value.detach().clone().requires_grad_(requires_grad)
                if t is None
                else fwAD.make_dual(value.detach().clone().requires_grad_(requires_grad), t)
                for value, t in zip(values, tangents, strict=True)
            ]
            return fwAD.unpack_dual(call(*duals)).tangent.detach()

    expected = tangent(lambda a, w: function(a.float(), w.float()).bfloat16())
    with low("linear", "mm", "addmm", "mul"):
        actual = tangent(function)
    are_equal([actual], [expected])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced rows", "sliced columns"])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 300, 600])
def test_products_by_blocks(rows: int, layout: str, dtype: torch.dtype) -> None:
    """In inference: any number of rows, weights as they lie, every op that multiplies by weights."""
    n, k = 160, 128
    weight = {
        "plain": lambda: normal(n, k, seed=1),
        "transposed": lambda: normal(k, n, seed=1).t(),
        "sliced rows": lambda: normal(2 * n, k, seed=1)[::2],
        "sliced columns": lambda: normal(n, 2 * k + 1, seed=1)[:, 1::2],
    }[layout]()
    bias, data = normal(n, seed=2), normal(rows, k)
    calls: dict[str, Function] = {
        "linear": lambda a, w, b: F.linear(a, w),
        "linear with bias": lambda a, w, b: F.linear(a, w, b),
        "linear 3-D": lambda a, w, b: F.linear(a[None], w, b),
        "linear, odd rows": lambda a, w, b: F.linear(a.t().contiguous().t(), w, b),
        "matmul": lambda a, w, b: torch.matmul(a, w.t()),
        "matmul 4-D": lambda a, w, b: a[None, None] @ w.t(),
        "mm": lambda a, w, b: torch.mm(a, w.t()),
        "addmm": lambda a, w, b: torch.addmm(b, a, w.t()),
        "addmm of one": lambda a, w, b: torch.addmm(b[:1], a, w.t()),
        "addmm, beta": lambda a, w, b: torch.addmm(b, a, w.t(), beta=0.5),
    }
    actual, expected = [], []
    with torch.no_grad():
        for call in calls.values():
            wide = [t.to(dtype).float() for t in (data, weight, bias)]
            expected.append(call(*wide).to(dtype))
        with low("linear", "matmul", "mm", "addmm", dtype=dtype):
            actual = [call(data, weight, bias) for call in calls.values()]
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype, a.is_contiguous()) == (e.shape, dtype, True)
    doubles = [t.to(dtype).double() for t in (data, weight, bias)]
    for call, a in zip(calls.values(), actual, strict=True):
        exact, magnitude = call(*doubles), call(*[t.abs() for t in doubles])
        # The bound on the error of sums of k + 1 products in fp32, whatever their order.
        bound = (k + 1) * 2.0**-24 * magnitude
        error = (a.double() - exact).abs()
        assert (error <= half_ulp(exact.abs() + bound, dtype) + bound).all()


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns half the distance of the numbers of ``dtype`` at positive ``values``: [...] float64."""
    exponents = torch.frexp(values).exponent - 1
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps / 2), exponents)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_several_blocks(rows: int, is_transposed: bool) -> None:
    """With more weights than a block holds, and a last block that is not full."""
    n, k = 2500, 1024
    assert n * k * 4 > 8 << 20
    weight = (normal(k, n, seed=1).t() if is_transposed else normal(n, k, seed=1)).bfloat16()
    data, bias = normal(rows, k, dtype=BF16), normal(n, dtype=BF16, seed=2)
    expected = F.linear(data.float(), weight.float(), bias.float()).bfloat16()
    with low("linear", "mm"), torch.inference_mode():
        are_equal([F.linear(data, weight, bias)], [expected])
        product = torch.mm(data, weight.t())
    are_equal([product], [(data.float() @ weight.float().t()).bfloat16()])


@pytest.mark.parametrize(
    "shapes", [((0, 200), (200, 200)), ((4, 0), (200, 0)), ((4, 200), (0, 200)), ((1, 1), (1, 1))]
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_empty_tensors(
    shapes: tuple[tuple[int, int], tuple[int, int]], requires_grad: bool
) -> None:
    """No rows, no features, no outputs."""
    a, w = [normal(*shape).requires_grad_(requires_grad) for shape in shapes]
    with low("linear", "matmul", "tanh"):
        outputs = [F.linear(a, w), a @ w.t(), torch.tanh(a)]
        if requires_grad:
            sum(output.float().sum() for output in outputs).backward()
    expected = [(a.bfloat16().float() @ w.t().bfloat16().float()).bfloat16()] * 2
    same_or_nan([o.detach() for o in outputs[:2]], [e.detach() for e in expected])
    assert outputs[2].shape == a.shape
    assert not requires_grad or a.grad.shape == a.shape


@pytest.mark.parametrize("legalize", ["always", "fast"])
@pytest.mark.parametrize("dtype", [FP64, torch.complex64, torch.int64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype, legalize: str) -> None:
    """float64, complex, integers, also beside fp32."""
    a = (normal(4, 4) * 9).to(dtype)
    expected = a @ a, a * a
    with low("matmul", "mul", legalize=legalize):
        same_or_nan((a @ a, a * a), expected)
        if dtype is not torch.int64:
            assert (a * normal(4, 4)).dtype is dtype


@pytest.mark.parametrize("legalize", ["always", "fast"])
def test_written_tensors_and_asked_dtypes(legalize: str) -> None:
    """``out=``, in-place calls and ``dtype=`` do what they do without."""
    a, b = normal(4, 4), normal(4, 4, dtype=BF16, seed=1)
    low_a = a.bfloat16()

    def calls() -> list[Tensor]:
        buffer, wide = torch.empty(4, 4, dtype=BF16), torch.empty(4, 4)
        given = [
            torch.mm(low_a, b, out=buffer).clone(),
            torch.mm(a, b, out=wide).clone(),
            a.clone().mul_(b),
            low_a.clone().mul_(b),
            F.relu(low_a.clone(), inplace=True),
            low_a.clone().tanh_(),
            a.clone().addmm_(b, b),
            F.softmax(b, -1, dtype=FP32),
            torch.softmax(b, -1, FP64),
            torch.sum(b, 0, dtype=FP32),
        ]
        assert given[0].dtype is BF16
        return given

    ops = ("mm", "mul", "relu", "tanh", "addmm", "softmax", "sum")
    with low(*ops, legalize="never"):
        expected = calls()
    with low(*ops, legalize=legalize):
        same_or_nan(calls(), expected)


class Tagged(Tensor):
    """A subclass as users make them."""


def test_subclasses() -> None:
    """The result is of the subclass, and that of the composition; gradients flow."""
    expected = results(plainly_composed_net, net_inputs())
    a, w, v = net_inputs()
    leaf = a.clone().requires_grad_()
    w, v = w.requires_grad_(), v.requires_grad_()
    with low(*NET_OPS):
        output = net(leaf.as_subclass(Tagged), w, v)
        assert type(output) is Tagged
        found = torch.autograd.grad(output, [leaf, w, v], normal(6, 5, seed=99).bfloat16())
    assert output.dtype is BF16
    same_or_nan(output.detach().as_subclass(Tensor), expected[0])
    for actual, gradient in zip(found, expected[1], strict=True):
        are_equal([actual.as_subclass(Tensor).bfloat16()], [gradient.bfloat16()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout, is_parameter: bool) -> None:
    """Each part is computed as if it were alone."""
    parts, weight = [normal(3, 16), normal(5, 16, seed=1)], normal(8, 16, seed=2)
    weight = torch.nn.Parameter(weight) if is_parameter else weight
    function = composed(lambda a, w: F.linear(a, w), BF16)
    expected = torch.cat([function(part, weight) for part in parts])
    with low("linear"):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        output = F.linear(nested, weight)
    assert output.dtype is BF16
    same_or_nan(torch.cat(list(output.unbind())), expected)


def test_nothing_is_legalized_where_casts_are_off() -> None:
    """Low-precision inputs go to torch's own kernel, whose rounding shows."""
    case = CASES["conv_transpose2d"]
    inputs = [normal(*shape, dtype=BF16, seed=i) for i, shape in enumerate(case.shapes)]
    native = case.function(*inputs)
    with low(case.op):
        assert not torch.equal(case.function(*inputs), native)
        with hmpx.disable_casts():
            same_or_nan(case.function(*inputs), native)


def test_in_an_autocast_region() -> None:
    """The lists win there, and ops are computed as outside."""
    expected = results(composed_net, net_inputs())
    with low(*NET_OPS), torch.autocast("cpu", dtype=BF16):
        same_or_nan(results(net, net_inputs()), expected)


@pytest.mark.parametrize("legalize", ["always", "fast", "never"])
@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_tensors_of_other_devices_are_left_alone(legalize: str) -> None:
    """Where casts are for another device type, fp32 stays fp32, bit for bit."""
    a, w = normal(64, 64), normal(64, 64, seed=1)
    expected = F.linear(a, w), a @ w, results(lambda a, w: a @ w, [a, w])
    policy = Policy.from_ops(low=["linear", "matmul"])
    with hmpx.convert(policy=policy, legalize=legalize, device_types={"cuda"}):
        same_or_nan((F.linear(a, w), a @ w, results(lambda a, w: a @ w, [a, w])), expected)


# --- lists that hold anything ---------------------------------------------------------------------

INNER = (
    *("t", "transpose", "add", "sub", "where", "isnan", "gt", "equal", "mm", "matmul", "narrow"),
    *("reshape", "unsqueeze", "clone", "detach", "as_strided", "clamp", "bitwise_and", "linear"),
    *("empty_like", "copysign", "mul"),
)


def known(names: Sequence[str]) -> list[str]:
    return [name for name in names if hmpx.ops.resolve(name) is not None]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("names", [("*",), INNER], ids=["*", "by name"])
def test_lists_may_hold_the_ops_that_legalize(names: Sequence[str], dtype: torch.dtype) -> None:
    """With every op low: products are those of fp32, in training and by blocks."""
    inputs = [normal(7, 200), normal(160, 200, seed=1), normal(160, seed=2)]
    expected = results(composed(lambda a, w, b: F.linear(a, w, b), dtype), inputs)
    several = [normal(2, 3, 40, 16), normal(2, 50, 3, 16, seed=1)]
    relaid = composed(lambda a, b: a @ b.permute(0, 2, 3, 1), dtype)
    expected_relaid = results(relaid, several)
    with low(*(names if names == ("*",) else known(names)), dtype=dtype):
        same_or_nan(results(lambda a, w, b: F.linear(a, w, b), inputs), expected)
        with torch.no_grad():
            are_equal([F.linear(*inputs)], [expected[0]])
        actual = results(lambda a, b: a @ b.permute(0, 2, 3, 1), several)
    are_equal([actual[0]], [expected_relaid[0]])
    are_equal([g.to(dtype) for g in actual[1]], [g.to(dtype) for g in expected_relaid[1]])


# --- torch.compile --------------------------------------------------------------------------------


compiles = pytest.mark.usefixtures("fresh_dynamo")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def chain(a: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
    h = F.linear(a, w)  # as a function
    h = h.matmul(v)  # as a method
    return h @ u  # as an operator


def chain_inputs() -> list[Tensor]:
    return [normal(9, 16), normal(12, 16, seed=1), normal(12, 8, seed=2), normal(8, 5, seed=3)]


@compiles
@quiet
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("keeps_casts", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_rounding_is_that_of_eager(
    backend: str, keeps_casts: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, in outputs and gradients: where inductor leaves out casts, not the rounding."""
    plain = results(chain, chain_inputs())
    setting = torch._inductor.config.patch(emulate_precision_casts=keeps_casts)
    with setting, low("linear", "matmul", dtype=dtype):
        expected = results(chain, chain_inputs())
        actual = results(torch.compile(chain, backend=backend, fullgraph=True), chain_inputs())
    same_or_nan(actual, expected)
    assert not torch.equal(actual[0], plain[0].to(dtype))  # which rounds but once


@compiles
@quiet
def test_dynamic_sizes_do_not_recompile() -> None:
    """One graph for every number of rows, with and without gradients."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chain, backend=counter, fullgraph=True, dynamic=True)
    _, *weights = chain_inputs()
    weights = [w.requires_grad_() for w in weights]
    with low("linear", "matmul"):
        for rows in range(2, 10):
            same_or_nan(compiled(normal(rows, 16), *weights), chain(normal(rows, 16), *weights))
        assert counter.frame_count == 1


@compiles
@quiet
@pytest.mark.parametrize("policy", ["low", "first"])
def test_auto_compiles_whole_without_gradients(policy: str) -> None:
    """What is asked about the machine in inference does not break the graph."""

    def function(a: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(a, a, value=a)
        return F.gelu((heads @ a.mT).softmax(-1).mul_(2.0))

    ops = ["scaled_dot_product_attention", "matmul", "gelu", "softmax"]
    a = normal(2, 4, 8, 8)
    with hmpx.convert(policy=Policy.from_ops(**{policy: ops}), device_types={"cpu"}):
        for given in (a, a.bfloat16()):
            with torch.no_grad():
                expected = function(given)
                actual = torch.compile(function, backend="aot_eager", fullgraph=True)(given)
            torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)


def all_roundings(dtype: torch.dtype) -> Tensor:
    """Returns every number of ``dtype``, every midpoint, its fp32 neighbours, and random bits."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    finite = values[values.isfinite()].double().unique()
    midpoints = ((finite[:-1] + finite[1:]) / 2).float()
    greatest = torch.finfo(dtype).max
    step = greatest - float(finite[-2])
    past = torch.tensor([greatest + step / 2]).float()
    middles = torch.cat([midpoints, past, -past])
    infinity = torch.tensor(float("inf"))
    near = torch.cat([middles.nextafter(infinity), middles.nextafter(-infinity)])
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (10**6,), generator=generator).to(torch.int32)
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32)
    special = torch.cat([payloads, payloads | -(2**31)]).view(FP32)
    return torch.cat([values, middles, near, random.view(FP32), special])


@compiles
@quiet
@pytest.mark.parametrize("dtype", LOW)
def test_compiled_rounding_is_that_of_casts(dtype: torch.dtype) -> None:
    """Of every number, every midpoint between two, its neighbours, and a million random bits; by inductor's code."""
    values = all_roundings(dtype)
    with low("neg", dtype=dtype):
        found = torch.compile(lambda x: torch.neg(x), fullgraph=True)(values)
    expected = values.to(dtype).neg()
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    same_or_nan(found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


# --- exported graphs ------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, a: Tensor) -> Tensor:
        return torch.tanh(self.linear(a)) @ self.linear.weight


def exported(legalize: str, how: str) -> tuple[str, Function]:
    """Returns the text of the exported graph, and what runs it."""
    torch.manual_seed(0)
    module, data = Chain().eval(), normal(4, 32)
    with low(*NET_OPS, legalize=legalize):
        if how == "export":
            program = torch.export.export(module, (data,))
            return str(program.graph_module.code), program.module()
        if how == "trace":
            traced = torch.jit.trace(module, (data,))
            kinds = [node.kind() for node in traced.inlined_graph.nodes()]
            return "\n".join(kinds), traced
        onnx = torch.onnx.export(module, (data,), dynamo=True, verbose=False)
        return "\n".join(node.op_type for node in onnx.model.graph), onnx


EXPORTS = ("export", "trace", "onnx")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", EXPORTS)
def test_exported_graphs_hold_plain_low_precision_ops(how: str) -> None:
    """Under ``"auto"``, whatever a machine is slow at; under ``"always"`` the composition."""
    plain, _ = exported("never", how)
    assert exported("auto", how)[0] == plain
    legalized, run = exported("always", how)
    assert legalized != plain
    if how != "onnx":
        torch.manual_seed(0)
        module = Chain().eval()
        weight, bias = module.linear.weight, module.linear.bias
        data = normal(4, 32)
        h = composed(lambda a, w, b: F.linear(a, w, b), BF16)(data, weight, bias)
        h = composed(lambda a: torch.tanh(a), BF16)(h)
        same_or_nan(run(data), composed(lambda a, w: a @ w, BF16)(h, weight))


# --- "fast" ---------------------------------------------------------------------------------------


class SmallAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, a: Tensor) -> Tensor:
        q, k, v = [t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(a).chunk(3, -1)]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def small_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    )


FAST_OPS = ("linear", "gelu", "scaled_dot_product_attention")


@pytest.mark.parametrize("factory", [small_mlp, SmallAttention])
def test_fast_is_no_less_accurate_than_auto(factory: Callable[[], nn.Module]) -> None:
    """In outputs and gradients, over several models; and its outputs have the same dtypes."""
    total = {"auto": [0.0, 0.0], "fast": [0.0, 0.0]}
    for seed in range(6):
        torch.manual_seed(seed)
        module = factory()
        data = normal(8, 48, 32, seed=seed)
        exact_module = copy.deepcopy(module).double()
        exact = exact_module(data.double())
        exact.pow(2).sum().backward()
        for mode, sums in total.items():
            copied = copy.deepcopy(module)
            with low(*FAST_OPS, legalize=mode):
                output = copied(data)
                output.float().pow(2).sum().backward()
            assert output.dtype is BF16
            sums[0] += float(
                (output.detach().double() - exact.detach()).norm() / exact.detach().norm()
            )
            for p, e in zip(copied.parameters(), exact_module.parameters(), strict=True):
                assert p.grad.dtype is FP32
                sums[1] += float((p.grad.double() - e.grad).norm() / e.grad.norm())
    assert total["fast"][0] <= total["auto"][0]
    assert total["fast"][1] <= total["auto"][1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", {case.op: name for name, case in COMPOSED_CASES.items()}.values())
def test_fast_gives_the_dtypes_of_auto(name: str) -> None:
    """Of outputs and gradients, with fp32 and with low-precision inputs, in training or not."""
    case = COMPOSED_CASES[name]
    for dtype in (FP32, BF16):
        inputs = [
            normal(*shape, seed=i).to(FP32 if i in case.parameters else dtype)
            for i, shape in enumerate(case.shapes)
        ]
        found = {}
        for mode in ("auto", "fast"):
            with low(case.op, legalize=mode):
                output, gradients = results(case.function, inputs)
                with torch.no_grad():
                    outputs = [output, case.function(*inputs)]
            found[mode] = [t.dtype for t in (*outputs, *gradients)]
        assert found["fast"] == found["auto"]


# --- the option, and observers --------------------------------------------------------------------
