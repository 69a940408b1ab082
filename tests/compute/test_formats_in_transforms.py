"""Number formats under torch.func and forward-mode gradients: nothing stops, and no gradient is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.fx.experimental.proxy_tensor import make_fx

import hmpx
from hmpx.formats import quantize

from ..values import normal

#: By the import of torch.func.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

FORMATS = ("float8_e4m3fn", "float8_e4m3fn_tensor", "float8_e4m3fn_row", "mxfp8_e4m3", "posit16_1")


def converted(format: str, round_gradients: bool, **options: Any) -> Any:
    """Returns a conversion with two products in a format."""
    policy = hmpx.Policy.from_ops(low=["linear", "matmul"], low_precision_type=format)
    return hmpx.convert(policy=policy, round_gradients=round_gradients, **options)


def gradient_of(outcome: Tensor, weight: nn.Parameter) -> Tensor:
    """Returns the gradient of a parameter that transforms do not transform."""
    (found,) = torch.autograd.grad(outcome.sum(), weight)
    return found


def by_dual_numbers(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns the tangent that torch.autograd.forward_ad computes."""
    with forward.dual_level():
        return forward.unpack_dual(function(forward.make_dual(x, x))).tangent


@pytest.mark.parametrize("round_gradients", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_parameters_behind_transforms_get_gradients(format: str, round_gradients: bool) -> None:
    """Of results, of gradients and of tangents, as in fp32: near to what those are."""
    weight, rows = nn.Parameter(normal(32, 32, seed=1)), normal(3, 32, seed=2)

    def function(a: Tensor) -> Tensor:
        return a @ weight

    ways: list[Callable[[], Tensor]] = [
        lambda: torch.vmap(function)(rows),
        lambda: torch.vmap(torch.vmap(function))(rows.view(3, 1, 32)),
        lambda: torch.func.grad(lambda a: function(a).sum())(rows),
        lambda: torch.vmap(torch.func.grad(lambda a: function(a).sum()))(rows),
        lambda: torch.func.jvp(function, (rows,), (rows,))[0],
        lambda: torch.func.jvp(function, (rows,), (rows,))[1],
        lambda: by_dual_numbers(function, rows),
    ]
    expected = [gradient_of(way(), weight) for way in ways]
    with converted(format, round_gradients):
        found = [gradient_of(way(), weight) for way in ways]
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.norm(one - other) < 0.1 * torch.linalg.norm(other)


def test_graphs_pass_gradients_to_what_a_transform_maps() -> None:
    """bfloat16, too, which is rounded by arithmetic there."""
    weight, rows = normal(8, 8), normal(3, 8, seed=1)

    def loss(a: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.mv(a, row))(rows).float().sum()

    expected = torch.func.grad(loss)(weight)
    with hmpx.convert():
        found = make_fx(torch.func.grad(loss))(weight)(weight)
    assert torch.linalg.norm(found - expected) < 0.02 * torch.linalg.norm(expected)


@pytest.mark.parametrize("format", [*FORMATS, "nf4", "nvfp4"])
def test_stochastic_rounding_draws_for_each_that_is_mapped(format: str) -> None:
    """torch.vmap refuses random ops unless it is told otherwise; what it maps is rounded apart."""
    x = normal(1000).expand(64, 1000).contiguous()
    step = quantize(x, format, "up") - quantize(x, format, "down")

    own = torch.Generator()
    for generator in (None, own):
        round_ = functools.partial(
            quantize, format=format, rounding="stochastic", generator=generator
        )
        torch.manual_seed(1)
        own.manual_seed(1)
        once = torch.vmap(round_)(x)
        twice = torch.vmap(torch.vmap(round_))(x.view(8, 8, 1000)).view(64, 1000)
        torch.manual_seed(1)
        own.manual_seed(1)
        assert torch.equal(torch.vmap(round_)(x), once)
        for found in (once, twice):
            errors = found - x
            assert errors.abs().max() <= step.max()
            # The mean of a row's errors is within 5 of its own deviations, and no two rows are alike.
            assert errors.mean(1).abs().max() <= 5 * step.max() / 2 / 1000**0.5
            assert len({tuple(row) for row in found.tolist()}) == 64
    with torch.random.fork_rng():
        for way in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
            weight = normal(32, 32)
            with converted(format, round_gradients=True, rounding="stochastic"):
                found = way(lambda a, weight=weight: (a @ weight).sin().sum())(normal(32, seed=2))
            assert torch.isfinite(found).all()


#: Functions of one tensor whose gradients torch may compute in a batch.
BATCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, normal(4, 3)),
    "matmul": lambda x: (x @ normal(3, 4)).sin(),
    "conv1d": lambda x: F.conv1d(x[None], normal(4, 2, 2)).sin(),
    "softmax": lambda x: torch.softmax(x, -1),
    "nested": lambda x: jacobian(
        lambda y: (y @ normal(3, 4)).sin(), x, create_graph=True, vectorize=True
    ),
}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", [*FORMATS, "nf4", "nvfp4"])
@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_gradients(name: str, format: str, rounding: str) -> None:
    """As one by one, by `vectorize=True` and `is_grads_batched=True`, also of batches of batches."""
    function, x = BATCHED[name], normal(2, 3, seed=2)
    policy = hmpx.Policy.from_ops(
        low=["linear", "matmul", "conv1d", "softmax"], low_precision_type=format
    )
    with hmpx.convert(policy=policy, round_gradients=True, rounding=rounding):
        found, expected = (jacobian(function, x, vectorize=way) for way in (True, False))
        leaf = x.clone().requires_grad_()
        outcome = function(leaf)
        incoming = normal(5, *outcome.shape, seed=3)
        (many,) = torch.autograd.grad(
            outcome, leaf, incoming, is_grads_batched=True, retain_graph=True
        )
        one_by_one = [
            torch.autograd.grad(outcome, leaf, each, retain_graph=True)[0] for each in incoming
        ]
    if rounding == "nearest":
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(many, torch.stack(one_by_one))
    else:
        assert torch.isfinite(found).all() and found.shape == expected.shape
        assert len({tuple(row) for row in found.view(-1, 6).tolist()}) > 2
        assert torch.isfinite(many).all()


def test_parameters_are_weights_in_transforms() -> None:
    """Of ops that name no weights: values and gradients are autograd's."""
    model, x = nn.ParameterDict({"w": nn.Parameter(normal(8, 4))}), normal(3, 8, seed=1)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (x @ parameters["w"]).sin().sum()

    parameters = dict(model.named_parameters())
    policy = {"low": ["matmul float8_e4m3fn weights=nf4 gradients=float8_e5m2"]}
    with hmpx.convert(policy=policy):
        (expected,) = torch.autograd.grad(loss(parameters), [*parameters.values()])
        found, value = torch.func.grad_and_value(loss)(parameters)
        assert torch.equal(found["w"], expected) and torch.equal(value, loss(parameters).detach())
        nested = torch.func.grad(lambda p: torch.func.grad_and_value(loss)(p)[1])(parameters)
        assert torch.equal(nested["w"], expected)
        alone = loss({"w": model["w"].detach()})
    assert not torch.equal(alone, value)  # what is no parameter is no weight


@pytest.mark.parametrize("format", FORMATS)
def test_norms_keep_their_parameters_in_transforms(format: str) -> None:
    """Weight and bias are not rounded, nor are their gradients: values and gradients are autograd's."""
    weight, bias = normal(32, seed=1), normal(32, seed=2)
    x, incoming = normal(4, 32), normal(4, 32, seed=3)

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        return (F.layer_norm(x, (32,), weight, bias) * incoming).sum()

    leaves = [each.clone().requires_grad_() for each in (weight, bias)]
    policy = hmpx.Policy.from_ops(low=["layer_norm"], low_precision_type=format)
    with hmpx.convert(policy=policy, round_gradients=True):
        expected = torch.autograd.grad(loss(*leaves), leaves)
        found = torch.func.grad(loss, (0, 1))(weight, bias)
        rows = torch.vmap(lambda row: F.layer_norm(row, (32,), weight, bias))(x)
        whole = torch.stack([F.layer_norm(row, (32,), weight, bias) for row in x])
    assert all(map(torch.equal, found, expected))
    assert torch.equal(rows, whole)
