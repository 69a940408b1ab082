"""bfloat16 as uint16: every encoding, and every way to round to one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from hmpx import OptionError
from hmpx.legalize import from_uint16, to_uint16

ALL = np.arange(2**16, dtype=np.uint16)
BF16 = torch.bfloat16


def rounded_by_hand(bits: np.ndarray) -> np.ndarray:
    """Returns bf16 encodings of fp32 bits, nearest-even in integers; [n] uint32 -> [n] uint16."""
    wide = bits.astype(np.uint64)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)


def test_every_encoding_comes_back() -> None:
    """All 65,536, NaNs with their payload; and they mean what ml_dtypes says."""
    tensor = from_uint16(ALL)
    assert tensor.dtype is BF16
    np.testing.assert_array_equal(to_uint16(tensor), ALL)
    np.testing.assert_array_equal(
        tensor.float().numpy(), ALL.view(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("low_bits", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_of_every_upper_half(low_bits: int) -> None:
    """Below, at and above each tie: subnormals, the step to infinity, NaNs."""
    bits = (ALL.astype(np.uint32) << 16) | np.uint32(low_bits)
    actual = to_uint16(bits.view(np.float32))
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(actual[~is_nan], rounded_by_hand(bits)[~is_nan])
    assert torch.isnan(from_uint16(actual[is_nan])).all()
    cast = torch.from_numpy(bits.view(np.float32)).bfloat16()
    np.testing.assert_array_equal(actual, to_uint16(cast))


def test_a_million_random_values_round_as_ml_dtypes_does() -> None:
    """Any fp32 bits but NaNs."""
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(to_uint16(values), expected)
    np.testing.assert_array_equal(to_uint16(torch.from_numpy(values)), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_types_shapes_and_layouts(dtype: np.typing.DTypeLike, shape: tuple[int, ...]) -> None:
    """Also byte-swapped, read-only, reversed, transposed; the result is nobody else's."""
    values = np.full(shape, 1.5, dtype)
    values.flags.writeable = False
    encoded = to_uint16(values.T[::-1] if shape else values)
    assert encoded.shape == values.T.shape
    assert (encoded == 0x3FC0).all()
    tensor = from_uint16(encoded)
    assert tensor.shape == encoded.shape
    tensor.fill_(2.0)
    assert (encoded == 0x3FC0).all()
    assert (to_uint16(tensor.t() if tensor.dim() == 2 else tensor) == 0x4000).all()


def test_other_types_are_refused() -> None:
    """With what was given and what is wanted."""
    with pytest.raises(OptionError, match="values must be float16, float32 or float64, not int64"):
        to_uint16(np.array([1]))
    with pytest.raises(OptionError, match=r"values must be floating, not torch\.int64"):
        to_uint16(torch.tensor([1]))
    with pytest.raises(OptionError, match="encoded bfloat16 must be uint16, not float32"):
        from_uint16(np.ones(2, np.float32))
