"""Which of torch's kernels promote by themselves: the proof of ``ops.ini``'s list."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hmpx import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = (((3,), (3,)), ((3,), ()), ((), (3,)), ((), ()))
PAIRS = [(a, b) for a, b in itertools.product(DTYPES, repeat=2) if a is not b]

#: Ops whose call is not ``op(a, b)``.
CALLS = {
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "where": lambda a, b: torch.where(torch.tensor(True), a, b),
    "block_diag": lambda a, b: torch.block_diag(a, b),
    "special_xlog1py": lambda a, b: torch.special.xlog1py(a, b),
    "l1_loss": lambda a, b: torch._C._nn.l1_loss(a, b, 0),
    "mse_loss": lambda a, b: torch._C._nn.mse_loss(a, b, 0),
    "smooth_l1_loss": lambda a, b: torch._C._nn.smooth_l1_loss(a, b, 0),
}
#: The losses broadcast before they reach their kernel, so that sees equal shapes.
SAME_SHAPES = {"stack", "l1_loss", "mse_loss", "smooth_l1_loss"}
NO_SCALARS = {"cat"}
NO_INPLACE = {"l1_loss", "mse_loss", "smooth_l1_loss"}


def value(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return (torch.rand(shape) + 0.5).to(dtype)


@pytest.mark.parametrize("name", sorted(ops.facts("promotes")))
def test_torch_promotes_to_exactly_the_result_type(name: str) -> None:
    """So a WIDEST op of this list needs no wrapper."""
    call = CALLS.get(name) or (lambda a, b: getattr(torch, name)(a, b))
    for (first, second), (left, right) in itertools.product(PAIRS, SHAPES):
        if (name in SAME_SHAPES and left != right) or (name in NO_SCALARS and not (left and right)):
            continue
        if name in ("igamma", "igammac") and torch.float64 in (first, second):
            continue
        a, b = value(left, first), value(right, second)
        result = call(a, b)
        if isinstance(result, Tensor) and result.dtype is not torch.bool:
            assert result.dtype is torch.result_type(a, b), (first, second, left, right)


@pytest.mark.parametrize("name", sorted(ops.facts("promotes")))
def test_torch_takes_mixed_types_in_place(name: str) -> None:
    """So ``x.op_(y)`` needs no wrapper: the kernel computes wide and rounds once."""
    if not hasattr(Tensor, f"{name}_"):
        assert not any(site.in_place for site in ops.table()[name].sites), name
        return
    for first, second in PAIRS:
        a, b = value((3,), first), value((3,), second)
        target = a.clone()
        getattr(target, f"{name}_")(*((b, b) if name in ("addcdiv", "addcmul") else (b,)))
        assert target.dtype is first


def test_no_op_of_the_shipped_widest_list_that_promotes_is_missing() -> None:
    """Each promoting op that is nowhere else stands in HMP's widest list, or is an operator's."""
    from hmpx import oplists

    widest = set(oplists.read_shipped("hmp/widest", "widest").ops)
    assert set(ops.facts("promotes")) - widest == set()
