"""In a REPL, each object of hmpx is shown in three lines at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import hmpx
from hmpx import formats
from hmpx.number_formats import FORMATS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projection = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.softmax(self.projection(self.norm(x)), -1)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def results() -> Iterator[Any]:
    """Yields what each function of the API returns."""
    model, x = nn.Sequential(*[Block() for _ in range(3)]), torch.randn(4, 16)
    calls: list[Any] = []
    with (
        hmpx.convert(device_types={"cpu"}) as session,
        hmpx.attach(lambda *call: calls.append(call), tensors=True),
        hmpx.record(memory=True, times=True) as rec,
        hmpx.watch("collect", underflow=True) as watched,
        hmpx.lint(every=1) as found,
    ):
        loss_of(model(x)).backward()
        torch.log(torch.zeros(3) - 1)
        torch.arange(1000).to(torch.bfloat16)
    yield from (session, calls, rec, rec.report(), rec.waste(), watched, found)
    yield from (rec.by_op(), rec.by_op().table(), rec.by_module(), rec.by_site())
    yield from (hmpx.explain("softmax", rec), hmpx.explain("*norm*"))
    with hmpx.convert(device_types={"cpu"}):
        yield hmpx.freeze(model.eval(), x, keep_fp32=False)
    model = nn.Sequential(Block())
    yield hmpx.compare(model, x, loss_fn=loss_of)
    plan = hmpx.plan(lambda: nn.Linear(4, 4), torch.ones(2, 4), "cuda")
    yield from (plan, plan.per_rank(2))
    yield hmpx.tune(model, x, loss_fn=loss_of, tolerance=0.1, progress=False)
    yield hmpx.draw(model, x)
    yield hmpx.load_policy()
    yield hmpx.load_policy(
        policy={"low": ["*"], "sections": [{"module": "a", "fp32": ["add"]}] * 9}
    )
    yield [formats.get(name) for name in formats.names()]
    yield formats.table(x, ["e4m3", "mxfp4_e2m1"])


def is_ours(value: object) -> bool:
    return type(value).__module__.startswith("hmpx")


def walk(value: Any, seen: dict[int, Any]) -> None:
    """Collects ``value`` and all that its items and public attributes hold, by ``id``."""
    if id(value) in seen or isinstance(value, (str, torch.Tensor, nn.Module, type)):
        return
    seen[id(value)] = value
    held = list(value.values() if isinstance(value, Mapping) else ())
    if isinstance(value, (list, tuple, set, frozenset)):
        held += value
    # A number format's plans are its own.
    for name in dir(value) if is_ours(value) and not isinstance(value, FORMATS) else ():
        if not name.startswith("_"):
            found = getattr(value, name, None)
            held += [found] if not callable(found) or is_ours(found) else []
    for each in held:
        walk(each, seen)


@pytest.mark.filterwarnings("ignore:.* is now .*:DeprecationWarning")  # old names are there, too
def test_each_object_of_the_api_is_shown_in_three_lines() -> None:
    seen: dict[int, Any] = {}
    for result in results():
        walk(result, seen)
    ours = [value for value in seen.values() if is_ours(value)]
    kinds = {type(value).__name__ for value in ours}
    rows = {"Row", "Waste", "OpCall", "CallTensors", "Group", "ComparedSite", "ComparedGradient"}
    rows |= {"Offence", "Underflow", "Memory", "Finding", "Weight", "Run", "PerRank", "Candidate"}
    rows |= {"Evaluation", "Node", "Edge", "Section", "Decision", "ErrorStatistics", "Column"}
    assert rows <= kinds, rows - kinds
    # The repr of a number format is its definition.
    shown = {type(each).__name__: repr(each) for each in ours if not isinstance(each, FORMATS)}
    assert {name: text for name, text in shown.items() if len(text) > 3 * 80 or "\n" in text} == {}
