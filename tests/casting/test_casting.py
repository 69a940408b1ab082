"""The rules on single calls: every form of a call, per thread off switch, retired wrappers."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx import Policy
from tests.values import same, uniform

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def low(*names: str) -> hmpx.Session:
    return hmpx.convert(policy=Policy.from_ops(low=names))


# --- LOW and FP32 -------------------------------------------------------------------------------

CALLS = {
    "function": lambda a, b: torch.matmul(a, b),
    "method": lambda a, b: a.matmul(b),
    "operator": lambda a, b: a @ b,
    "unbound method": lambda a, b: torch.Tensor.matmul(a, b),
    "torch.linalg": lambda a, b: torch.linalg.matmul(a, b),
    "keyword": lambda a, b: torch.matmul(a, other=b),
    "all keywords": lambda a, b: torch.matmul(input=a, other=b),
    "all keywords, reversed": lambda a, b: torch.matmul(other=b, input=a),
    "reflected dunder": lambda a, b: torch.Tensor.__rmatmul__(b, a),
}


@pytest.mark.parametrize("spelling", CALLS)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP32, FP16), (BF16, BF16)])
def test_low_casts_every_spelling(spelling: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """A LOW op gives exactly what it gives on inputs rounded by hand."""
    a, b = uniform(4, 4, dtype=dtypes[0]), uniform(4, 4, dtype=dtypes[1])
    expected = CALLS["function"](a.to(BF16), b.to(BF16))
    with low("matmul"):
        actual = CALLS[spelling](a, b)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtypes", "result"),
    [
        ((FP32, FP32), FP32),
        ((BF16, BF16), FP32),
        ((FP16, BF16), FP32),
        ((FP64, FP64), FP64),
        ((torch.complex64, torch.complex64), torch.complex64),
    ],
)
def test_fp32_raises_only_low_precision(
    dtypes: tuple[torch.dtype, torch.dtype], result: torch.dtype
) -> None:
    """FP32 casts bfloat16 and float16 up; float64 and complex stay."""
    a, b = uniform(4, 4, dtype=dtypes[0]), uniform(4, 4, dtype=dtypes[1])
    with hmpx.convert(policy=Policy.from_ops(fp32=["matmul"])):
        assert (a @ b).dtype is result


@pytest.mark.parametrize("kind", ["low", "fp32"])
def test_a_float64_input_leaves_the_call_untouched(kind: str) -> None:
    """LOW and FP32 do nothing beside a float64, so torch's own promotion decides."""
    for other in (FP32, BF16):
        with hmpx.convert(policy=Policy.from_ops(**{kind: ["mul"]})):
            assert (uniform(4, 4, dtype=FP64) * uniform(4, 4, dtype=other)).dtype is FP64
            assert torch.mul(uniform(4, 4, dtype=other), uniform(4, 4, dtype=FP64)).dtype is FP64
        with (
            hmpx.convert(policy=Policy.from_ops(**{kind: ["matmul"]})),
            pytest.raises(RuntimeError, match=r"same dtype|expected scalar type"),
        ):
            uniform(4, 4, dtype=FP64) @ uniform(4, 4, dtype=other)


@pytest.mark.native
@pytest.mark.parametrize("kind", ["low", "fp32", "follow"])
@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a * b,
        lambda a, b: b * a,
        lambda a, b: torch.mul(b, a),
        lambda a, b: torch.mul(a, other=b),
        lambda a, b: a.mul(b),
    ],
)
def test_float64_without_dimensions_counts_as_a_number(
    kind: str, call: Callable[[Any, Any], torch.Tensor]
) -> None:
    """As under HMP: kernels that promote take it beside what is cast, as they take Python's numbers."""
    number = torch.tensor(1 / 3, dtype=FP64)
    decision = {"low": hmpx.ALLOW, "fp32": hmpx.DENY, "follow": hmpx.FOLLOW}[kind]
    policy = Policy({"mul": hmpx.Decision(decision)})
    for legalize in ("never", "always"):
        calls = {dtype: torch.rand(3).to(dtype) for dtype in (FP32, BF16, FP16)}
        with hmpx.convert(policy=policy, legalize=legalize):
            found = {d: (call(x, number), call(x[0], number)) for d, x in calls.items()}
        for dtype, (actual, alone) in found.items():
            expected = {"low": BF16, "fp32": FP32, "follow": dtype}[kind]
            assert actual.dtype is expected
            computed_in = FP32 if legalize == "always" and kind == "low" else expected
            wanted = call(calls[dtype].to(expected).to(computed_in), number)
            assert torch.equal(actual, wanted.to(expected))
            assert alone.dtype is FP64


def test_integers_bools_and_numbers_are_not_cast() -> None:
    """Only floating tensors are cast; the others reach torch as they are."""
    with low("mul", "embedding"):
        assert (torch.arange(3) * 2).dtype is torch.int64
        assert (torch.arange(3) * 2.0).dtype is FP32
        assert (uniform(3) * torch.arange(3)).dtype is BF16
        assert (uniform(3) * True).dtype is BF16
        assert F.embedding(torch.tensor([0, 1]), uniform(4, 2)).dtype is BF16


@pytest.mark.filterwarnings("ignore:.*quantize.*deprecated:UserWarning")
def test_sparse_and_quantized_tensors_are_left_alone() -> None:
    """A sparse or quantized input keeps torch's own behaviour for the whole call."""
    sparse = uniform(3, 3).to_sparse()
    expected = torch.mm(sparse, uniform(3, 3))
    quantized = torch.quantize_per_tensor(uniform(3), 0.1, 0, torch.qint8)
    with low("mm", "relu"):
        torch.testing.assert_close(torch.mm(sparse, uniform(3, 3)), expected, rtol=0, atol=0)
        assert torch.relu(quantized).dtype is torch.qint8


def test_tensors_in_nested_lists_and_keywords_are_cast() -> None:
    """``cat``, ``einsum``, RNN weights: tensors inside lists and tuples count."""
    lstm = nn.LSTM(4, 3)
    with low("cat", "einsum", "lstm", "scaled_dot_product_attention"):
        assert torch.cat([uniform(4, 4), uniform(4, 4, dtype=BF16)]).dtype is BF16
        assert torch.cat(tensors=(uniform(4, 4), uniform(4, 4)), dim=0).dtype is BF16
        assert torch.einsum("ij,jk->ik", uniform(4, 4), uniform(4, 4)).dtype is BF16
        assert torch.einsum("ij,jk->ik", [uniform(4, 4), uniform(4, 4)]).dtype is BF16
        output, (h, c) = lstm(uniform(5, 2, 4))
        assert output.dtype is h.dtype is c.dtype is BF16
        q = uniform(1, 2, 4, 4)
        mask = uniform(4, 4)
        assert F.scaled_dot_product_attention(q, q, q, attn_mask=mask).dtype is BF16
        assert F.scaled_dot_product_attention(query=q, key=q, value=q).dtype is BF16


def test_arguments_are_not_mutated() -> None:
    """Casting builds new lists and dicts; the caller's are as they were."""
    tensors, keywords = [uniform(4, 4), uniform(4, 4)], {"other": uniform(4, 4)}
    inside = list(tensors)
    with low("cat", "matmul"):
        torch.cat(tensors)
        torch.matmul(uniform(4, 4), **keywords)
    assert all(a is b for a, b in zip(tensors, inside, strict=True))
    assert keywords["other"].dtype is FP32


def test_gradients_come_back_in_the_parameters_dtype() -> None:
    """The cast is differentiable: fp32 weights get fp32 gradients, as with casts by hand."""
    weight = nn.Parameter(uniform(4, 4))
    (uniform(4, 4, dtype=BF16) @ weight.bfloat16()).sum().backward()
    expected = weight.grad
    weight.grad = None
    with low("matmul"):
        (uniform(4, 4) @ weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


def test_parameters_and_tensor_subclasses_are_cast() -> None:
    """A subclass stays one through the cast."""

    class Tagged(Tensor):
        pass

    with low("matmul"):
        out = uniform(4, 4).as_subclass(Tagged) @ nn.Parameter(uniform(4, 4))
    assert type(out) is Tagged
    assert out.dtype is BF16


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_other_devices_are_not_cast() -> None:
    """Only tensors on a device type in ``device_types`` are eligible."""
    with hmpx.convert(policy=Policy.from_ops(low=["matmul"]), device_types={"cuda"}):
        assert (uniform(4, 4) @ uniform(4, 4)).dtype is FP32
    with hmpx.convert(policy=Policy.from_ops(low=["matmul"]), device_types={"meta", "cuda"}):
        meta = torch.empty(4, 4, device="meta")
        assert (meta @ meta).dtype is BF16
        assert (uniform(4, 4) @ uniform(4, 4)).dtype is FP32


@pytest.mark.parametrize("name", ["T", "mT"])
def test_properties_can_be_listed(name: str) -> None:
    """``x.T`` is an op like any other when a list names it."""
    with low(name):
        assert getattr(uniform(4, 4), name).dtype is BF16
    assert getattr(uniform(4, 4), name).dtype is FP32


def write_to_storage(weight: nn.Parameter) -> None:
    storage = weight.untyped_storage()
    storage.copy_((weight.detach() * 2).untyped_storage())


def write_by_pointer(weight: nn.Parameter) -> None:
    """Doubles fp32 numbers, as a kernel would that is given a pointer."""
    numbers = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    for i in range(len(numbers)):
        numbers[i] *= 2


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda weight: weight.data.mul_(1.1),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 1.1),
    "in place": lambda weight: weight.mul_(1.1),
    "view": lambda weight: weight[0].mul_(1.1),
    "numpy": lambda weight: np.multiply(array := weight.detach().numpy(), 2, out=array),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()).mul_(1.1),
    "storage": write_to_storage,
    "pointer": write_by_pointer,
}


@pytest.mark.parametrize("write", WRITES)
def test_each_use_casts_what_a_weight_holds_then(write: str) -> None:
    """However it is written to in between; torch counts not all of these writes."""

    def outputs(weight: nn.Parameter, linear: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        found = []
        for _ in range(3):
            found.append(linear(x, weight))
            WRITES[write](weight)
        return found

    x, values = uniform(3, 24), uniform(24, 24)
    with torch.no_grad():
        expected = outputs(
            nn.Parameter(values.clone()), lambda x, w: F.linear(x.bfloat16(), w.bfloat16())
        )
        with low("linear"):
            same(outputs(nn.Parameter(values.clone()), F.linear), expected)


# --- WIDEST and FIRST ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((FP32, BF16), FP32),
        ((BF16, FP32), FP32),
        ((BF16, FP16), FP32),
        ((BF16, BF16), BF16),
        ((FP64, FP32), FP64),
        ((FP16, FP64), FP64),
    ],
)
@pytest.mark.parametrize("name", ["cross", "baddbmm", "add", "stack"])
def test_widest_is_torchs_result_type(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype
) -> None:
    """Whether torch promotes by itself or the wrapper casts, the type is `result_type`'s."""
    a, b = uniform(1, 3, 3, dtype=dtypes[0]), uniform(1, 3, 3, dtype=dtypes[1])
    call = {
        "cross": lambda: torch.cross(a, b, dim=-1),
        "baddbmm": lambda: torch.baddbmm(a, b, b),
        "add": lambda: a + b,
        "stack": lambda: torch.stack([a, b]),
    }[name]
    with hmpx.convert(policy=Policy.from_ops(widest=[name])):
        assert call().dtype is expected is torch.result_type(a, b)


def test_a_0dim_tensor_does_not_widen_a_dimensioned_one() -> None:
    """As in `torch.result_type`; Python numbers never widen."""
    tensors = [uniform(3, dtype=BF16), torch.tensor(2.0)]
    with hmpx.convert(policy=Policy.from_ops(widest=["add", "heaviside"])):
        assert (tensors[0] + 2.0).dtype is BF16
        assert torch.heaviside(*tensors).dtype is BF16 is torch.result_type(*tensors)
        assert torch.heaviside(tensors[0][0], tensors[1]).dtype is FP32  # where there are no others


@pytest.mark.parametrize("join", [torch.hstack, torch.column_stack])
def test_a_0dim_tensor_that_is_joined_to_others_counts_as_they_do(join: Callable[..., Any]) -> None:
    """Torch gives it a dimension first."""
    tensors = [torch.tensor(1.001), uniform(3 if join is torch.hstack else 1, dtype=BF16)]
    expected = join(tensors)
    with hmpx.convert():
        same(getattr(torch, join.__name__)(tensors), expected)


@pytest.mark.parametrize("first", [FP32, BF16, FP16])
@pytest.mark.parametrize("second", [FP32, BF16, FP16])
def test_widest_that_returns_the_input_dtype(first: torch.dtype, second: torch.dtype) -> None:
    """As norms on CUDA: inputs of one dtype are left to torch, others compute in the widest."""
    x, weight = uniform(4, 8, dtype=first), uniform(8, dtype=second)
    wide = torch.promote_types(first, second)
    expected = F.layer_norm(x.to(wide), (8,), weight.to(wide)).to(first)
    with hmpx.convert(policy={"lists": "none", "widest": ["layer_norm output=input"]}):
        same(F.layer_norm(x, (8,), weight), expected)
        same(F.layer_norm(x, (8,), weight=weight, bias=None), expected)
        same(torch.layer_norm(x, (8,), weight), expected)


@pytest.mark.parametrize("first", [FP32, BF16])
@pytest.mark.parametrize("second", [FP32, BF16])
def test_first_follows_the_first_floating_argument_of_the_signature(
    first: torch.dtype, second: torch.dtype
) -> None:
    """Keyword order does not matter: the first is the first in the op's signature (transformers #47689)."""
    a, w, b = uniform(4, 4, dtype=first), uniform(4, 4, dtype=second), uniform(4, dtype=second)
    with hmpx.convert(policy=Policy.from_ops(first=["linear", "index_put", "embedding_bag"])):
        assert F.linear(a, w, b).dtype is first
        assert F.linear(bias=b, weight=w, input=a).dtype is first
        assert torch.index_put(a, (torch.tensor([0]),), uniform(4, dtype=second)).dtype is first
        bags = F.embedding_bag(
            torch.tensor([[0, 1]]), a, mode="sum", per_sample_weights=uniform(1, 2, dtype=second)
        )
        assert bags.dtype is first


@pytest.mark.parametrize("keyword", ["input", "x", "x1", "a"])
def test_the_first_argument_is_first_under_every_name_that_torch_takes(keyword: str) -> None:
    """``self`` in schemas, which no function takes."""
    a, b = uniform(4, 4, dtype=BF16), uniform(4, 4)
    with hmpx.convert(policy=Policy.from_ops(first=["mm", "cross"])):
        assert torch.mm(mat2=b, **{keyword: a}).dtype is BF16
        assert torch.mm(mat2=a, **{keyword: b}).dtype is FP32
        other = "x2" if keyword == "x1" else "other"
        assert torch.cross(**{other: b[:3, :3], keyword: a[:3, :3]}, dim=1).dtype is BF16


# --- in place and out= --------------------------------------------------------------------------

IN_PLACE = {
    "x += y": lambda a, b: a.__iadd__(b),
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "addmm_": lambda a, b: a.addmm_(b, b),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
    "lerp_ weight": lambda a, b: a.lerp_(b, b),
    "copy by index": lambda a, b: a.__setitem__(slice(0, 2), b[:2]),
    "mask": lambda a, b: a.__setitem__(torch.eye(4, dtype=torch.bool), b[0]),
    "index_put_": lambda a, b: a.index_put_((torch.tensor([0, 1]),), b[:2]),
    "index_put_ of input=": lambda a, b: torch.index_put_(
        values=b[:2], indices=(torch.tensor([0, 1]),), input=a
    ),
    "scatter_add_": lambda a, b: a.scatter_add_(0, torch.zeros(4, 4, dtype=torch.int64), b),
    "add out": lambda a, b: torch.add(b, b, out=a),
    "mm out": lambda a, b: torch.mm(b, b, out=a),
    "addmm out": lambda a, b: torch.addmm(b, b, b, out=a),
}
LISTED = ("add", "iadd", "mul", "addmm", "lerp", "mm", "index_put", "setitem", "scatter_add")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["low", "fp32", "first"])
@pytest.mark.parametrize("target", [FP32, BF16])
@pytest.mark.parametrize("source", [FP32, BF16])
@pytest.mark.parametrize("form", IN_PLACE)
def test_in_place_targets_keep_dtype_and_storage(
    form: str, source: torch.dtype, target: torch.dtype, kind: str
) -> None:
    """Whatever the lists say, the target keeps dtype, storage and update (unsloth #5766)."""
    a, b = uniform(4, 4, dtype=target), uniform(4, 4, dtype=source)
    expected = a.clone()
    promotes = form in ("x += y", "add_", "mul_", "add out", "copy by index")
    if (
        form in ("mm out", "addmm out") and kind == "fp32"
    ):  # an op of the fp32 list rounds once into its target
        wide = a.float()
        IN_PLACE[form](wide, b.float())
        expected = wide.to(target)
    else:
        IN_PLACE[form](expected, b if promotes else b.to(target))
    pointer = a.data_ptr()
    with hmpx.convert(policy=Policy.from_ops(**{kind: LISTED})):
        IN_PLACE[form](a, b)
    assert a.dtype is target
    assert a.data_ptr() == pointer
    torch.testing.assert_close(a, expected, rtol=0, atol=0)


WITH_OUT = {
    "div": lambda a, b, **out: torch.div(a, b, **out),
    "pow": lambda a, b, **out: torch.pow(a, b, **out),
    "softmax": lambda a, b, **out: torch.softmax(a, -1, **out),
    "cumsum": lambda a, b, **out: torch.cumsum(a, 0, **out),
    "logsumexp": lambda a, b, **out: torch.logsumexp(a, -1, **out),
    "norm": lambda a, b, **out: torch.norm(a, dim=0, **out),
    "mm": lambda a, b, **out: torch.mm(a, b.t(), **out),
    "sum": lambda a, b, **out: torch.sum(a, -1, **out),
}


@pytest.mark.parametrize("target", [FP32, BF16])
@pytest.mark.parametrize("source", [FP32, BF16])
@pytest.mark.parametrize("op", WITH_OUT)
def test_fp32_ops_round_once_into_out(op: str, source: torch.dtype, target: torch.dtype) -> None:
    """An op of the fp32 list computes in fp32, whatever its inputs and its target are."""
    call = WITH_OUT[op]
    a, b = uniform(300, 8, dtype=source) + 1, uniform(300, 8, dtype=source) + 1
    expected = call(a.float(), b.float()).to(target)
    out = torch.empty_like(expected)
    pointer = out.data_ptr()
    with hmpx.convert(policy=Policy.from_ops(fp32=[op]), device_types={"cpu"}):
        result = call(a, b, out=out)
    assert result is out
    assert out.data_ptr() == pointer
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_iadd_in_the_low_list_still_updates_the_parameter() -> None:
    """``p += u`` must reach p's storage: HMP's lists name ``iadd``."""
    p = uniform(4, 4)
    alias = p.view(-1)
    with low("iadd", "add"):
        p += torch.ones(4, 4, dtype=BF16)
    assert p.dtype is FP32
    torch.testing.assert_close(alias.view(4, 4), uniform(4, 4) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "dropout", "dropout2d", "elu"])
def test_inplace_flag_keeps_the_inputs_dtype(name: str) -> None:
    """``F.relu(x, inplace=True)`` writes to x although relu is listed."""
    a = uniform(1, 2, 4, 4) - 0.5
    with low(name):
        out = getattr(F, name)(a, inplace=True)
        assert getattr(F, name)(uniform(1, 2, 4, 4)).dtype is BF16
    assert out.dtype is FP32
    assert out.data_ptr() == a.data_ptr()


# --- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_buffers_are_never_cast(training: bool) -> None:
    """Running statistics keep their dtype and are updated in place; weights stay fp32 on the CPU."""
    norm = nn.BatchNorm2d(3).train(training)
    reference = nn.BatchNorm2d(3).train(training)
    expected = reference(uniform(2, 3, 4, 4).bfloat16())
    with low("batch_norm"):
        actual = norm(uniform(2, 3, 4, 4))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert actual.dtype is BF16
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is FP32
    torch.testing.assert_close(norm.running_mean, reference.running_mean, rtol=0, atol=0)


@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("input_dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["low", "fp32", "first"])
def test_layer_norm_weights_follow_only_where_the_kernel_refuses(
    kind: str, input_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """On the CPU fp32 weights stay beside a bf16 input; the output has the input's cast dtype."""
    a, w = uniform(4, 8, dtype=input_dtype), uniform(8, dtype=weight_dtype)
    want = {"low": BF16, "fp32": FP32, "first": input_dtype}[kind]
    keeps = want is BF16 and weight_dtype is FP32
    expected = F.layer_norm(
        a.to(want), (8,), w if keeps else w.to(want), w if keeps else w.to(want)
    )
    with hmpx.convert(policy=Policy.from_ops(**{kind: ["layer_norm"]})):
        actual = F.layer_norm(a, (8,), w, w)
        by_name = torch.layer_norm(a, normalized_shape=(8,), weight=w, bias=w)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(by_name, expected, rtol=0, atol=0)


@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
def test_rms_norm_keeps_its_weight_in_fp32(weight_dtype: torch.dtype) -> None:
    """No list names it: the low input's norm is rounded once, and so is the weight's gradient."""
    x = (uniform(16, 8) * 50).bfloat16().requires_grad_()
    w = (uniform(8, seed=1) * 100).to(weight_dtype).requires_grad_()
    exact = F.rms_norm(x.double(), (8,), w.double())
    with hmpx.convert(lists="hmp"):
        y = F.rms_norm(x, (8,), w)
    assert y.dtype is BF16
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-8, atol=0)
    assert (y.double() - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()
    y.float().square().sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (BF16, weight_dtype)


@pytest.mark.parametrize("kind", ["low", "first"])
@pytest.mark.parametrize("options", [{}, {"legalize": "never"}])
def test_statistics_that_native_norms_return_stay_fp32(kind: str, options: dict[str, Any]) -> None:
    """``torch.native_layer_norm`` and its like take fp32 weights beside a low input, as torch does."""
    x, w = uniform(5, 8, 4, dtype=BF16) * 3 + 100, torch.ones(8)
    calls = {
        "native_layer_norm": lambda: torch.native_layer_norm(x[..., 0], [8], w, w, 1e-5),
        "native_group_norm": lambda: torch.native_group_norm(x, w, w, 5, 8, 4, 2, 1e-5),
        "native_batch_norm": lambda: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
        "_native_batch_norm_legit_no_training": lambda: torch._native_batch_norm_legit_no_training(
            x, w, w, w, w, 0.1, 1e-5
        ),
    }
    expected = {name: call() for name, call in calls.items()}
    with hmpx.convert(policy=Policy.from_ops(**{kind: [*calls]}), device_types={"cpu"}, **options):
        actual = {name: call() for name, call in calls.items()}
    for name in calls:
        assert actual[name][1].dtype is FP32, name
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)


# --- atomic ops ---------------------------------------------------------------------------------


def test_a_listed_python_op_is_atomic() -> None:
    """Inside a listed op that is implemented in Python the patched ops do not cast again."""
    attention = nn.MultiheadAttention(8, 2)
    a = uniform(3, 1, 8)
    expected, _ = attention(a, a, a)
    policy = Policy.from_ops(
        fp32=["multi_head_attention_forward"], low=["linear", "bmm", "softmax", "baddbmm"]
    )
    with hmpx.convert(policy=policy):
        actual, _ = attention(a, a, a)
        assert F.linear(uniform(4, 4), uniform(4, 4)).dtype is BF16
        assert hmpx.casts_enabled()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_an_exception_inside_a_listed_python_op_leaves_casts_on() -> None:
    """The atomic region closes however the op is left."""
    with low("normalize", "matmul"):
        with pytest.raises(AttributeError, match="'str' object has no attribute 'norm'"):
            F.normalize("no tensor")
        assert hmpx.casts_enabled()
        assert (uniform(4, 4) @ uniform(4, 4)).dtype is BF16


def test_errors_of_the_op_pass_through_unchanged() -> None:
    """A wrong call fails as it does on unpatched torch, in type and text."""
    calls = [
        lambda: F.linear(uniform(2, 3), uniform(5, 7)),
        lambda: F.linear([1.0], uniform(4, 4)),
        lambda: torch.matmul(uniform(4, 4)),
        lambda: torch.matmul(),
        lambda: uniform(4, 4) @ "text",
        lambda: torch.softmax(uniform(4, 4), 7),
        lambda: torch.softmax(uniform(4, 4), dim=0, nonsense=1),
    ]
    for call in calls:
        with hmpx.disable_casts(), pytest.raises((RuntimeError, TypeError, IndexError)) as expected:
            call()
        with (
            low("linear", "matmul", "softmax"),
            pytest.raises(expected.type) as actual,
        ):
            call()
        first = str(expected.value).split("\n")[0]
        assert str(actual.value).split("\n")[0].replace("c10::BFloat16", "float") == first


# --- on and off ---------------------------------------------------------------------------------


def cast_dtype() -> torch.dtype:
    return (uniform(4, 4) @ uniform(4, 4)).dtype


def test_disable_casts_nests_and_restores() -> None:
    """The inner block's end does not switch casting back on, HMP's well-known fault."""
    with low("matmul"):
        with hmpx.disable_casts():
            with hmpx.disable_casts():
                assert cast_dtype() is FP32
            assert cast_dtype() is FP32
            assert not hmpx.casts_enabled()
        assert cast_dtype() is BF16


def test_disable_casts_restores_after_an_exception() -> None:
    """The state is restored in ``finally``."""
    with low("matmul"):
        with pytest.raises(ZeroDivisionError), hmpx.disable_casts():
            1 / 0  # noqa: B018
        assert hmpx.casts_enabled()
        assert cast_dtype() is BF16


def test_disable_casts_decorates_functions_generators_and_coroutines() -> None:
    """Off inside the decorated code only, also between the yields of a generator."""

    @hmpx.disable_casts()
    def function() -> torch.dtype:
        return cast_dtype()

    @hmpx.disable_casts()
    def generator() -> Iterator[torch.dtype]:
        sent = yield cast_dtype()
        assert sent == "sent"
        try:
            yield cast_dtype()
        except KeyError:
            yield cast_dtype()

    @hmpx.disable_casts()
    async def coroutine() -> torch.dtype:
        await asyncio.sleep(0)
        return cast_dtype()

    with low("matmul"):
        assert function() is FP32
        running = generator()
        assert next(running) is FP32
        assert cast_dtype() is BF16
        assert running.send("sent") is FP32
        assert running.throw(KeyError()) is FP32
        assert cast_dtype() is BF16
        assert list(running) == []
        assert asyncio.run(coroutine()) is FP32
        assert cast_dtype() is BF16
        assert function.__name__ == "function"


def test_disable_casts_decorates_an_async_generator() -> None:
    """Off while its body runs; `asend`, `athrow`, `aclose` and a task's end reach the body."""
    ends: list[object] = []

    @hmpx.disable_casts()
    async def stream(value: str) -> AsyncIterator[Any]:
        try:
            sent = yield value, cast_dtype()
            await asyncio.sleep(0)
            try:
                yield sent, cast_dtype()
            except KeyError:
                yield "thrown", cast_dtype()
        finally:
            ends.append(cast_dtype())

    async def consume() -> None:
        running = stream("first")
        assert await anext(running) == ("first", FP32)
        assert cast_dtype() is BF16
        assert await running.asend("sent") == ("sent", FP32)
        assert cast_dtype() is BF16
        assert await running.athrow(KeyError()) == ("thrown", FP32)
        with pytest.raises(StopAsyncIteration):
            await running.asend(None)
        closed, failed = stream("closed"), stream("failed")
        await anext(closed)
        await closed.aclose()
        await anext(failed)
        with pytest.raises(ValueError, match="from outside"):
            await failed.athrow(ValueError("from outside"))
        async for _ in stream("left"):
            assert cast_dtype() is BF16
            break
        assert [each async for each in stream("all")] == [("all", FP32), (None, FP32)]
        assert cast_dtype() is BF16

    with low("matmul"):
        asyncio.run(consume())
        assert cast_dtype() is BF16
    assert ends == [FP32] * 5
    assert inspect.isasyncgenfunction(stream)


def test_a_decorated_generator_ends_with_casts_off() -> None:
    """Also one that is closed, that swallows the closing, or that is dropped."""
    ends: list[object] = []

    @hmpx.disable_casts()
    def generator(swallows: bool) -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            ends.append(cast_dtype())
            if not swallows:
                raise

    with low("matmul"):
        for swallows in (True, False):
            running = generator(swallows)
            next(running)
            running.close()
        running = generator(False)
        next(running)
        del running
        assert cast_dtype() is BF16
    assert ends == [FP32] * 3


def test_disable_casts_holds_for_its_thread_and_task_only() -> None:
    """Another thread, and another asyncio task, cast while this one does not."""
    inside, leave = threading.Event(), threading.Event()
    seen: dict[str, torch.dtype] = {}

    def disabled() -> None:
        with hmpx.disable_casts():
            inside.set()
            leave.wait(10)
            seen["disabled"] = cast_dtype()

    async def task(off: bool, barrier: asyncio.Event) -> torch.dtype:
        if off:
            with hmpx.disable_casts():
                barrier.set()
                await asyncio.sleep(0.01)
                return cast_dtype()
        await barrier.wait()
        return cast_dtype()

    async def both() -> list[torch.dtype]:
        barrier = asyncio.Event()
        return await asyncio.gather(task(True, barrier), task(False, barrier))

    with low("matmul"):
        thread = threading.Thread(target=disabled)
        thread.start()
        inside.wait(10)
        assert cast_dtype() is BF16
        leave.set()
        thread.join()
        assert seen == {"disabled": FP32}
        assert asyncio.run(both()) == [FP32, BF16]


# --- references kept ----------------------------------------------------------------------------


def test_a_reference_kept_over_revert_acts_as_the_original() -> None:
    """``from torch import matmul`` during a conversion must not go on casting after it."""
    with low("matmul", "normalize"):
        kept, kept_python = torch.matmul, F.normalize
        assert kept(uniform(4, 4), uniform(4, 4)).dtype is BF16
    assert kept(uniform(4, 4), uniform(4, 4)).dtype is FP32
    assert kept_python(uniform(4, 4)).dtype is FP32
    assert torch.matmul is not kept


def test_nothing_is_cast_below_the_dispatcher() -> None:
    """Decompositions and meta functions, which call torch's own functions, see no casts."""
    seen: list[torch.dtype] = []

    class Decomposing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.exp.default:
                seen.append(torch.matmul(uniform(4, 4), uniform(4, 4)).dtype)
            return func(*args, **(kwargs or {}))

    with low("matmul"), Decomposing():
        torch.exp(uniform(4, 4))
        assert torch.matmul(uniform(4, 4), uniform(4, 4)).dtype is BF16
    assert seen == [FP32]


# --- ops without a low-precision kernel ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "linalg_inv": lambda t: torch.linalg.inv(t),
        "linalg_svdvals": lambda t: torch.linalg.svdvals(t),
        "cdist": lambda t: torch.cdist(t, t),
        "linalg_qr": lambda t: torch.linalg.qr(t),
        "linalg_slogdet": lambda t: torch.linalg.slogdet(t),
    }.items(),
)
def test_an_op_without_a_bf16_kernel_runs_in_fp32_and_is_rounded(
    name: str, call: Callable[[Tensor], Any]
) -> None:
    """Inputs rounded as ever, computed in fp32, results rounded (pytorch #112575, #117844, #89372, #116609)."""
    torch.manual_seed(0)
    value = (torch.eye(4) + 0.1 * torch.rand(4, 4)).requires_grad_()
    expected = call(value.bfloat16().float())
    for verbose in (False, True):
        with hmpx.convert(policy=Policy.from_ops(low=[name]), isVerbose=verbose):
            actual = call(value)
        assert type(actual) is type(expected)
        pairs = (
            zip(actual, expected, strict=True)
            if isinstance(actual, tuple)
            else [(actual, expected)]
        )
        for got, want in pairs:
            torch.testing.assert_close(got, want.bfloat16(), rtol=0, atol=0)
            assert got.requires_grad


def test_other_failures_are_those_of_fp32() -> None:
    """What fp32 raises is raised; in place and with ``out=`` the result is rounded into the target."""
    singular, out = torch.zeros(3, 3), torch.empty(3, 3, dtype=BF16)
    with low("linalg_inv"):
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.inv(singular)
        assert torch.linalg.inv(torch.eye(3), out=out) is out
        assert torch.linalg.qr(torch.eye(3, dtype=BF16)).Q.dtype is BF16
    torch.testing.assert_close(out.float(), torch.eye(3), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="BFloat16"):
        torch.linalg.inv(torch.eye(3, dtype=BF16))


def test_a_low_op_with_a_complex_input_runs_as_called() -> None:
    """Its kernel computes in complex64: rounding the other input would only lose digits."""
    z, real = torch.rand(4, 4, dtype=torch.complex64), uniform(4, 4)
    expected = z * real
    with low("mul", "add"):
        for actual in (z * real, real * z, torch.mul(input=real, other=z)):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_mode_and_an_overriding_class_leave_each_call_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Though both call again the function that they are handed."""

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    class Own(Tensor):
        pass

    with hmpx.convert(policy=Policy.from_ops(low=["matmul"]), isVerbose=True), Mode():
        value = uniform(4, 4).as_subclass(Own)
        caplog.clear()
        assert (value @ value).dtype is BF16
    assert len(caplog.messages) == 1
