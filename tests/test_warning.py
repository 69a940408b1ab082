"""Warnings of torch name the line that they name without hmpx, and filters see the module there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

X = torch.ones(4, 4)

#: In Python at levels 2 and 3, in a function that one of them calls, and in C++.
CALLS: dict[str, Callable[[], Any]] = {
    "dropout2d": lambda: F.dropout2d(X),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(X, torch.ones(4, 1)),
    "softmin": lambda: F.softmin(X),
    "gumbel_softmax": lambda: F.gumbel_softmax(X, eps=1e-9),
    "multi_margin_loss": lambda: F.multi_margin_loss(X, torch.arange(4), size_average=False),
    "std": lambda: torch.ones(1).std(),
    "mm": lambda: torch.mm(X, X, out=torch.empty(3)),
    "range": lambda: torch.range(0, 3),
    "chain_matmul": lambda: torch.chain_matmul(X, X),
    "conv1d": lambda: F.conv1d(X[None], torch.ones(4, 4, 2), padding="same"),
    "attention": lambda: nn.MultiheadAttention(4, 2)(
        X, X, X, torch.zeros(4, dtype=torch.bool), attn_mask=torch.zeros(4, 4)
    ),
}


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Torch gives some warnings once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def places(call: Callable[[], Any]) -> list[tuple[str, int, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(each.filename, each.lineno, str(each.message)) for each in caught]


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": {"lists": "none", "fp32": "*"}}, {"lists": "hmp"}, {"isVerbose": True}],
)
def test_they_name_the_line_that_they_name_without_hmpx(options: dict[str, Any]) -> None:
    """Whatever wrappers are between."""
    expected = {name: places(call) for name, call in CALLS.items()}
    assert all(expected.values())
    with hmpx.convert(device_types={"cpu"}, **options):
        assert {name: places(call) for name, call in CALLS.items()} == expected


@pytest.mark.parametrize("name", ["std", "gumbel_softmax"])
def test_filters_see_the_module_there(name: str) -> None:
    """And what was given before is noted there."""
    with hmpx.convert(opt_level="O2", device_types={"cpu"}), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            CALLS[name]()
        warnings.simplefilter("always")
        warnings.filterwarnings("error", module=__name__)
        with pytest.raises(UserWarning):
            CALLS[name]()
    with hmpx.convert(opt_level="O2"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__)
        CALLS[name]()
    assert not caught
