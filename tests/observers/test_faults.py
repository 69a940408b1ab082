"""A fault in an observer of hmpx leaves something out of its report, and never stops or changes the program."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import pkgutil
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

import hmpx
from hmpx import Monitor

CONTRACT = {
    "expect": [
        {"op": "linear", "output": ["float32", "bfloat16"], "gradient": ["float32", "bfloat16"]},
        {"op": "linear", "compute": ["float32", "bfloat16"], "contents": ["float32", "bfloat16"]},
        {"module": "*", "saved": ["float32", "bfloat16"]},
    ]
}

TOOLS: dict[str, Callable[[Path], Any]] = {
    "lint": lambda path: hmpx.lint(every=1),
    "record": lambda path: hmpx.record(memory=True),
    "watch": lambda path: hmpx.watch(mode="collect"),
    "expect": lambda path: hmpx.expect(CONTRACT, mode="collect"),
    "trace": lambda path: hmpx.trace(path / "trace.jsonl"),
    "monitor": lambda path: hmpx.monitor(every=1),
}


PACKAGES = ("checking", "recording", "watching", "tracing", "monitoring", "observers")


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are said again, of which a process says the first of a kind."""
    monkeypatch.setattr("hmpx.observers.faults._firsts", {})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).half().float())
        y += x
        return self.last(y).softmax(-1)


def trained() -> list[Tensor]:
    """Returns what two steps of a training make: by an optimizer, and by one with a closure."""
    torch.manual_seed(3)
    model, x = Model(), torch.randn(6, 8)
    half = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    adam = torch.optim.Adam([*model.parameters(), half])

    def closure() -> float:
        adam.zero_grad()
        loss = (model(x) * half).float().square().sum()
        loss.backward()
        return loss.item()

    closure()
    adam.step()
    adam.step(closure)
    return [each.detach().clone() for each in (*model.parameters(), half)]


def members() -> dict[str, Any]:
    """Returns all functions of hmpx that end at their own faults, by name."""
    code = hmpx.observers.spared(trained).__code__
    found = {}
    for name in PACKAGES:
        for entry in pkgutil.iter_modules(importlib.import_module(f"hmpx.{name}").__path__):
            found_in = importlib.import_module(f"hmpx.{name}.{entry.name}")
            own = [
                e
                for e in vars(found_in).values()
                if getattr(e, "__module__", "") == found_in.__name__
            ]
            inside = [m for each in own if isinstance(each, type) for m in vars(each).values()]
            for each in (*own, *inside):
                if getattr(each, "__code__", None) is code:
                    found[f"{name}.{each.__qualname__}"] = each
    return found


MEMBERS = members()


def tool_of(name: str) -> str:
    """Returns the tool that uses a member."""
    if name.startswith("checking.expect."):
        return "expect"
    tools = "lint", "record", "watch", "trace", "monitor", "lint"
    return dict(zip(PACKAGES, tools, strict=True))[name.partition(".")[0]]


@contextlib.contextmanager
def failing(member: Any) -> Iterator[None]:
    """Makes a function raise a TypeError, as hmpx's own code might."""
    cell = member.__closure__[member.__code__.co_freevars.index("function")]
    before = cell.cell_contents
    cell.cell_contents = math.hypot  # takes numbers only
    try:
        yield
    finally:
        cell.cell_contents = before


@pytest.mark.parametrize("tool", TOOLS)
def test_each_function_may_fail(
    tool: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {name: each for name, each in MEMBERS.items() if tool_of(name) == tool}

    def called(name: str) -> bool:
        return f"hmpx.{name} could not look at" in caplog.text

    with hmpx.convert(device_types={"cpu"}), caplog.at_level(logging.WARNING, "hmpx"):
        expected = trained()
        with TOOLS[tool](tmp_path):
            for each in own.values():
                with failing(each):
                    found = trained()
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for name in [each for each in own if not called(each)]:  # at the end of the block, perhaps
            with failing(own[name]), TOOLS[tool](tmp_path):
                found = trained()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert own
    assert not [name for name in own if not called(name)]
    assert "the program went on; please report this" in caplog.text


def hooks() -> list[Any]:
    """Returns the functions that every module, optimizer and call of an op runs."""
    found = [
        *module._global_forward_pre_hooks.values(),
        *module._global_forward_hooks.values(),
        *optimizer._global_optimizer_pre_hooks.values(),
        *optimizer._global_optimizer_post_hooks.values(),
    ]
    return found + [each.observer for each in hmpx.observers.ATTACHED.value]


@pytest.mark.parametrize("tool", TOOLS)
def test_all_that_a_tool_has_run_may_fail(tool: str, tmp_path: Path) -> None:
    before = hooks()
    with TOOLS[tool](tmp_path):
        added = [each for each in hooks() if each not in before]
    functions = {
        each.__func__ if isinstance(each, MethodType) else type(each).__call__ for each in added
    }
    assert len(functions) > 1
    # A process of a distributed run that went on would meet the others in another collective.
    assert functions - {*MEMBERS.values()} <= {Monitor._after_step}


def test_reports_say_what_is_missing() -> None:
    with failing(MEMBERS["checking._findings_by"]), hmpx.lint() as lint:
        trained()
    assert "hmpx.checking._findings_by could not look at" in str(lint)
    assert "could not look at" in lint.to_json()
    with (
        failing(MEMBERS["checking.expect._check_call"]),
        pytest.raises(hmpx.errors.ContractError, match=r"a call was not checked: hmpx\.checking"),
        hmpx.expect(CONTRACT),
    ):
        trained()


def test_errors_of_an_alarms_function_go_on() -> None:
    """Even where all of its code is Python's."""
    alarms = queue.Queue[hmpx.Alarm](maxsize=1)
    with (
        pytest.raises(queue.Full),
        hmpx.monitor(every=1, alarms={"*/amax": 0.0}, on_alarm=alarms.put_nowait),
    ):
        trained()


def test_errors_of_the_program_go_on() -> None:
    class Wrong(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.softmax:
                raise ZeroDivisionError("the program's")
            return func(*args, **(kwargs or {}))

    with hmpx.record(), Wrong(), pytest.raises(ZeroDivisionError, match="the program's"):
        trained()


def test_functions_of_the_program_that_lists_name_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function with effects of its own is not repeated to try anything."""
    (tmp_path / "counting_library.py").write_text(
        "calls = []\n\ndef fused(x, y):\n    calls.append(x.dtype)\n    return (x * y).square()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    library = importlib.import_module("counting_library")
    policy = {"low": ["counting_library.fused"], "low_precision_type": "float16"}
    for tool, make in TOOLS.items():
        with hmpx.convert(policy=policy, device_types={"cpu"}), make(tmp_path):
            x = torch.full((4, 4), 300.0, requires_grad=True)
            optimizer = torch.optim.SGD([x], 1e-3)
            for _ in range(3):
                library.fused(x, x).float().sum().backward()
                optimizer.step()
        assert library.calls == [torch.float16] * 3, tool
        library.calls.clear()
