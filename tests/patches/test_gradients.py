"""Hooks of the backward that compute gradients while torch is converted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

BF16, FP32 = torch.bfloat16, torch.float32
MATRIX = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _converted() -> Iterator[None]:
    torch.manual_seed(0)
    with hmpx.convert():
        yield


def leaf() -> Tensor:
    return torch.randn(8, 8, requires_grad=True)


def of_parameter(y: Tensor) -> Tensor:
    weight = leaf()
    weight.register_hook(lambda g: g @ MATRIX)
    return weight


def by_decorator(y: Tensor) -> Tensor:
    weight = leaf()

    @weight.register_hook
    def _(g: Tensor) -> Tensor:
        return MATRIX @ g

    return weight


def set_after_accumulation(y: Tensor) -> Tensor:
    weight = leaf()

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad @ MATRIX

    weight.register_post_accumulate_grad_hook(hook)
    return weight


def with_an_activation(y: Tensor) -> Tensor:
    weight = leaf()
    weight.register_hook(lambda g: g - g @ (y.mT @ y))
    return weight


HOOKS: list[Callable[[Tensor], Tensor]] = [
    of_parameter,
    by_decorator,
    set_after_accumulation,
    with_an_activation,
]


@pytest.mark.parametrize("hooked", HOOKS)
def test_hooks_of_tensors_compute_as_torch_autocast_has_them(
    hooked: Callable[[Tensor], Tensor],
) -> None:
    """That ends before the backward: products of fp32 gradients are fp32. Mixed inputs are upcast."""
    activation = torch.randn(8, 8) @ MATRIX
    assert activation.dtype is BF16
    given = torch.randn(8, 8)
    weight = hooked(activation)
    (weight * given).sum().backward()
    with hmpx.disable_casts():
        exact = hooked(activation.float())
        (exact * given).sum().backward()
    assert weight.grad is not None
    assert exact.grad is not None
    rounding = 2**-8 * exact.grad.abs().max() if hooked is with_an_activation else 0
    assert (weight.grad - exact.grad).abs().max() <= rounding


def test_low_gradients_stay_low() -> None:
    seen = []

    def hook(g: Tensor) -> Tensor:
        products = g @ g, g @ MATRIX
        seen.extend([g.dtype, *[each.dtype for each in products]])
        return products[1]

    weight = leaf()
    y = torch.randn(8, 8) @ weight
    y.register_hook(hook)
    (torch.relu(y) @ MATRIX).sum().backward()
    assert seen == [BF16, BF16, FP32]


def full(module: nn.Module, given: Any, of_outputs: Any) -> Any:
    return (given[0] @ MATRIX, *given[1:])


def full_as_list(module: nn.Module, given: Any, of_outputs: Any) -> Any:
    return [given[0] @ MATRIX, *given[1:]]


def before(module: nn.Module, given: Any) -> Any:
    return (given[0] @ MATRIX,)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("hook", [full, full_as_list, before])
def test_hooks_of_modules(hook: Callable[..., Any], is_early: bool) -> None:
    """Those that were registered before the conversion, too."""

    def registered() -> nn.Module:
        module = nn.Hardtanh()
        if hook is before:
            module.register_full_backward_pre_hook(hook)
        else:
            module.register_full_backward_hook(hook)
        return module

    hmpx.revert()
    module = registered()
    x, given = leaf(), torch.randn(8, 8)
    (module(x) * given).sum().backward()
    expected, x.grad = x.grad, None
    with hmpx.convert():
        if not is_early:
            module = registered()
        (module(x) * given).sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    copy.deepcopy(module)


def test_hooks_are_reported_with_what_they_compute() -> None:
    calls: list[hmpx.OpCall] = []
    weight = of_parameter(leaf())
    with hmpx.attach(calls.append):
        (weight * torch.randn(8, 8)).sum().backward()
    (call,) = [each for each in calls if each.op == "matmul"]
    assert call.cast_policy == "FOLLOW"
    assert call.reason.endswith("in a hook of the backward")
    assert call.output_dtypes == (FP32,)


def test_after_the_conversion_a_hook_runs_as_it_is() -> None:
    weight = of_parameter(leaf())
    hmpx.revert()
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(8, 8) @ MATRIX)  # type: ignore[arg-type]


def test_compiled_functions_are_compiled_for_hooks_and_for_forwards() -> None:
    compiled = torch.compile(lambda g: g @ MATRIX, backend="eager")
    assert compiled(torch.randn(8, 8)).dtype is BF16
    weight = leaf()
    weight.register_hook(compiled)
    (weight * torch.randn(8, 8)).sum().backward()
    assert weight.grad is not None
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
    assert compiled(torch.randn(8, 8)).dtype is BF16
