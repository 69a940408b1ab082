"""Which gradients are looked at: those of inputs where they are computed, unless a cast may overflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx
from hmpx.watching.gradients import HANDING_ON, boundary
from hmpx.watching.records import GradientRecord

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16 = torch.float16

#: Makes a view, or a copy, of [2, 1, 3], by the node of that name.
HANDED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "PermuteBackward0": lambda h: h.permute(2, 0, 1),
    "ReshapeAliasBackward0": lambda h: torch.ops.aten._reshape_alias(h, (3, 2), (2, 1)),
    "SqueezeBackward0": lambda h: h.squeeze(),
    "SqueezeBackward1": lambda h: h.squeeze(1),
    "TBackward0": lambda h: h[:, 0].t(),
    "ToCopyBackward0": lambda h: torch.ops.aten._to_copy(h, dtype=h.dtype),
    "TransposeBackward0": lambda h: h.transpose(0, 2),
    "UnsafeViewBackward0": lambda h: torch.ops.aten._unsafe_view(h, (6,)),
    "UnsqueezeBackward0": lambda h: h.unsqueeze(0),
    "ViewBackward0": lambda h: h.view(3, 2),
}


def edges_of(dtype: torch.dtype) -> Tensor:
    """Returns the numbers at which anything that computes would show, and what is not finite."""
    facts = torch.finfo(dtype)
    least = facts.smallest_normal * facts.eps  # the smallest subnormal
    return torch.tensor(
        [facts.max, facts.min, least, -0.0, float("inf"), float("nan")], dtype=dtype
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, FP16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("name", sorted(HANDING_ON))
def test_what_nodes_hand_on_is_what_they_are_given(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, as a collection of numbers: the largest, subnormals, zeros, infinities and NaN."""
    y = HANDED_ON[name](torch.zeros(2, 1, 3, dtype=dtype, requires_grad=True))
    node = y.grad_fn
    assert node is not None and type(node).__name__ == name
    gradient = edges_of(dtype).view(y.shape)
    handed = node(gradient)
    assert isinstance(handed, Tensor) and handed.dtype is dtype
    integer = torch.int32 if dtype is torch.float32 else torch.int16

    def bits(tensor: Tensor) -> list[int]:
        return sorted(tensor.contiguous().view(integer).flatten().tolist())

    assert bits(handed) == bits(gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16], ids=["bf16", "fp16"])
def test_a_cast_to_a_leaf_of_float32_keeps_all_values(dtype: torch.dtype) -> None:
    node = torch.zeros(6, requires_grad=True).to(dtype).grad_fn
    assert node is not None and type(node).__name__ == "ToCopyBackward0"
    handed = node(edges_of(dtype))
    assert isinstance(handed, Tensor) and handed.dtype is torch.float32
    assert torch.equal(
        handed.nan_to_num(7.0, 8.0), edges_of(dtype).double().nan_to_num(7.0, 8.0).float()
    )


def test_one_node_is_asked_for_all_gradients_of_a_linear() -> None:
    with hmpx.convert(device_types={"cpu"}), hmpx.watch("collect") as w:
        h = torch.ones(2, 3, requires_grad=True)
        F.linear(
            h, torch.ones(4, 3, requires_grad=True), torch.ones(4, requires_grad=True)
        ).sum().backward()
        records = [each for each in w._notes.records if isinstance(each, GradientRecord)]
    counts = Counter(each.record.call.op for each in records)
    assert counts["linear"] == 1
    (record,) = [each for each in records if each.record.call.op == "linear"]
    assert (len(record.before), len(record.after)) == (1, 3)


def test_one_node_is_asked_for_the_gradient_of_an_input_that_is_cast() -> None:
    """An input of float32, that is; one of float16 is looked at behind the cast."""
    layer = torch.nn.LayerNorm(3)
    policy = hmpx.Policy.from_ops(low=["layer_norm"], fp32=["softmax"])
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        h = torch.ones(2, 3, requires_grad=True) * 2
        y = layer(h)
        z = torch.softmax(y, -1)
        assert (h.dtype, y.dtype, z.dtype) == (torch.float32, torch.bfloat16, torch.float32)
        z.sum().backward()
        records = [each for each in w._notes.records if isinstance(each, GradientRecord)]
    counts = Counter(each.record.call.op for each in records)
    assert counts["layer_norm"] == 1
    assert counts["softmax"] == 2


def test_a_gradient_that_is_a_sum_is_looked_at_behind_the_sum() -> None:
    h = torch.ones(3, requires_grad=True)
    narrow = h.half()
    y = narrow * 1 + narrow * 2
    exits = boundary([y.grad_fn], {}, torch.float32)
    (node,) = exits
    assert type(node).__name__ == "ToCopyBackward0"


@pytest.mark.parametrize("name", ["weight", "bias", "input"])
def test_one_gradient_of_several_overflows(name: str) -> None:
    """As that of the weight alone does, where the input is large and the others are small."""
    h = torch.full((2, 4), 1e-3 if name != "weight" else 6e4, requires_grad=True)
    weight = torch.full((3, 4), 1e-5 if name != "input" else 6e4, requires_grad=True)
    bias = torch.zeros(3, requires_grad=True)
    with hmpx.convert(device_types={"cpu"}, low_precision_type=FP16), hmpx.watch("collect") as w:
        given = h.repeat(100, 1) if name == "bias" else h
        y = F.linear(given, weight, bias)
        upstream = {"weight": 4.0, "bias": 1e3, "input": 4.0}[name]
        y.float().backward(torch.full(y.shape, upstream))
    gradients = {"weight": weight.grad, "bias": bias.grad, "input": h.grad}
    bad = [
        each
        for each, value in gradients.items()
        if value is not None and not value.isfinite().all()
    ]
    assert bad == [name]
    assert w.first is not None and (w.first.op, w.first.phase) == ("linear", "backward")
    assert w.first.source == "op"


def test_a_gradient_that_overflows_in_the_cast_to_a_narrow_leaf() -> None:
    """The op computes in float32, its parameter is float16: what reaches that has been cast."""
    policy = hmpx.Policy.from_ops(fp32=["mul"])
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        weight = torch.full((3,), 1e-3, dtype=FP16, requires_grad=True)
        y = torch.mul(weight, torch.full((3,), 1e5))
        assert y.dtype is torch.float32
        y.sum().backward()
    assert weight.grad is not None and weight.grad.isinf().all()
    assert w.first is not None and (w.first.op, w.first.phase) == ("mul", "backward")
    assert w.first.source == "op"


class Bad(torch.autograd.Function):
    """A function whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "as it is"])
def test_a_gradient_that_the_program_reads_is_no_data(is_cast: bool) -> None:
    """As for its norm: what went wrong is where it was computed, and that alone is reported."""
    weight = torch.nn.Parameter(torch.full((3, 4), 0.5))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    policy = hmpx.Policy.from_ops(low=["linear"] if is_cast else [])
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        for is_bad in (False, True):
            optimizer.zero_grad()
            y = F.linear(torch.ones(2, 4), weight)
            (Bad.apply(y) if is_bad else y).sum().backward()
            assert weight.grad is not None
            weight.grad.norm()
            optimizer.step()
    assert [(each.op, each.phase) for each in w.offences] == [("BadBackward", "backward")]
