"""Convolutions with weights in the layout of oneDNN's kernels, so that no call needs to reorder them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import raised_here
from .torch_part import rely_on

_lay_out_2d, _lay_out_3d, _convolve = rely_on(
    "convolutions of prepared weights", instead=(None, None, None)
)


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution after its tensors: one number for each dimension, and the groups."""

    padding: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def can_be_laid_out(dimensions: int) -> bool:
    """Whether weights of convolutions with this number of dimensions can currently be laid out."""
    return bool(torch.backends.mkldnn.enabled) and _is_as_expected(dimensions)


@functools.cache
def _is_as_expected(dimensions: int) -> bool:
    """Checks a convolution with a known result, of two groups with strides of 2."""
    is_there: Any = torch.backends.mkldnn.is_available
    if dimensions not in {2, 3} or _convolve is None or not is_there():
        return False
    with torch.inference_mode(False), torch.no_grad():
        one, two = (1,) * dimensions, (2,) * dimensions
        count = 2**dimensions  # elements of a channel: 1, 2, ... and count + 1, ...
        x = torch.arange(1, 2 * count + 1, dtype=torch.float32, device="cpu").view(1, 2, *two)
        factors, bias = torch.tensor([[1.0, -2.0], [0.5, 0.25]], device="cpu")
        settings = ConvolutionSettings((0,) * dimensions, two, one, 2)
        try:
            weight = laid_out(factors.view(2, 1, *one), settings, x.shape)
            result = convolved(x, weight, bias, settings)
        except raised_here(RuntimeError, TypeError):  # another version of torch
            return False
    return result.shape == (1, 2, *one) and result.flatten().tolist() == [1.5, -2 * count - 1.75]


def laid_out(weight: Tensor, settings: ConvolutionSettings, shape: Sequence[int]) -> Tensor:
    """Returns a convolution's weight in the fastest layout for inputs of ``shape``."""
    lay_out: Any = _lay_out_2d if len(settings.padding) == 2 else _lay_out_3d
    found: Tensor = lay_out(weight.to_mkldnn(), *settings, list(shape))
    return found


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings
) -> Tensor:
    """Returns the convolution of ``x`` with a weight from `laid_out`."""
    found: Tensor = _convolve(x, weight, bias, *settings, "none", [], "")
    return found
