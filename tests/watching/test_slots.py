"""Extremes of tensors: those by compiled kernels and those by torch's ops are the same, and right."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hmpx.number_formats import kernels
from hmpx.watching import slots
from hmpx.watching.slots import Slots

LOW = [torch.bfloat16, torch.float16]
DTYPES = [*LOW, torch.float32, torch.float64]
ids = {"ids": lambda value: str(value).removeprefix("torch.")}

INFINITY, NAN = math.inf, math.nan


@pytest.fixture(params=["kernels", "ops"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what finds the extremes of a tensor, by kernels or by ops."""
    is_compiled = request.param == "kernels"
    chosen = kernels.extremes_kernels() if is_compiled else {}
    if is_compiled and not chosen:
        pytest.skip("hmpx was installed without a C compiler")
    used: list[torch.dtype] = []

    def noted(dtype: torch.dtype) -> Any:
        def find(*args: int) -> None:
            used.append(dtype)
            chosen[dtype](*args)

        return find

    monkeypatch.setattr(slots, "extremes_kernels", lambda: {each: noted(each) for each in chosen})

    def find(*tensors: Tensor, by_kernel: bool = True) -> list[tuple[float, float] | None]:
        used.clear()
        measured = Slots()
        numbers = [measured.measure(each) for each in tensors]
        assert used == [each.dtype for each in tensors if by_kernel and each.dtype in chosen]
        values = measured.read(always=True) or {}
        return [None if each is None else values[each] for each in numbers]

    return find


def expected(tensor: Tensor) -> tuple[float, float]:
    """Returns the extremes by numpy; NaN for both if there is one."""
    values = tensor.detach().resolve_neg().double().numpy()
    return float(np.min(values)), float(np.max(values))


def assert_same(actual: tuple[float, float] | None, wanted: tuple[float, float]) -> None:
    assert actual is not None
    assert all(
        a == w or (math.isnan(a) and math.isnan(w)) for a, w in zip(actual, wanted, strict=True)
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", LOW, **ids)
def test_each_number_of_16_bits(found: Any, dtype: torch.dtype) -> None:
    """Each bit pattern beside zero: all infinities and NaNs of either sign, subnormals, the largest."""
    patterns = torch.arange(-(2**15), 2**15, 5).to(torch.int16)
    edges = torch.tensor([0x7F7F, 0x7F80, 0x7F81, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF, 1, 0x400, 0x80])
    edges = torch.cat([edges, edges - 2**15]).to(torch.int16)
    alone = torch.cat([patterns, edges]).view(dtype)
    rows = torch.stack([alone, torch.zeros_like(alone)], 1)
    for actual, row in zip(found(*rows), rows, strict=True):
        assert_same(actual, expected(row))


@pytest.mark.parametrize("dtype", DTYPES, **ids)
def test_edges_beside_each_other(found: Any, dtype: torch.dtype) -> None:
    facts = torch.finfo(dtype)
    edges = [
        0.0, -0.0, facts.max, facts.min, facts.tiny, -facts.tiny, facts.smallest_normal / 2,
        -facts.smallest_normal / 2, INFINITY, -INFINITY, NAN, -NAN, 1.0,
    ]  # fmt: skip
    pairs = [torch.tensor(pair, dtype=dtype) for pair in itertools.product(edges, repeat=2)]
    for actual, pair in zip(found(*pairs), pairs, strict=True):
        assert_same(actual, expected(pair))


@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 1000, 40_000])
def test_one_value_anywhere(found: Any, dtype: torch.dtype, count: int) -> None:
    """An infinity or a NaN shows at the first place, at the last, and between; so does a finite extreme."""
    tensors = []
    for place, value in itertools.product(
        {0, count // 2, count - 1}, [INFINITY, -INFINITY, NAN, 9.0]
    ):
        tensor = normal(count).to(dtype)
        tensor[place] = value
        tensors.append(tensor)
    for actual, tensor in zip(found(*tensors), tensors, strict=True):
        assert_same(actual, expected(tensor))


def test_complex_numbers(found: Any) -> None:
    values = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([-3.0, INFINITY]))
    slots = Slots()
    slot = slots.measure(values)
    assert slot is not None and slots.read() == {slot: (-3.0, INFINITY)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("position", [0, 255, 256, 299])
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_one_value_in_one_of_many_slots_is_read(found: Any, value: float, position: int) -> None:
    """Slots are in several pieces of memory from the 256th on."""
    tensors = [torch.tensor([0.5, float(each)]) for each in range(300)]
    tensors[position][0] = value
    measured = Slots()
    numbers = [measured.measure(each) for each in tensors]
    values = measured.read()
    assert values is not None
    for number, tensor in zip(numbers, tensors, strict=True):
        assert number is not None
        assert_same(values[number], expected(tensor))
    assert measured.read() is None
