"""Weights of frozen models, under what programs do to parameters between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import hmpx

pytestmark = pytest.mark.usefixtures("lacks_low_precision")


def square() -> tuple[nn.Module, Tensor]:
    """Returns a linear layer whose weight has the shape of its transpose, and an input."""
    torch.manual_seed(0)
    return nn.Linear(512, 512).eval(), torch.randn(4, 512)


def convolution() -> tuple[nn.Module, Tensor]:
    """Returns a convolution, and an input."""
    torch.manual_seed(0)
    return nn.Conv2d(64, 64, 3).eval(), torch.randn(1, 64, 10, 10)


LAYERS = {"linear": square, "conv2d": convolution}


@pytest.fixture(autouse=True)
def converted() -> Iterator[None]:
    with hmpx.convert(legalize="always", device_types={"cpu"}), torch.no_grad():
        yield


def by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns what the layer computes with the weights that it has now, rounded as bfloat16."""
    weight, bias = (p.detach().clone().bfloat16().float() for p in (layer.weight, layer.bias))
    op = torch.nn.functional.linear if isinstance(layer, nn.Linear) else torch.nn.functional.conv2d
    with hmpx.disable_casts():
        return op(x.bfloat16().float(), weight, bias).bfloat16().float()


def negated(weight: Tensor) -> Tensor:
    return torch._neg_view(weight)


def transposed(weight: Tensor) -> Tensor:
    return weight.transpose(0, 1)


def first_row_everywhere(weight: Tensor) -> Tensor:
    return weight[:1].expand(weight.shape)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("view", [negated, transposed, first_row_everywhere])
def test_data_replaced_by_a_view_of_the_same_memory_is_seen(
    view: Callable[[Tensor], Tensor], name: str
) -> None:
    layer, x = LAYERS[name]()
    frozen = hmpx.freeze(layer, x)
    before = layer(x)
    layer.weight.data = view(layer.weight.data)
    expected = by_hand(layer, x)
    assert not torch.allclose(before, expected, atol=0.02)
    torch.testing.assert_close(layer(x), expected, atol=0.02, rtol=0.01)
    frozen.undo()


@pytest.mark.parametrize("name", LAYERS)
def test_other_values_at_the_same_address_are_seen(name: str) -> None:
    """As in programs that hold weights elsewhere between calls: no write to a weight is hidden."""
    layer, x = LAYERS[name]()
    frozen = hmpx.freeze(layer, x)
    weight = layer.weight
    pool = weight.detach().clone()
    weight.data = pool[:]
    layer(x)
    weight.data = torch.empty(0, dtype=weight.dtype)
    pool.fill_(0.25)
    weight.data = pool[:]
    torch.testing.assert_close(layer(x), by_hand(layer, x), atol=0.05, rtol=0.01)
    frozen.undo()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("slot", ["weight", "bias"])
def test_parameters_can_be_swapped(slot: str, name: str) -> None:
    layer, x = LAYERS[name]()
    frozen = hmpx.freeze(layer, x)
    layer(x)
    parameter = getattr(layer, slot)
    with hmpx.disable_casts():  # it is to stay low, as what it is made from
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * -50))
    torch.testing.assert_close(layer(x), by_hand(layer, x), atol=0.3, rtol=0.01)
    frozen.undo(strict=False)


@pytest.mark.parametrize("name", LAYERS)
def test_inference_tensors_are_raised_each_time(name: str) -> None:
    """Their writes are not counted."""
    with torch.inference_mode():
        layer, x = LAYERS[name]()
        hmpx.freeze(layer, x, keep_fp32=False)
        before = layer(x)
        layer.weight.mul_(2)
        expected = by_hand(layer, x)
        assert not torch.allclose(before, expected, atol=0.02)
        torch.testing.assert_close(layer(x), expected, atol=0.02, rtol=0.01)
