"""Tools that run a model leave it, its inputs and the program's state as they were."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import random
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hmpx

# --- what is compared: an account of all that a model holds, by identity and bits ----------------


def account(*values: Any) -> list[Any]:
    """Returns the identity, class and content of everything that ``values`` hold, tensors bit by bit."""
    found: list[Any] = []
    seen: set[int] = set()

    def look(path: str, value: Any) -> None:
        if isinstance(value, (int, float, str, bytes, type(None), torch.dtype, type)):
            found.append((path, repr(value)))
            return
        found.append((path, id(value), type(value)))
        if id(value) in seen:
            return
        seen.add(id(value))
        for name, content in contents(value):
            look(f"{path}.{name}", content)

    def contents(value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Tensor):
            yield from tensor_contents(value)
        elif isinstance(value, torch.Generator):
            yield "state", value.get_state().numpy().tobytes()
        elif isinstance(value, random.Random):
            yield "state", repr(value.getstate())
        elif isinstance(value, np.random.Generator):
            yield "state", repr(value.bit_generator.state)
        elif isinstance(value, np.ndarray):
            yield "bits", repr((value.shape, value.tobytes()))
        elif isinstance(value, dict):
            for number, (key, content) in enumerate(value.items()):
                yield f"key{number}", key
                yield f"[{number}]", content
        elif isinstance(value, (list, tuple, collections.deque)):
            yield from ((f"[{number}]", content) for number, content in enumerate(value))
        elif isinstance(value, (set, frozenset)):
            yield "members", repr(sorted(map(id, value)))
        elif isinstance(value, types.FunctionType):
            return
        yield "dict", getattr(value, "__dict__", None) if type(value) is not dict else None
        for name in getattr(type(value), "__slots__", ()):
            yield name, getattr(value, name, "absent")

    def tensor_contents(value: Tensor) -> Iterator[tuple[str, Any]]:
        with torch._C.DisableTorchFunctionSubclass():
            yield "kind", repr((value.dtype, value.size(), value.requires_grad, value.is_leaf))
            if value.layout is torch.strided:
                yield (
                    "place",
                    repr((value.stride(), value.storage_offset(), value.untyped_storage()._cdata)),
                )
                yield "bits", bytes(value.detach().clone().view(-1).view(torch.uint8).tolist())
            else:
                yield "values", str(value.detach().to_dense().tolist())
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                yield name, getattr(value, name) or None
            if value.is_leaf:
                yield "grad", value.grad

    for number, value in enumerate(values):
        look(str(number), value)
    return found


def world() -> list[Any]:
    """Returns the state of the program outside of any model."""
    numpy: Any = np.random.get_state()
    return [
        torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:],
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
    ]  # fmt: skip


def assert_same(found: list[Any], expected: list[Any]) -> None:
    pairs = [(a, b) for a, b in zip(found, expected, strict=False) if a != b]
    assert not pairs, pairs[:5]
    assert len(found) == len(expected)


# --- a model that changes everything -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: dict[str, Tensor]


class Slotted:
    __slots__ = ("later", "steps", "value")

    def __init__(self) -> None:
        self.steps, self.value = 0, torch.zeros(2)


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen = torch.zeros(3)


class Hashed(list[Any]):
    """A container with attributes of its own."""


class ModelError(Exception):
    pass


class Nasty(nn.Module):
    """Its forward changes all kinds of state that a module can have."""

    def __init__(self, fails: Callable[[], bool], *, rare: bool) -> None:
        super().__init__()
        self.fails = fails
        self.linear = nn.Linear(4, 4)
        self.lazy = nn.LazyLinear(4) if rare else nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.1)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.linear.weight
        self.written = nn.Parameter(torch.tensor([0.0, -0.0, float("nan"), 1.0]))
        self.learning = nn.Parameter(torch.ones(4))
        self.hooked = nn.Parameter(torch.ones(4))
        self.linear.weight.grad = torch.full((4, 4), 3.0)
        self.learning.grad = torch.zeros(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(4), persistent=False)
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("wide", torch.zeros(1).expand(4))
        base = torch.zeros(8)
        self.views = (base[::2], base[1::2])
        self.plain = torch.zeros(4)
        self.odd = torch.zeros(3, dtype=torch.bfloat16)
        self.graph = torch.zeros(4)
        self.other = torch.zeros(4)
        self.sparse = torch.eye(4).to_sparse() if rare else torch.eye(4)
        self.resized = torch.zeros(2)
        self.nested = {"list": [torch.zeros(1), {"deep": (torch.zeros(1),)}]}
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.recent = collections.deque([torch.zeros(1)], maxlen=2)
        self.kinds: set[Any] = {"a"}
        self.frozen = Frozen({"value": torch.zeros(2)})
        self.slotted = Slotted()
        self.cache = Cache()
        self.hashed = Hashed([1])
        self.space = types.SimpleNamespace(step=0)
        self.steps, self.flag = 0, "before"
        self.passing = "deleted by the forward"
        self.generator = torch.Generator().manual_seed(1)
        self.array = np.zeros(3, dtype=np.float32)
        self.rng, self.python_rng = np.random.default_rng(1), random.Random(1)
        self.loop = [self.nested]
        self.loop.append(self.loop)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        drawn = torch.rand(4) + random.random() + float(np.random.rand())
        drawn = drawn + torch.rand(4, generator=self.generator).sum() + self.rng.random()
        drawn = drawn + self.python_rng.random()
        with torch.no_grad():
            self.written.mul_(-1)
            self.count += 1
            self.wide = self.wide + 1
            self.running.add_(1)
            self.plain[0] = -0.0
            self.odd.add_(1)
            self.views[0].add_(1)
            self.sparse.mul_(2)
            self.resized.resize_(5).fill_(7)
            self.linear.weight.mul_(2)
            x.mul_(1.5)
        y = self.linear(x) + self.tied(x) + self.drop(self.norm(self.lazy(x))) + self.spectral(x)
        self.replaced = self.replaced + 1
        self.graph.add_(self.learning.sum())
        self.other = y.detach()
        self.learning.requires_grad_(not self.learning.requires_grad)
        if self.hooked.requires_grad:
            self.hooked.register_hook(lambda gradient: gradient)
        self.register_forward_hook(lambda module, args, result: None)
        self.nested["list"][1]["deep"][0].add_(1)
        self.nested["list"].append(1)
        self.ordered.move_to_end("a")
        self.recent.append(torch.ones(1))
        self.kinds.add(self.steps)
        self.frozen.inner["value"].add_(1)
        self.slotted.steps += 1
        self.slotted.later = 1
        self.slotted.value.add_(1)
        for each in (self.cache, cache):
            if each is not None:
                each.keys.append(y.detach())
                each.seen.add_(1)
        self.hashed.append(2)
        self.hashed.mark = 1
        self.space.step += 1
        self.array += 1
        self.steps, self.flag = self.steps + 1, "after"
        del self.passing
        self.passing = "again"
        self.created = torch.ones(3)
        self.register_buffer("late", torch.ones(2))
        self.added = nn.Linear(2, 2)
        self.norm.eval()
        self.drop.train(not self.drop.training)
        if self.fails():
            raise ModelError("the model fails")
        return y.relu() + drawn.sum().detach() * 0 + self.hooked * self.hooked


# --- the tools -----------------------------------------------------------------------------------


def frozen_and_undone(model: nn.Module, x: Tensor, cache: Any) -> None:
    hmpx.freeze(model.eval(), {"x": x, "cache": cache}).undo()


def exported(model: nn.Module, x: Tensor, cache: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hmpx.export(model.eval(), {"x": x, "cache": cache}, Path(folder) / "m.onnx")


def tuned(model: nn.Module, x: Tensor, cache: Any) -> None:
    given = [{"x": x, "cache": cache}]
    hmpx.tune(model, given, tolerance=0.9, budget=2, device_types={"cpu"}, progress=False)


def benched(model: nn.Module, x: Tensor, cache: Any) -> None:
    few = {"runs": 1, "warmup": 1, "run_s": 0.0, "variants": ["auto"], "device": "cpu"}
    hmpx.bench(lambda: model, {"x": x, "cache": cache}, **few)


def compared(model: nn.Module, x: Tensor, cache: Any) -> None:
    hmpx.compare(model, {"x": x, "cache": cache}, device_types={"cpu"})


#: What runs a user's model.
TOOLS: dict[str, Callable[[nn.Module, Tensor, Any], object]] = {
    "bench": benched,
    "compare": compared,
    "draw": lambda model, x, cache: hmpx.draw(model, (x, cache)),
    "expect.of": lambda model, x, cache: hmpx.expect.of(model, (x, cache)),
    "export": exported,
    "freeze": frozen_and_undone,
    "invariance": lambda model, x, cache: hmpx.invariance(model, (x, cache)),
    "plan": lambda model, x, cache: hmpx.plan(model, (x, cache), "cpu"),
    "plan, small": lambda model, x, cache: hmpx.plan(model, (x, cache), "cpu", small=True),
    "tune": tuned,
}
NEEDS_CONVERSION = {"freeze"}
REFUSES_CONVERSION = {"bench"}
ONE_FORWARD = {"export", "draw", "expect.of", "freeze"}
#: Lazy modules, sparse attributes.
REFUSES_RARE_KINDS = {"plan", "plan, small"}


def checked(
    tool: str, model: nn.Module, x: Tensor, cache: Any, *, converted: bool, error: str
) -> None:
    """Runs a tool, which raises ``error``, and asserts that everything is as it was."""
    if tool in {"freeze", "export"}:
        model.eval()
    if tool == "export" and isinstance(model, (Nasty, Recurrent)):
        error = error or "torch.onnx.export can't export"
    expected, outside = account(model, x, cache), world()
    conversion = hmpx.convert(device_types={"cpu"}) if converted else contextlib.nullcontext()
    with conversion, pytest.raises(Exception, match=error) if error else contextlib.nullcontext():
        TOOLS[tool](model, x, cache)
    assert_same(account(model, x, cache), expected)
    assert_same(world(), outside)


@pytest.mark.parametrize("tool", sorted(TOOLS.keys() - REFUSES_CONVERSION))
def test_tools_leave_a_model_as_it_was_if_converted(tool: str) -> None:
    torch.manual_seed(0)
    model = Nasty(lambda: False, rare=tool not in REFUSES_RARE_KINDS)
    checked(tool, model, torch.randn(3, 4), Cache(), converted=True, error="")


@pytest.mark.parametrize("failing_call", [0, 1, 2], ids=["works", "fails", "fails later"])
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_leave_a_model_as_it_was(tool: str, failing_call: int) -> None:
    calls = iter(range(1, 1000))  # which no tool can set back
    torch.manual_seed(0)
    is_reached = failing_call == 1 or (failing_call == 2 and tool not in ONE_FORWARD)
    checked(
        tool,
        Nasty(lambda: next(calls) == failing_call, rare=tool not in REFUSES_RARE_KINDS),
        torch.randn(3, 4),
        Cache(),
        converted=tool in NEEDS_CONVERSION,
        error="the model fails" if is_reached else "",
    )


#: Callables of the API that run no model by themselves: blocks around a program's own calls, questions about
#: ops, files, tensors, policies and rules, and classes of results.
RUN_NO_MODEL = {
    "attach", "casts_enabled", "contents", "convert", "diff_runs", "disable_casts", "explain", "expect",
    "is_converted", "lint", "load_frozen", "load_policy", "monitor", "record", "register_rule", "revert", "trace", "unregister_rule",
    "watch",
    "Alarm", "Attached", "Bench", "Breach", "Call", "CallTensors", "CastPolicy", "Comparison", "Decision", "Drawing",
    "EngineSettings", "Explanation", "Explanations", "Finding", "Frozen", "Invariance", "Lint", "Monitor", "Offence", "OnnxFile", "OpCall",
    "Plan", "Policy", "RunDiff", "Session", "Tuned", "Variation", "Watch", "Weight",
}  # fmt: skip


def test_each_callable_of_the_api_is_among_the_tools_or_runs_no_model() -> None:
    found = {name for name in hmpx.__all__ if callable(getattr(hmpx, name))}
    found -= {name for name in found if name.endswith(("Error", "Warning"))}
    for name in sorted(found):
        of_class = vars(getattr(hmpx, name)) if inspect.isclass(getattr(hmpx, name)) else {}
        found |= {f"{name}.{each}" for each, it in of_class.items() if isinstance(it, staticmethod)}
    found -= {name for name in found if name.rpartition(".")[2].startswith("_")}
    assert found == {name.partition(",")[0] for name in TOOLS} | RUN_NO_MODEL


class Modes(nn.Module):
    """Its forward leaves torch's modes changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        y: Tensor = self.linear(x)
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return y


@pytest.mark.parametrize("tool", sorted(TOOLS.keys() - {"plan", "plan, small"}))
def test_modes_that_a_model_leaves_changed_are_restored(tool: str) -> None:
    error = "calls no op on fp32" if tool == "tune" else ""  # the second batch is computed in fp64
    checked(tool, Modes(), torch.randn(3, 4), None, converted=tool == "freeze", error=error)


# --- models that people have ---------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.hidden: Any = (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        former = tuple(own.clone() for own in self.hidden)  # the backward needs it
        y, hidden = self.lstm(self.drop(self.norm(x))[:, None], former)
        for own, new in zip(self.hidden, hidden, strict=True):
            own.copy_(new.detach())
        found: Tensor = y[:, 0]
        return found


@pytest.mark.parametrize("tool", sorted(TOOLS.keys() - {"invariance"}))
def test_a_recurrent_model_with_a_state_of_its_own(tool: str) -> None:
    checked(tool, Recurrent(), torch.randn(3, 4), None, converted=tool == "freeze", error="")


@pytest.mark.parametrize("tool", ["bench", "compare", "draw", "expect.of", "plan, small", "tune"])
def test_a_language_model_with_a_cache(tool: str) -> None:
    """The cache is an argument; filled before, it is as long and holds the same afterwards."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config)
    cache = transformers.DynamicCache(config=config)
    x = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        llama(x, cache=cache)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            logits: Tensor = self.llama(x, cache=cache).logits
            return logits

    checked(tool, Wrapped(), x, cache, converted=False, error="")


def test_functions_and_what_they_hold() -> None:
    """Modules in a closure, the object of a method, and arguments of a partial."""
    torch.manual_seed(0)
    model, cache, x = Nasty(lambda: False, rare=True), Cache(), torch.randn(3, 4)

    class Step:
        def __init__(self) -> None:
            self.model, self.steps = model, [0]

        def run(self, x: Tensor) -> Tensor:
            self.steps.append(1)
            y: Tensor = self.model(x)
            return y

    step = Step()
    expected = account(model, cache, step)
    for function in (lambda x: model(x), functools.partial(model, cache=cache), step.run):
        hmpx.compare(function, x, device_types={"cpu"})
        assert_same(account(model, cache, step), expected)


def test_a_graph_from_before_can_be_differentiated_afterwards() -> None:
    """To autograd, restored values were not written to, where the model itself does not write."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).sum(), model[0].weight)
    loss = model(x).sum()
    hmpx.compare(model, x, device_types={"cpu"})
    assert torch.equal(torch.autograd.grad(loss, model[0].weight)[0], expected[0])


def test_a_plan_of_a_large_model_copies_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64)
    copied: list[int] = []
    clone = Tensor.clone

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(tensor.nbytes if type(tensor) is Tensor else 0)
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "clone", noted)
    hmpx.plan(model, torch.randn(2, 64), "cpu")
    assert max(copied, default=0) < model.weight.nbytes
    with torch.device("meta"):
        huge = nn.Linear(2**20, 2**15)
    hmpx.plan(huge, lambda: torch.randn(2, 2**20), "cpu", optimizer=None)


def test_tune_compares_outputs_that_a_model_keeps() -> None:
    """A model may return an attribute, which is restored before the next run."""

    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.result = nn.Linear(32, 4), torch.zeros(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.result.copy_(self.linear(x))

    best = hmpx.tune(
        Static(), torch.randn(8, 32), tolerance=0.5, device_types={"cpu"}, progress=False
    )
    assert best.error > 0
