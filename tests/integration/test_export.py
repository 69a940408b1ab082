"""Graphs that leave Python: the casts are in torch.export's, jit.trace's and fx's artefacts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import HmpxWarning, Policy
from tests import forks

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*_pytree.*:UserWarning"
)


class Net(nn.Module):
    """A function, a method, an operator and a norm, with a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.softmax(self.norm(self.linear(x)), dim=-1)
        with hmpx.disable_casts():
            uncast = self.linear(x)
        return (hidden @ x.t()).matmul(x) + uncast


def data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4)


LOADER = """
import sys, torch
kind, model_path, data_path, out_path = sys.argv[1:]
x = torch.load(data_path)
model = torch.export.load(model_path).module() if kind == "export" else torch.jit.load(model_path)
torch.save(model(x), out_path)
assert "hmpx" not in sys.modules
"""


def run_elsewhere(kind: str, folder: Path) -> Tensor:
    """Returns what the saved model gives in a process that never imports hmpx."""
    torch.save(data(), folder / "data.pt")
    paths = [str(folder / name) for name in ("model", "data.pt", "out.pt")]
    loader = ("-W", "ignore", "-c", LOADER)
    done = forks.run(*loader, kind, *paths, cwd=folder, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_hold_the_casts(strict: bool, tmp_path: Path) -> None:
    """Strict or not: plain ATen ops, no higher-order op; loads without hmpx (pytorch #136545)."""
    model = Net().eval()
    with hmpx.convert(), torch.no_grad():
        expected = model(data())
        program = torch.export.export(model, (data(),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("_to_copy" in t or "aten.to" in t or "bfloat16" in t for t in targets)
    assert not any("autocast" in t or "wrap" in t for t in targets)
    torch.testing.assert_close(program.module()(data()), expected, rtol=0, atol=0)
    (tmp_path / "model").unlink(missing_ok=True)
    torch.export.save(program, str(tmp_path / "model"))
    torch.testing.assert_close(run_elsewhere("export", tmp_path), expected, rtol=0, atol=0)


def test_traced_modules_hold_the_casts(tmp_path: Path) -> None:
    """torch.jit.trace records them; the file runs where hmpx is not (pytorch #84219)."""
    model = Net().eval()
    with hmpx.convert(), torch.no_grad():
        expected = model(data())
        traced = torch.jit.trace(model, data())
    torch.testing.assert_close(traced(data()), expected, rtol=0, atol=0)
    traced.save(str(tmp_path / "model"))
    torch.testing.assert_close(run_elsewhere("trace", tmp_path), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_traced_calls_are_not_cast_again() -> None:
    """torch.autocast would compute this op in fp32."""

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, (1, 1), mode="replicate")

    x = torch.randn(1, 3, 4, dtype=BF16)
    with hmpx.convert(device_types={"cpu"}):
        module, function = torch.jit.trace(Padding(), x), torch.jit.trace(pad, x)
        assert module(x).dtype is function(x).dtype is pad(x).dtype is BF16


class Padding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (1, 1), mode="replicate")


def activation(x: Tensor) -> Tensor:
    return F.gelu(F.relu(x) @ x)


def test_scripts_are_not_cast_and_say_so_once() -> None:
    """torch.jit.script takes torch's own functions only; one warning a conversion."""
    x = torch.randn(4, 4)
    expected = activation(x)
    with hmpx.convert(lists="autocast-cpu"):
        with pytest.warns(
            HmpxWarning, match=r"torch.jit.script .* is not cast. Use torch.jit.trace"
        ):
            scripted = torch.jit.script(activation)
        again = torch.jit.script(nn.Linear(4, 4))
        assert (x @ x).dtype is BF16
        torch.testing.assert_close(scripted(x), expected, rtol=0, atol=0)
        assert again(x).dtype is FP32
    assert scripted(x).dtype is FP32


def mixed(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y.transpose(-1, -2)) + 1


@pytest.mark.filterwarnings("ignore:`torch.jit.(script|trace):DeprecationWarning")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_scripts_take_low_precision_tensors(dtype: torch.dtype) -> None:
    """As in a region of torch.autocast."""

    class Scripted(nn.Module):  # torch compiles a class for one dtype
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, others: dict[str, Tensor]) -> Tensor:
            return torch.relu(self.linear(x)) @ others["x"].t()

    module, function = torch.jit.script(Scripted()), torch.jit.script(mixed)
    traced = torch.jit.trace(mixed, (torch.ones(4, 4), torch.ones(4, 4)))
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype):
        low = x @ x
        expected = [module(low, {"x": x}), function(low, x), traced(x, y=low), function(x=x, y=low)]
    with hmpx.convert(device_types={"cpu"}, low_precision_type=dtype):
        low = x @ x
        assert low.dtype is dtype
        outputs = [module(low, {"x": x}), function(low, x), traced(x, y=low), function(x=x, y=low)]
        outputs[0].float().sum().backward()
        assert not torch.is_autocast_enabled("cpu")
        with hmpx.disable_casts():
            assert function(x, x).dtype is torch.float32
    assert module.linear.weight.grad.dtype is torch.float32
    torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="dtype"):
        function(low, x)


def test_fx_traces_the_uncast_calls() -> None:
    """symbolic_trace records what the module says; the graph casts when it runs converted."""

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ x) + F.linear(x, x)

    x = torch.randn(3, 3)
    with hmpx.convert():
        graph = torch.fx.symbolic_trace(Plain())
        torch.testing.assert_close(graph(x), Plain()(x), rtol=0, atol=0)
        assert graph(x).dtype is BF16
    assert graph(x).dtype is FP32


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda x: torch.func.vmap(lambda row: F.linear(row, x))(x),
    "grad": lambda x: torch.func.grad(lambda t: (t @ t).float().sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda t: t @ t, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda x: torch.func.jacrev(lambda t: F.linear(t, t))(x),
    "functional_call": lambda x: torch.func.functional_call(
        nn.Linear(3, 3), {"weight": x, "bias": x[0]}, (x,)
    ),
    "vmap of grad": lambda x: torch.func.vmap(
        torch.func.grad(lambda t: F.linear(t, x).float().sum())
    )(x),
}
BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda x: torch.func.vmap(lambda row: F.linear(row.bfloat16(), x.bfloat16()))(x),
    "grad": lambda x: torch.func.grad(lambda t: (t.bfloat16() @ t.bfloat16()).float().sum())(x),
    "jvp": lambda x: torch.func.jvp(
        lambda t: t.bfloat16() @ t.bfloat16(), (x,), (torch.ones_like(x),)
    )[1],
    "jacrev": lambda x: torch.func.jacrev(lambda t: F.linear(t.bfloat16(), t.bfloat16()))(x),
    "functional_call": lambda x: F.linear(x.bfloat16(), x.bfloat16(), x[0].bfloat16()),
    "vmap of grad": lambda x: torch.func.vmap(
        torch.func.grad(lambda t: F.linear(t.bfloat16(), x.bfloat16()).float().sum())
    )(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_transforms_equal_casts_by_hand(name: str) -> None:
    """vmap, grad, jvp, functional_call (pytorch #105442, #184890)."""
    torch.manual_seed(0)
    x = torch.randn(3, 3)
    expected = BY_HAND[name](x)
    with hmpx.convert(policy=Policy.from_ops(low=["linear", "matmul"])):
        actual = FUNCTIONS[name](x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
