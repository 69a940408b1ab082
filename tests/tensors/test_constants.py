"""Tensors of constants are made once for each device, and never where a mode or transform wraps them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from hmpx.formats import Table, decode, quantize
from hmpx.number_formats import rounder
from tests.values import same_or_nan

VALUES = (-2.0, -0.5, 0.0, 0.75, 1.0, 3.0)
X = torch.tensor([-9.0, -0.6, 0.3, 0.4, 0.8, 2.5, torch.nan])
CODES = torch.tensor([0, 1, 2, 3, 3, 5], dtype=torch.uint8)
EXPECTED = torch.tensor([-2.0, -0.5, 0.0, 0.75, 0.75, 3.0, torch.nan])


class FromHost(TorchDispatchMode):
    """Notes what makes tensors of numbers that the host has."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Returns what ``func`` returns."""
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        is_copy = name in {"_to_copy", "copy_"} and args[-1].is_cpu and not result.is_cpu
        if is_copy or name.startswith("lift_fresh"):
            self.ops.append(name)
        return result


def table() -> Table:
    """Returns a format that nothing was derived from yet."""
    return Table("t", VALUES)


def test_codes_are_decoded_without_the_host() -> None:
    """The table of all codes is on the device after the first call."""
    format, codes = table(), torch.empty(8, device="meta", dtype=torch.uint8)
    decode(codes, format)
    with FromHost() as copies:
        decode(codes, format)
    assert copies.ops == []


def by_ops(format: Table, x: Tensor) -> Tensor:
    """Returns ``x`` rounded by torch ops, as on accelerators."""
    run = rounder(format)
    run.plan(x.dtype).function = None  # type: ignore[attr-defined]
    return run(x)


def by_codes(format: Table, x: Tensor) -> Tensor:
    return torch.cat([decode(CODES, format), X[6:]])


def on_fakes(run: Callable[[Tensor], Tensor]) -> None:
    with FakeTensorMode() as mode:
        run(mode.from_tensor(X))


def in_vmap(run: Callable[[Tensor], Tensor]) -> None:
    torch.vmap(lambda x: run(X) + x)(X.expand(2, 7))


def in_grad(run: Callable[[Tensor], Tensor]) -> None:
    torch.func.grad(lambda x: (run(X.detach()) * x).sum())(X)


def in_inference_mode(run: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode():
        run(X)


def in_dispatch_mode(run: Callable[[Tensor], Tensor]) -> None:
    with FromHost():
        run(X)


def in_graph(run: Callable[[Tensor], Tensor]) -> None:
    same_or_nan(make_fx(run)(X)(X), EXPECTED)


def in_a_function_mode(run: Callable[[Tensor], Tensor]) -> None:
    with torch.device("meta"):
        run(X)


ANYWHERE = [in_vmap, in_grad, in_inference_mode, in_dispatch_mode, in_graph, in_a_function_mode]


@pytest.mark.parametrize(
    ("first", "rounded"),
    [
        (on_fakes, by_ops),  # codes of fake tensors are computed with
        *[(first, rounded) for first in ANYWHERE for rounded in (by_ops, by_codes)],
    ],
)
def test_nothing_leaks_from_where_it_is_used_first(
    first: Callable[[Callable[[Tensor], Tensor]], None],
    rounded: Callable[[Table, Tensor], Tensor],
) -> None:
    """The next call, anywhere, has tensors of its own world, and the right values."""
    format = table()
    first(lambda x: rounded(format, x))
    same_or_nan(rounded(format, X), EXPECTED)
    x = X.clone().requires_grad_()
    (rounded(format, X) * x).nansum().backward()
    on_fakes(lambda x: by_ops(format, x))
    same_or_nan(rounded(format, X), EXPECTED)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_tables() -> None:
    """A graph has the table in it, whether there is one already or not."""
    format = table()

    def run(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, format), decode(codes, format)

    codes = torch.arange(6, dtype=torch.uint8)
    for _ in range(2):
        torch._dynamo.reset()
        rounded, decoded = torch.compile(run, fullgraph=True, backend="aot_eager")(X, codes)
        same_or_nan(rounded, EXPECTED)
        same_or_nan(decoded, torch.tensor(VALUES))
        same_or_nan(quantize(X, format), EXPECTED)


@pytest.fixture
def fresh_compiler() -> object:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
