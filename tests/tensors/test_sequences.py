"""Lists and tuples of tensors come back in their own classes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hmpx
from hmpx import formats
from hmpx.compute import composition
from hmpx.tensors import widened
from hmpx.tensors.dtypes import CAST, ELIGIBLE
from hmpx.tensors.nested import map_tensors, with_items

Pair = collections.namedtuple("Pair", ["a", "b"])


class Typed(NamedTuple):
    a: Any
    b: Any = None


class Noted(Pair):
    """A named tuple with an attribute."""


class Two(tuple[Any, ...]):
    """A tuple that is made from two values."""

    __slots__ = ()

    def __new__(cls, a: Any, b: Any) -> Two:
        return super().__new__(cls, (a, b))


class Named(tuple[Any, ...]):
    """A tuple whose initializer takes more."""

    def __init__(self, items: Any, name: str) -> None:
        self.name = name

    def __new__(cls, items: Any, name: str) -> Named:
        return super().__new__(cls, items)


class Initialized(tuple[Any, ...]):
    """A tuple with an initializer that can't be called again."""

    def __init__(self, items: Any) -> None:
        assert not isinstance(items, list)
        self.count = 2


class Rows(list[Any]):
    """A list that is made from a number."""

    def __init__(self, count: int) -> None:
        super().__init__([None] * count)
        self.count = count


def noted(a: Any, b: Any) -> Noted:
    found = Noted(a, b)
    found.note = "kept"  # type: ignore[attr-defined]
    return found


def rows(a: Any, b: Any) -> Rows:
    found = Rows(2)
    found[:] = [a, b]
    return found


#: Each makes a sequence of two items.
MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "NamedTuple": Typed,
    "namedtuple with attributes": noted,
    "return_types": lambda a, b: torch.return_types.max((a, b)),
    "tuple made from values": Two,
    "tuple with a name": lambda a, b: Named((a, b), "both"),
    "tuple with an initializer": lambda a, b: Initialized((a, b)),
    "list made from a number": rows,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_items_are_replaced_and_the_class_stays(kind: str) -> None:
    """With what else the object holds; the one that was given does not change."""
    make = MAKERS[kind]
    before = make(1, 2)
    found = with_items(before, [3, 4])
    assert type(found) is type(before)
    assert list(found) == [3, 4]
    assert list(before) == [1, 2]
    assert getattr(found, "__dict__", None) == getattr(before, "__dict__", None)


def test_a_size_stays_a_size() -> None:
    assert type(with_items(torch.Size([1]), [2, 3])) is torch.Size


def lowered(value: Any, function: Callable[[Any], Any] = lambda fn: fn) -> Any:
    """Returns what a function that computes ``cat`` in a format is given for ``value``."""
    seen = []

    def cat(tensors: Any) -> Tensor:
        seen.append(tensors)
        return torch.zeros(4, dtype=tensors[0].dtype)

    policy = hmpx.Policy.from_ops(low=["cat"], low_precision_type="float8_e5m2")
    formats.register_op(function(cat), "cat", "float8_e5m2")
    try:
        with hmpx.convert(policy=policy, device_types={"cpu"}):
            torch.cat(value)
    finally:
        hmpx.compute.LOWERINGS.change({})
    return seen[0]


def on_codes(value: Any) -> Any:
    """The same, of a function of integers."""
    return lowered(value, formats.create_lower_func)


def raised(value: Any) -> Any:
    """Returns what a legalized op computes from."""
    return composition.call_raised(lambda given: given, (value,), {}, CAST[torch.float64], ELIGIBLE)


def rounded(value: Any) -> Any:
    """Returns what a legalized op returns."""
    return composition.rounded(value, CAST[torch.bfloat16])


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("walk", [lowered, on_codes, raised, rounded])
def test_whatever_goes_through_lists_and_tuples_leaves_their_class(
    walk: Callable[[Any], Any], kind: str
) -> None:
    """What an op is given, what it returns, and what computes it elsewhere."""
    before = MAKERS[kind](torch.tensor([1.3, 2.0]), torch.tensor([3.0, 4.0]))
    found = walk(before)
    assert type(found) is type(before)
    assert getattr(found, "__dict__", None) == getattr(before, "__dict__", None)
    first, second = found
    assert first is not before[0]
    assert first.shape == second.shape == (2,)


@pytest.mark.parametrize("kind", MAKERS)
def test_frozen_models_return_the_class_that_they_returned(kind: str) -> None:
    """With fp32 in place of bf16."""
    low = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2)]
    before = MAKERS[kind](*low)
    found = widened(before)
    assert type(found) is type(before)
    assert [item.dtype for item in found] == [torch.float32] * 2
    assert found[1] is low[1]


@pytest.mark.parametrize("kind", ["list", "tuple", "namedtuple", "NamedTuple", "return_types"])
def test_compiled_code_rebuilds_them(kind: str) -> None:
    """In one graph."""
    torch._dynamo.reset()
    make = MAKERS[kind]

    def step(a: Tensor, b: Tensor) -> Tensor:
        pair = torch.max(torch.stack([a, b]), 0) if kind == "return_types" else make(a, b)
        return torch.cat((pair[0], pair[0]) if kind == "return_types" else pair)

    a, b = torch.ones(2), torch.full((2,), 2.3)
    policy = hmpx.Policy.from_ops(low=["cat", "max"])
    with hmpx.convert(policy=policy, device_types={"cpu"}, legalize="always"):
        expected = step(a, b)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b)
    assert torch.equal(found, expected)
    torch._dynamo.reset()


def test_a_sequence_in_which_nothing_changes_is_itself() -> None:
    given = [torch.ones(2), (torch.ones(3), 1)]
    assert map_tensors(given, lambda tensor: tensor) is given
    changed = map_tensors(
        given, lambda tensor: tensor.bfloat16() if tensor.numel() == 3 else tensor
    )
    assert changed[0] is given[0]
    assert changed[1][0].dtype is torch.bfloat16
