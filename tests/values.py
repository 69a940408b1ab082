"""Tensors from a fixed seed, tensors within nested values, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

FP32, FP64 = torch.float32, torch.float64


def normal(
    *shape: int,
    dtype: torch.dtype = FP32,
    seed: int = 0,
    requires_grad: bool = False,
    drawn_in: torch.dtype = FP32,
) -> Tensor:
    """Returns normally distributed numbers, the same ones each time, those of ``drawn_in`` rounded."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=drawn_in)
    return drawn.to(dtype).requires_grad_(requires_grad)


def uniform(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Returns numbers between 0 and 1, the same ones each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=FP64 if dtype is FP64 else FP32).to(dtype)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with ``function`` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list):
        return [mapped(item, function) for item in value]
    if type(value) is tuple:
        return tuple(mapped(item, function) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    return value


def same(actual: Any, expected: Any, *, check_stride: bool = False) -> None:
    """Fails unless both are equal bit for bit, -0 and 0 apart, and without a NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=check_stride)


def same_or_nan(actual: Any, expected: Any) -> None:
    """As `same`, but NaNs may stand in the same places of both."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
