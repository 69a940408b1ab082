"""What numpy gets of bfloat16 tensors: float32 while torch is converted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hmpx


class Plain(Tensor):
    """A subclass, whose calls go by ``__torch_function__``."""


FORMS: dict[str, Any] = {
    "numpy": lambda t: t.numpy(),
    "numpy(force=True)": lambda t: t.numpy(force=True),
    "force, of a leaf": lambda t: t.clone().requires_grad_().numpy(force=True),
    "asarray": lambda t: np.asarray(t),
    "array": lambda t: np.array(t),
    "__array__": lambda t: t.__array__(),
    "from_dlpack": lambda t: np.from_dlpack(t),
    "list": lambda t: np.array([t, t])[0],
    "subclass": lambda t: t.as_subclass(Plain).numpy(),
    "item": lambda t: np.array([v.item() for v in t], dtype=np.float32),
    "tolist": lambda t: np.array(t.tolist(), dtype=np.float32),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("form", FORMS)
def test_numpy_gets_the_values_in_float32(form: str) -> None:
    """However it asks."""
    values = torch.tensor([1.5, -0.25, float("inf")]).bfloat16()
    with hmpx.convert():
        array = FORMS[form](values)
    assert array.dtype == np.float32
    assert array.tolist() == values.tolist()


def test_other_dtypes_share_their_memory() -> None:
    """A bfloat16 tensor gives a copy."""
    wide, low = torch.zeros(2), torch.zeros(2).bfloat16()
    with hmpx.convert():
        wide.numpy()[0] = 1
        low.numpy()[0] = 1
        assert torch.zeros(2).half().numpy().dtype == np.float16
        assert np.asarray(low, dtype=np.float64).dtype == np.float64
    assert wide.tolist() == [1, 0]
    assert low.tolist() == [0, 0]


def test_a_tensor_that_records_gradients_is_refused_as_ever() -> None:
    """With torch's own words."""
    with hmpx.convert(), pytest.raises(RuntimeError, match="requires grad"):
        torch.zeros(2).bfloat16().requires_grad_().numpy()


def test_revert_ends_it() -> None:
    """For references that were kept, too."""
    before = np.from_dlpack
    with hmpx.convert():
        kept = Tensor.numpy
        assert torch.from_dlpack(torch.zeros(2).bfloat16()).dtype is torch.bfloat16
    assert np.from_dlpack is before
    for function in (kept, Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="BFloat16"):
            function(torch.zeros(2).bfloat16())
