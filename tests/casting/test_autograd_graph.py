"""Where the casts are in the autograd graph: HMP's users looked for ``ToCopyBackward0`` nodes.

Compiled nodes contain the casts of a linear layer: tests/compute/test_nodes.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchviz
from torch import Tensor

import hmpx
from hmpx import Policy
from hmpx.compute import nodes as nodes_of_linear

CAST = "ToCopyBackward0"
NAMESPACE = "torch::autograd::"  # of AccumulateGrad; torchviz leaves it out

# torchviz compares versions by distutils; it is archived, and works.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")


@pytest.fixture(autouse=True)
def no_numbers_from_elsewhere() -> None:
    """Makes the tensors of a test the same in every order of tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def without_compiled_nodes(fresh_wrappers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves casts to torch, which has a node for each."""
    monkeypatch.setattr(nodes_of_linear, "nodes_in_use", nodes_of_linear.Nodes)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yields every node of the graph that computed ``outputs``, once."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def casts(*outputs: Tensor) -> Counter[str]:
    """Returns ``"AccumulateGrad -> AddmmBackward0"``, what is cast and the op it is for -> times."""
    return Counter(
        f"{following.next_functions[0][0].name()} -> {node.name()}".replace(NAMESPACE, "")
        for node in nodes(outputs)
        for following, _ in node.next_functions
        if following is not None and following.name() == CAST
    )


def pictured_casts(output: Tensor) -> Counter[str]:
    """Returns what `casts` does, read off torchviz's picture."""
    source = torchviz.make_dot(output).source
    labels = dict(re.findall(r"(\d+) \[label=(\w+)\]", source))
    edges = re.findall(r"(\d+) -> (\d+)", source)
    return Counter(
        f"{labels[above]} -> {labels[consumer]}"
        for above, cast in edges
        if labels.get(cast) == CAST
        for same, consumer in edges
        if same == cast
    )


@pytest.fixture(params=[casts, pictured_casts], ids=["grad_fn", "torchviz"])
def seen_casts(request: pytest.FixtureRequest) -> Callable[[Tensor], Counter[str]]:
    """The two ways of looking, which must agree."""
    return request.param  # type: ignore[no-any-return]


def test_linear_casts_each_input_that_requires_grad(
    seen_casts: Callable[[Tensor], Counter[str]],
) -> None:
    """fp32 input, weight and bias under LOW: one node each, between the leaf and the op."""
    x, weight, bias = leaf(3, 4), leaf(2, 4), leaf(2)
    with hmpx.convert(policy=Policy.from_ops(low=["linear"]), device_types={"cpu"}):
        loss = F.linear(x, weight, bias).sum()
    assert seen_casts(loss) == {
        "AccumulateGrad -> AddmmBackward0": 2,  # x and bias
        "AccumulateGrad -> TBackward0": 1,  # weight
    }


def test_fp32_has_none_before_during_off_and_after(
    seen_casts: Callable[[Tensor], Counter[str]],
) -> None:
    """No node without a conversion, under `disable_casts`, and after `revert`."""
    layer = torch.nn.Linear(4, 2)
    x = leaf(3, 4)
    assert not seen_casts(layer(x))
    session = hmpx.convert(device_types={"cpu"})
    assert seen_casts(layer(x)).total() == 3
    with hmpx.disable_casts():
        assert not seen_casts(layer(x))
    assert seen_casts(layer(x)).total() == 3
    session.revert()
    assert not seen_casts(layer(x))


BF16, FP32 = torch.bfloat16, torch.float32
Inputs = list[tuple[torch.dtype, tuple[int, ...]]]
# Functions are lambdas, so that they are looked up while they are patched.
CASES: list[tuple[str, str, Callable[..., Tensor], Inputs, int]] = [
    (
        "low",
        "conv2d",
        lambda *a: F.conv2d(*a),
        [(FP32, (1, 2, 5, 5)), (FP32, (3, 2, 3, 3)), (FP32, (3,))],
        3,
    ),
    (
        "low",
        "conv2d",
        lambda *a: F.conv2d(*a),
        [(FP32, (1, 2, 5, 5)), (BF16, (3, 2, 3, 3)), (BF16, (3,))],
        1,
    ),
    ("low", "bmm", lambda *a: torch.bmm(*a), [(FP32, (2, 3, 4)), (BF16, (2, 4, 3))], 1),
    ("low", "mul", lambda a, b: a * b, [(FP32, (3,)), (FP32, (3,))], 2),
    ("low", "exp", lambda a: a.exp(), [(FP32, (3,))], 1),
    ("fp32", "exp", lambda a: a.exp(), [(FP32, (3,))], 0),
    ("fp32", "exp", lambda a: a.exp(), [(BF16, (3,))], 1),
    ("fp32", "truediv", lambda a, b: a / b, [(BF16, (3,)), (BF16, (3,))], 2),
    ("widest", "cross", lambda a, b: torch.cross(a, b, dim=0), [(BF16, (3,)), (FP32, (3,))], 1),
    ("widest", "dot", lambda a, b: torch.dot(a, b), [(BF16, (3,)), (BF16, (3,))], 0),
    # torch's own kernel promotes: no copy in the graph
    ("widest", "add", lambda a, b: a + b, [(BF16, (3,)), (FP32, (3,))], 0),
    ("first", "bmm", lambda *a: torch.bmm(*a), [(BF16, (2, 3, 4)), (FP32, (2, 4, 3))], 1),
    ("first", "bmm", lambda *a: torch.bmm(*a), [(FP32, (2, 3, 4)), (FP32, (2, 4, 3))], 0),
]


@pytest.mark.native
@pytest.mark.parametrize(("kind", "op", "function", "inputs", "expected"), CASES)
def test_count_by_policy_and_dtypes(
    kind: str, op: str, function: Callable[..., Tensor], inputs: Inputs, expected: int
) -> None:
    """One node for each input that the policy changes, none for the others."""
    tensors = [leaf(*shape, dtype=dtype) for dtype, shape in inputs]
    with hmpx.convert(policy=Policy.from_ops(**{kind: [op]}), device_types={"cpu"}):
        assert casts(function(*tensors)).total() == expected


def test_norm_keeps_its_fp32_parameters() -> None:
    """Under LOW a norm's input is cast; weight and bias stay fp32 where the kernel takes that."""
    norm, x = torch.nn.LayerNorm(4), leaf(3, 4)
    with hmpx.convert(policy=Policy.from_ops(low=["layer_norm"]), device_types={"cpu"}):
        output = norm(x)
    assert output.dtype is torch.bfloat16
    assert casts(output).total() == 1


def test_shared_weight_is_cast_for_each_use() -> None:
    """No cast is cached: a parameter that is used twice has two nodes, and one gradient in fp32."""
    weight = leaf(4, 4)
    with hmpx.convert(policy=Policy.from_ops(low=["mm"]), device_types={"cpu"}):
        output = torch.mm(torch.mm(torch.randn(3, 4), weight), weight)
        output.sum().backward()
    assert casts(output).total() == 2
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


def test_in_place_target_is_never_cast() -> None:
    """The tensor written to stays in the graph itself; only the other inputs are cast."""
    base, a, b = leaf(3, 2), leaf(3, 4, dtype=torch.bfloat16), leaf(4, 2, dtype=torch.bfloat16)
    with hmpx.convert(policy=Policy.from_ops(low=["addmm"]), device_types={"cpu"}):
        target = base.clone()
        target.addmm_(a, b)
    assert target.dtype is torch.float32
    assert casts(target) == {"AccumulateGrad -> AddmmBackward0": 2}


def test_gradients_return_through_the_casts() -> None:
    """The gradient of each leaf has the leaf's own dtype, and is that of hand-written casts."""
    x, weight, bias = leaf(3, 4), leaf(2, 4), leaf(2)
    with hmpx.convert(policy=Policy.from_ops(low=["linear"]), device_types={"cpu"}):
        output = F.linear(x, weight, bias)
    by_hand = F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    actual = torch.autograd.grad(output.float().square().sum(), (x, weight, bias))
    expected = torch.autograd.grad(by_hand.float().square().sum(), (x, weight, bias))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_default_lists_on_a_classifier(seen_casts: Callable[[Tensor], Counter[str]]) -> None:
    """Linear, ReLU, Linear, cross-entropy: the parameters go down once, the logits up once."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    x, target = torch.randn(5, 8), torch.randint(4, (5,))
    with hmpx.convert(device_types={"cpu"}):
        loss = F.cross_entropy(model(x), target)
    assert seen_casts(loss) == {
        "AccumulateGrad -> AddmmBackward0": 2,
        "AccumulateGrad -> TBackward0": 2,
        "AddmmBackward0 -> LogSoftmaxBackward0": 1,
    }
