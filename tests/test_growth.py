"""The tools' work grows with a model as the model's own does, and they recurse no deeper for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
import hmpx.recording.recorder

ROOT = Path(__file__).parents[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def model_of(blocks: int) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(blocks)])


X = torch.ones(2, 4)


def recorded(model: nn.Module, blocks: int) -> None:
    with hmpx.record() as seen:
        model(X).sum().backward()
    seen.report()


def frozen(model: nn.Module, blocks: int) -> None:
    hmpx.freeze(model.eval(), X).undo()


def drawn(model: nn.Module, blocks: int) -> None:
    assert hmpx.draw(model, X, max_nodes=10**6).dot


def compared(model: nn.Module, blocks: int) -> None:
    assert hmpx.compare(model, X).rows


def placed(model: nn.Module, blocks: int) -> None:
    sections = [{"module": f"{block}.linear", "fp32": ["linear"]} for block in range(blocks)]
    with hmpx.convert(device_types={"cpu"}, policy={"sections": sections}):
        model(X)


def calls_of(function: Callable[[], None]) -> int:
    """Returns how many functions, of Python and of C, were called."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("tool", [recorded, frozen, drawn, compared, placed])
def test_work_grows_with_the_model(
    tool: Callable[[nn.Module, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hmpx.recording.recorder, "_MOST_ENTRIES", 40)
    # A first run fills caches; a conversion's work depends on what the process has imported.
    with hmpx.convert(device_types={"cpu"}) if tool is not placed else nullcontext():
        tool(model_of(8), 8)
        few, more, most = [
            calls_of(lambda blocks=blocks: tool(model_of(blocks), blocks)) for blocks in (8, 16, 32)
        ]
    assert (most - more) / (more - few) < 2.5  # 2 where it grows as the model, 4 with its square


DEEP = """
import threading
import torch, hmpx
def deep(x):
    for _ in range(700):
        x = x * weight
    return x
weight = torch.ones(2, requires_grad=True)
x = torch.ones(2)
def program():
    with hmpx.convert(device_types={"cpu"}, policy={"low": ["mul"]}):
        with hmpx.record():
            deep(x).sum().backward()
        with hmpx.watch():
            deep(x).sum().backward()
        hmpx.draw(deep(x), max_nodes=10**6)
        hmpx.compare(deep, x)
    print("done")
threading.stack_size(1 << 17)
thread = threading.Thread(target=program)
thread.start()
thread.join()
"""


def test_deep_graphs_are_freed_without_recursion() -> None:
    """In a thread with a small stack, as of a much deeper model."""
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_autograds_nodes_are_taken_in_one_place() -> None:
    """`node_of` and `edges_of` have Python hold them, so that deep graphs are freed without recursion."""
    rooms = Path(hmpx.__file__).parent
    found = [
        path.relative_to(rooms).as_posix()
        for path in rooms.rglob("*.py")
        if any(
            taken in path.read_text()
            for taken in (".next_functions", "each.grad_fn", "tensor.grad_fn", "result.grad_fn")
        )
    ]
    assert found == ["tensors/nodes.py"]
