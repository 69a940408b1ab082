"""Which of torch's kernels promote by themselves: the proof of ``ops.ini``'s list."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
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
    from hmpx.policy import lists as oplists

    widest = set(oplists.read_shipped("hmp/widest", "widest").ops)
    assert set(ops.facts("promotes")) - widest == set()


# --- gradients ---------------------------------------------------------------------------------

#: Pairs of a low dtype and fp32, either first.
MIXED = [pair for pair in PAIRS if torch.float32 in pair and torch.float64 not in pair]
#: Take two tensors of one dtype, or give no gradients.
NO_GRADIENTS = {"equal", "isin", "igamma", "igammac", "nextafter", "floor_divide"} | {
    name for name in ops.facts("promotes") if name[:2] in ("eq", "ge", "gt", "le", "lt", "ne")
}


def outcome(call: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor, *, cast: bool) -> Any:
    """Returns outputs and gradients of a call on mixed types, or on what they are cast to.

    Those of second order are the last two.
    """
    inputs = [t.detach().requires_grad_() for t in (a, b)]
    result = call(*[t.float() for t in inputs] if cast else inputs)
    if not result.dtype.is_floating_point or not result.requires_grad:
        return [result]
    weights = torch.linspace(0.3, 1.7, result.numel()).view_as(result)
    first = torch.autograd.grad(result, inputs, weights, allow_unused=True, create_graph=True)
    squares = [g.float().pow(2).sum() for g in first if g is not None and g.requires_grad]
    second = [None, None]
    if squares:
        second = torch.autograd.grad(torch.stack(squares).sum(), inputs, allow_unused=True)
    return [result.detach(), *[g if g is None else g.detach() for g in first], *second]


#: Calls that show what gradients are computed in.
WITH_GRADIENTS = {
    **CALLS,
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.3),
}


def is_equal(name: str, *, in_second_order: bool = True) -> bool:
    call = WITH_GRADIENTS.get(name) or (lambda a, b: getattr(torch, name)(a, b))
    for first, second in MIXED:
        a, b = value((64,), first), value((64,), second).flip(0) - 0.45
        try:
            found = [outcome(call, a, b, cast=cast) for cast in (True, False)]
        except RuntimeError as error:  # of torch 2.11: mse_loss has none
            assert "Found dtype" in str(error)
            return False
        if not in_second_order:
            found = [each[:3] for each in found]
        for actual, expected in zip(*found, strict=True):
            if (actual is None) is not (expected is None):
                return False
            if actual is not None and not torch.equal(actual, expected):
                return False
    return True


@pytest.mark.parametrize("name", sorted(set(ops.facts("promotes")) - NO_GRADIENTS))
def test_gradients_of_mixed_types_are_those_of_casts(name: str) -> None:
    """Bit for bit, except for those that the data names; these are cast."""
    is_rounded = name in ops.facts("rounds_mixed")
    assert is_equal(name) is not (is_rounded or name in ops.facts("rounds_terms"))
    assert is_rounded or is_equal(name, in_second_order=False)


@pytest.mark.parametrize("name", sorted(ops.facts("rounds_mixed")))
@pytest.mark.parametrize("kind", ["widest", "fp32"])
def test_those_that_round_are_cast(name: str, kind: str) -> None:
    """As torch.autocast casts addcdiv, addcmul and atan2; in place torch's kernel computes."""
    with hmpx.convert(policy={"lists": "none", kind: [name]}):
        assert is_equal(name)
        for target in (torch.float32, torch.bfloat16):
            if hasattr(Tensor, f"{name}_"):
                x, other = value((4,), target), value((4,), torch.bfloat16)
                getattr(x, f"{name}_")(*((other, other) if name.startswith("addc") else (other,)))
                assert x.dtype is target


class Copies(TorchDispatchMode):
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(set(ops.facts("promotes")) - NO_GRADIENTS))
def test_in_the_fp32_list_mixed_types_are_not_cast(name: str) -> None:
    """Where torch computes in fp32 by itself: no more is copied than by torch, with equal results."""
    call = CALLS.get(name) or (lambda a, b: getattr(torch, name)(a, b))
    for dtypes in MIXED:
        a, b = value((64,), dtypes[0]), value((64,), dtypes[1]).flip(0)
        with Copies() as expected:
            call(a, b)
        with hmpx.convert(policy={"lists": "none", "fp32": [name]}):
            with Copies() as copies:
                actual = call(a, b)
            assert is_equal(name)
        assert not actual.dtype.is_floating_point or actual.dtype is torch.float32
        if name not in {"block_diag", *ops.facts("rounds_mixed"), *ops.facts("rounds_terms")}:
            assert copies.count == expected.count


@pytest.mark.parametrize("number", ["fp32", "bf16"])
def test_a_number_does_not_widen(number: str) -> None:
    """Beside a 0-dim fp32 tensor torch would stay in bf16: so the fp32 list casts."""
    low, fp32 = value((4,), torch.bfloat16), torch.tensor(0.3)
    with hmpx.convert(policy={"lists": "none", "fp32": ["div", "where", "cat"]}):
        given = fp32 if number == "fp32" else fp32.bfloat16()
        assert torch.div(low, given).dtype is torch.float32
        assert torch.div(given, low).dtype is torch.float32
        assert torch.where(low > 1, low, given).dtype is torch.float32
        assert torch.div(given, given).dtype is torch.float32
