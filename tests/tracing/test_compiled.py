"""`trace` and `diff_runs` of compiled programs: their calls, their bits, and eager runs of the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.torch_internals import torch_version

from .test_tracing import Net, run

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own, of inductor's import


@pytest.mark.parametrize("low", ["", "hmpx"])
def test_compiled_runs_are_compared_with_eager(low: str, tmp_path: Path) -> None:
    plain = run(None, low=low)  # type: ignore[arg-type]
    traced = run(tmp_path / "compiled", lambda net: net.compile(backend="aot_eager"), low=low)
    torch.testing.assert_close(traced, plain, rtol=2**-6, atol=2**-6)
    run(tmp_path / "eager", low=low)
    found = hmpx.diff_runs(tmp_path / "eager", tmp_path / "compiled")
    assert found.first is None
    assert not {"only in a", "only in b", "not compared"} & found.counts.keys()
    products = [row for row in found.rows if row.op == "linear" and row.phase == "forward"]
    assert {row.module for row in products} == {"qkv", "head"}
    for row in products:
        assert row.locations[0] == row.locations[1] and "test_tracing.py:" in row.locations[1]
        assert row.decisions[1] == f"{row.decisions[0]}, compiled"
    parameters = {row.module for row in found.rows if row.op == "gradient"}
    assert {"norm.weight", "qkv.bias"} <= parameters


def test_inductors_runs_are_compared_with_eager(tmp_path: Path) -> None:
    """A small net: each traced op is a kernel that is compiled by itself."""
    results = []
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh())
        function = torch.compile(net) if name == "compiled" else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with hmpx.convert(device_types={"cpu"}), hmpx.trace(tmp_path / name):
            y = function(torch.linspace(-1, 1, 64).sin().view(4, 16))
            y.float().square().sum().backward()
            optimizer.step()
        results.append([y, *(parameter.grad for parameter in net.parameters())])
    torch.testing.assert_close(*results, rtol=2**-6, atol=2**-6)  # it may fuse otherwise
    found = hmpx.diff_runs(tmp_path / "eager", tmp_path / "compiled")
    assert found.first is None
    assert not {"only in a", "only in b", "not compared"} & found.counts.keys()
    (product,) = [row for row in found.rows if row.op == "linear" and row.phase == "forward"]
    assert product.module == "1" and product.locations[0] == product.locations[1]
    assert product.decisions[1] == f"{product.decisions[0]}, compiled"
    parameters = {row.module for row in found.rows if row.op == "gradient"}
    assert parameters == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_what_a_compiled_run_does_otherwise_is_named(tmp_path: Path) -> None:
    def change(net: Net) -> None:
        net.norm.eps = 1e-3
        net.compile(backend="aot_eager")

    run(tmp_path / "eager")
    run(tmp_path / "compiled", change)
    first = hmpx.diff_runs(tmp_path / "eager", tmp_path / "compiled").first
    assert first and (first.op, first.module) == ("layer_norm", "norm")
    assert first.cause.startswith("arguments: ")


def test_steps_between_traced_ones_may_compile(tmp_path: Path) -> None:
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Layers(lambda m, x: m.a(x).tanh())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if name == "compiled":
            model.compile(backend="aot_eager")
        with hmpx.trace(tmp_path / name, steps=[1, 3]):
            for step in range(4):
                model(torch.ones(2 + step % 2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    found = hmpx.diff_runs(tmp_path / "eager", tmp_path / "compiled")
    assert {row.step for row in found.rows} == {1, 3}
    assert found.first is None


class Layers(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.lstm, self.norm = nn.LSTM(16, 16), nn.BatchNorm1d(16)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self, x)


def in_place(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x) * 1
    y += 1
    y[0].mul_(2)
    y.view(-1).add_(1)
    return y


def slices(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x) * 1
    y[:2] = x[2:4]
    y[None, 1:2] = x[1:2] * 2
    y.view(-1)[2:4] += 1
    return y[(0, 1), 1:]


def broken(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    torch._dynamo.graph_break()
    return F.softmax(y, -1, dtype=torch.float64)


PROGRAMS: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "checkpoint": lambda m, x: (
        checkpoint(lambda t: F.gelu(m.a(t)).tanh(), x, use_reentrant=False) + m.b(x)
    ),
    "a branch": lambda m, x: torch.cond(
        x.sum() > 0, lambda t: m.a(t).sin(), lambda t: m.a(t).cos(), (x,)
    ),
    "transforms": lambda m, x: torch.vmap(m.a)(x) + torch.func.grad(lambda t: t.sin().sum())(x),
    "in-place": in_place,
    "a broken graph": broken,
    "slices": slices,
    "LSTM": lambda m, x: m.lstm(x[None])[0],
    "running statistics": lambda m, x: F.relu(m.norm(m.a(x)), inplace=True),
    "operators": lambda m, x: (1 - m.a(x) / 4) % 3 + 2 / (x + 9) ** 2,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_gradients", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_programs_run_as_untraced(name: str, with_gradients: bool, tmp_path: Path) -> None:
    def outcome(path: Path | None, *, compiled: bool) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Layers(PROGRAMS[name])
        if compiled:
            model.compile(backend="aot_eager")
        found = []
        with hmpx.trace(path) if path else contextlib.nullcontext():
            for size in (8, 8, 6):  # a dynamic shape from then on
                x = torch.randn(size, 16, requires_grad=with_gradients)
                with torch.set_grad_enabled(with_gradients):
                    y = model(x)
                found.append(y.detach())
                if with_gradients:
                    y.square().sum().backward()
                    assert x.grad is not None
                    found.append(x.grad)
        return found

    expected = outcome(None, compiled=True)
    actual = outcome(tmp_path / "compiled", compiled=True)
    assert all(map(torch.equal, expected, actual))
    outcome(tmp_path / "eager", compiled=False)
    found = hmpx.diff_runs(tmp_path / "eager", tmp_path / "compiled")
    assert found.first is None, str(found)
    assert found.counts["equal"] >= 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lists", ["hmpx", "lean"])
def test_arrays_nested_tensors_and_flex_attention_are_compiled(lists: str, tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    q, path = torch.ones(1, 2, 8, 4), tmp_path / "a"
    with hmpx.convert(lists=lists, device_types={"cpu"}), hmpx.trace(path), torch.no_grad():
        double = torch.compile(lambda x: x * 2, backend="aot_eager")
        assert double(np.ones(3)).tolist() == [2.0] * 3
        assert double(nested).sum() == 6
        assert (
            torch.compile(lambda x: torch.from_numpy(x.numpy()), backend="aot_eager")(q).sum() > 0
        )
        flex = torch.compile(lambda q: flex_attention(q, q, q), backend="aot_eager")
        assert torch.equal(flex(q).float(), q)


def test_a_compiled_training_step_traces_its_own_calls_only(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update = torch.compile(optimizer.step, backend="eager")
    with hmpx.trace(tmp_path / "a"):
        model(torch.ones(2, 4)).sum().backward()
        update()
    rows = hmpx.diff_runs(tmp_path / "a", tmp_path / "a").rows
    # Before torch 2.13 torch.compile splits `add_(grad, alpha=-lr)`.
    split = {"mul"} if torch_version() < (2, 13) else set()
    assert {row.op for row in rows} <= {"linear", "sum", "add_", "add", "gradient"} | split


def test_random_numbers_of_compiled_code_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    for name, function in (("eager", model), ("compiled", torch.compile(model))):
        torch.manual_seed(0)
        with hmpx.trace(tmp_path / name):
            function(torch.ones(4, 16))
    first = hmpx.diff_runs(tmp_path / "eager", tmp_path / "compiled").first
    assert first is not None
    assert (first.op, first.cause[:41]) == ("dropout", "compiled code draws other random numbers,")
