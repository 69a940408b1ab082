"""Names taken while converted are torch's and numpy's own after revert, in torch's modules, too."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import hmpx

POLICY = hmpx.Policy.from_ops(low=["matmul", "gelu"])


class Double(torch.autograd.Function):
    """A function whose ``apply`` modules keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


@pytest.fixture
def modules() -> Iterator[Any]:
    """Makes modules of the user's, or of torch's, and takes them away at last."""
    made = []

    def make(name: str, **names: Any) -> Any:
        module = types.ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module
        made.append(name)
        return module

    yield make
    for name in made:
        del sys.modules[name]


#: What a conversion puts in places of torch and numpy beside wrappers.
OTHERS = {
    "from_dlpack": lambda: numpy.from_dlpack,
    "full": lambda: torch.full,
    "script": lambda: torch.jit.script,
    "apply": lambda: Double.apply,
    "matmul": lambda: torch.matmul,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_what_they_were(name: str, modules: Any) -> None:
    """Whenever a module took them: before, in a conversion, in the one after it."""
    take = OTHERS[name]
    own = take()
    module = modules("my_module", early=own)
    for _ in range(2):
        with hmpx.convert(policy=POLICY):
            assert module.early == take() != own
            module.first = take()
            with hmpx.convert():
                assert module.early == module.first == take() != own
                module.second = take()
            module.back = take()
        assert module.early == module.first == module.second == module.back == take() == own
