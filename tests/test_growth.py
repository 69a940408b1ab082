"""The tools' work grows with a model as the model's own does, and they recurse no deeper for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

from . import forks


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
def test_work_grows_with_the_model(tool: Callable[[nn.Module, int], None]) -> None:
    # A first run fills caches; a conversion's work depends on what the process has imported.
    with hmpx.convert(device_types={"cpu"}) if tool is not placed else nullcontext():
        tool(model_of(2), 2)
        few, more, most = [
            calls_of(lambda blocks=blocks: tool(model_of(blocks), blocks)) for blocks in (2, 4, 8)
        ]
    assert (most - more) / (more - few) < 2.5  # 2 where it grows as the model, 4 with its square


#: Prints the number of functions that run in a call of a recorded layer, and of a traced one.
LIKE_EARLIER = """
import torch, hmpx
from torch import nn
from tests.test_growth import X, calls_of

layer = nn.Linear(4, 4)
with hmpx.convert(device_types={"cpu"}, legalize="never"):
    for block in (hmpx.record(), hmpx.trace("a.hmpx")):
        with block:
            for _ in range(3):
                layer(X)
            print(calls_of(lambda: layer(X)))
"""


def test_calls_like_earlier_ones_cost_little(tmp_path: Path) -> None:
    """Functions that run in a call of a converted layer: what equal calls share is found once."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    program = "-W", "ignore", "-c", LIKE_EARLIER
    done = forks.run(*program, cwd=tmp_path, env=environment, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr
    recorded_call, traced_call = map(int, done.stdout.split()[-2:])
    assert recorded_call <= 260
    assert traced_call <= 700
