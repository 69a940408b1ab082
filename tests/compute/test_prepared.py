"""Frozen weights whose fp32 values are kept beside them, for legalized calls without gradients."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

import hmpx
from hmpx.compute.legalize import convolutions
from tests.values import normal

BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("lacks_low_precision"),
]


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_LEAST_PREPARED", 0)


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Returns a module and the shape of its input, by name."""
    torch.manual_seed(0)
    return {
        "linear": (nn.Linear(96, 64), (40, 96)),
        "linear without bias": (nn.Linear(96, 64, bias=False), (3, 5, 96)),
        "conv1d": (nn.Conv1d(8, 16, 3), (2, 8, 20)),
        "conv2d": (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 9, 7)),
        "no batch": (nn.Conv2d(8, 16, 3), (8, 9, 7)),
        "strides": (nn.Conv2d(8, 16, 3, stride=(2, 1), bias=False), (1, 8, 9, 7)),
        "dilation": (nn.Conv2d(8, 16, (2, 3), dilation=2), (1, 8, 9, 9)),
        "groups": (nn.Conv2d(16, 16, 3, groups=2), (1, 16, 9, 7)),
        "depthwise": (nn.Conv2d(16, 16, 3, groups=16), (1, 16, 9, 7)),
        "same": (nn.Conv2d(8, 16, 3, padding="same"), (1, 8, 9, 7)),
        "reflected": (nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"), (1, 8, 9, 7)),
        "one pixel": (nn.Conv2d(8, 16, 1), (1, 8, 1, 1)),
        "pointwise": (nn.Conv2d(8, 16, 1), (4, 8, 5, 5)),
        "conv3d": (nn.Conv3d(4, 8, 3, padding=1), (1, 4, 5, 6, 7)),
        "transposed": (nn.ConvTranspose2d(8, 4, 3), (1, 8, 5, 5)),
        "empty": (nn.Conv2d(8, 16, 3), (0, 8, 9, 7)),
        "lstm": (nn.LSTM(8, 16, batch_first=True), (2, 5, 8)),
        "attention": (nn.MultiheadAttention(16, 2, batch_first=True), (2, 5, 16)),
    }


#: Convolutions that raise their weights in each call.
UNPREPARED = {"transposed", "same", "no batch", "empty"}


def convert(low_precision_type: torch.dtype = BF16, legalize: str = "auto") -> hmpx.Session:
    return hmpx.convert(
        device_types={"cpu"}, low_precision_type=low_precision_type, legalize=legalize
    )


def called(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the first output."""
    arguments = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    found = module(*arguments)
    return found[0] if isinstance(found, tuple) else found


def freeze(module: nn.Module, x: Tensor, **options: Any) -> hmpx.Frozen:
    arguments = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    return hmpx.freeze(module.eval(), arguments, outputs="keep", **options)


def kept(module: nn.Module) -> int:
    """Returns how many of the weights have values beside them."""
    found = [convolutions.prepared(weight) for weight in module.parameters()]
    return sum(each is not None and bool(each._kept) for each in found)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", layers())
def test_results_are_those_of_weights_that_are_raised(name: str, dtype: torch.dtype) -> None:
    """But for the order of sums: at most a unit in the last place where one was near a tie."""
    module, shape = layers()[name]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        is_image = len(shape) == 4
        x = normal(*shape, seed=1)
        if memory_format is torch.channels_last:
            if not is_image:
                continue
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), convert(dtype, legalize="always"):
            with freeze(module, x):
                expected = called(module, x)
            with freeze(module, x, store="prepared"):
                assert kept(module) == 0
                actual = called(module, x)
                again = called(module, x)
                is_kept = "Conv" in type(module).__name__ and name not in UNPREPARED
                assert kept(module) == is_kept
        assert torch.equal(actual, again)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.is_contiguous() == expected.is_contiguous()
        unit = torch.finfo(dtype).eps * expected.float().abs().clamp(min=0.01)
        difference = (actual.float() - expected.float()).abs()
        assert (difference <= unit).all()
        assert (difference > 0).float().mean().nan_to_num() < 0.01


def test_writes_and_moves_are_seen() -> None:
    module, x = nn.Conv2d(8, 16, 3, bias=False), normal(1, 8, 9, 9)
    with torch.no_grad(), convert(), freeze(module, x, store="prepared"):
        first = module(x)
        module.weight.mul_(2)
        assert torch.equal(module(x), 2 * first)
        assert kept(module) == 1
        module.weight.data = module.weight.data / 2
        torch.testing.assert_close(module(x), first, rtol=0.01, atol=0.01)
        assert kept(module) == 0


def test_calls_that_record_gradients_are_those_that_do_not() -> None:
    module, x = nn.Conv2d(8, 16, 3), normal(1, 8, 9, 9).requires_grad_()
    with convert():
        with freeze(module, x):
            (expected_gradient,) = torch.autograd.grad(module(x).float().sum(), x)
        with freeze(module, x, store="prepared"):
            with torch.no_grad():
                expected = module(x)
            assert kept(module) == 1
            actual = module(x)
            (actual_gradient,) = torch.autograd.grad(actual.float().sum(), x)
    assert torch.equal(actual, expected)
    assert torch.equal(actual_gradient, expected_gradient)


def test_transforms_modes_and_other_weights_are_as_ever() -> None:
    module, x = nn.Conv2d(8, 16, 3), normal(3, 1, 8, 9, 9)
    with torch.no_grad(), convert(), freeze(module, x[0]):
        expected = torch.stack([module(each) for each in x])
    with torch.no_grad(), convert(), freeze(module, x[0], store="prepared"):
        module(x[0])
        assert torch.equal(vmap(module)(x), expected)
        with FlopCounterMode(display=False) as counter:
            assert torch.equal(module(x[0]), expected[0])
        assert counter.get_total_flops() > 0
        others = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        assert not functional_call(module, others, (x[0],)).any()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x[0], x[1])
            tangent = forward_ad.unpack_dual(module(dual)).tangent
        no_bias = module(torch.zeros_like(x[0]))
        torch.testing.assert_close(tangent, expected[1] - no_bias, rtol=0.02, atol=0.02)


def test_what_is_kept_is_freed() -> None:
    """By undo, and with the model."""
    module, x = nn.Conv2d(8, 16, 3), normal(1, 8, 9, 9)
    with torch.no_grad(), convert():
        frozen = freeze(module, x, store="prepared")
        module(x)
        assert kept(module) == 1
        frozen.undo()
        assert kept(module) == 0
        assert not convolutions._prepared
        frozen = freeze(module, x, store="prepared")
        module(x)
        del module, frozen
        gc.collect()
        assert not convolutions._prepared
