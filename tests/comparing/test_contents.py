"""`hmpx.contents`: the dtype that values came from."""

from __future__ import annotations

import pytest
import torch

import hmpx
from tests.upstream_bugs import drawn

ALL = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_all_values_of_a_low_type_are_its_contents(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert hmpx.contents(ALL.view(dtype).to(wide)) is dtype


def test_a_mixture_needs_the_type_that_holds_all() -> None:
    assert (
        hmpx.contents(torch.cat([ALL.view(BF16).float(), ALL.view(FP16).float()])) is torch.float32
    )


@pytest.mark.parametrize("count", [20, 4096, 100_003])
def test_one_value_more_tells_them_apart(count: int) -> None:
    x = drawn(count).to(BF16).float()
    assert hmpx.contents(x) is BF16
    for place in (0, count // 2, count - 1):
        y = x.clone()
        y[place] = 0.1
        assert hmpx.contents(y) is torch.float32
    assert hmpx.contents(drawn(count)) is torch.float32
    assert hmpx.contents(drawn(count).double() / 3) is torch.float64


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(99), torch.full((50,), 0.5), torch.eye(40), torch.arange(250.0),
        torch.arange(250.0) / 256, torch.full((9,), float("nan")), torch.empty(0),
        torch.where(drawn(100) > 0, 0.0, -float("inf")),
        torch.arange(24.0) * 2.0 ** -torch.arange(2, 9, 2)[:, None],  # positions times slopes
    ],
)  # fmt: skip
def test_constants_masks_and_integers_are_no_evidence(values: torch.Tensor) -> None:
    assert hmpx.contents(values) is None


def test_other_dtypes_are_their_own_and_integers_refused() -> None:
    assert hmpx.contents(torch.ones(3, dtype=FP16)) is FP16
    with pytest.raises(hmpx.OptionError, match=r"not torch.int64"):
        hmpx.contents(torch.arange(3))


def test_negative_views() -> None:
    x = drawn(64, 2).to(BF16).float()
    assert hmpx.contents(torch.view_as_complex(x).conj().imag) is BF16


def test_freed_storage_is_refused() -> None:
    x = drawn(64)
    x.untyped_storage().resize_(0)
    with pytest.raises(hmpx.OptionError):
        hmpx.contents(x)


def test_views_and_subnormals() -> None:
    x = (drawn(64, 64) * 1e-36).to(BF16).float().T[::2]
    assert hmpx.contents(x) is BF16
