"""Lists and tuples of tensors come back in their own classes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx import formats

Pair = collections.namedtuple("Pair", ["a", "b"])


class Typed(NamedTuple):
    a: Any
    b: Any = None


#: Each makes a sequence of two items.
MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "NamedTuple": Typed,
    "return_types": lambda a, b: torch.return_types.max((a, b)),
}


@pytest.mark.parametrize("takes_codes", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_function_that_computes_an_op_is_given_the_class(kind: str, takes_codes: bool) -> None:
    """Of rounded tensors, and of codes."""
    seen: list[Any] = []

    def cat(given: Any) -> Tensor:
        seen.append(given)
        return torch.zeros(4, dtype=given[0].dtype)

    tensors = MAKERS[kind](torch.tensor([1.3, 2.0]), torch.tensor([3.0, 4.0]))
    formats.register(formats.Fixed("of_sequences", 4, 2))
    try:
        function = formats.create_lower_func(cat) if takes_codes else cat
        formats.register_op(function, "cat", "of_sequences")
        policy = hmpx.Policy.from_ops(low=["cat"], low_precision_type="of_sequences")
        with hmpx.convert(policy=policy, device_types={"cpu"}):
            torch.cat(tensors)
    finally:
        formats.unregister("of_sequences")
    assert type(seen[0]) is type(tensors)
    assert [each.dtype for each in seen[0]] == [torch.uint8 if takes_codes else torch.float32] * 2


@pytest.mark.parametrize("kind", MAKERS)
def test_frozen_models_return_the_class_that_they_returned(kind: str) -> None:
    """With fp32 in place of bf16."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return MAKERS[kind](self.linear(x), x)

    model, x = Model().eval(), torch.ones(2, 4)
    with hmpx.convert(device_types={"cpu"}), hmpx.freeze(model, x):
        found = model(x)
    assert type(found) is type(MAKERS[kind](x, x))
    assert [item.dtype for item in found] == [torch.float32] * 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", MAKERS)
def test_compiled_code_rebuilds_them(kind: str) -> None:
    """In one graph."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        pair = torch.max(torch.stack([a, b]), 0) if kind == "return_types" else MAKERS[kind](a, b)
        return torch.cat((pair[0], pair[0]) if kind == "return_types" else pair)

    a, b = torch.ones(2), torch.full((2,), 2.3)
    policy = hmpx.Policy.from_ops(low=["cat", "max"])
    with hmpx.convert(policy=policy, device_types={"cpu"}, legalize="always"):
        expected = step(a, b)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b)
    assert torch.equal(found, expected)
