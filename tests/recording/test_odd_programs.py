"""`hmpx.record` with programs of all kinds: transforms, traces, compiled functions, endless variety."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hmpx
from hmpx.recording import recorder
from tests import forks
from tests.recording.test_counts import Counter

X, WEIGHT = torch.ones(5, 4, 8), torch.ones(16, 8)


@pytest.fixture(autouse=True)
def _converted() -> Iterator[None]:
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        yield


def _loss(x: Tensor) -> Tensor:
    return F.linear(x, WEIGHT).softmax(-1).square().sum()


#: Programs of torch.func.
TRANSFORMED: dict[str, Callable[[], Any]] = {
    "vmap": lambda: torch.func.vmap(lambda x: F.linear(x, WEIGHT))(X),
    "gradients of each sample": lambda: torch.func.vmap(torch.func.grad(_loss))(X),
    "grad": lambda: torch.func.grad(_loss)(X),
    "nested": lambda: torch.func.vmap(
        lambda a: torch.func.vmap(lambda b: a @ b)(X.transpose(1, 2))
    )(X),
    "ensemble": lambda: torch.func.vmap(lambda w: F.linear(X[0], w))(torch.ones(3, 16, 8)),
    "convolution": lambda: torch.func.vmap(lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3)))(
        torch.ones(4, 1, 3, 8, 8)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_a_transform_computes_at_a_time_is_counted(name: str) -> None:
    """FLOPs and casts, against torch's dispatcher."""
    program = TRANSFORMED[name]
    with FlopCounterMode(display=False) as flops, Counter() as casts:
        program()
    with hmpx.record() as rec:
        program()
    totals = rec.report().totals
    assert totals.flops == flops.get_total_flops()
    assert (totals.casts, totals.cast_bytes) == (casts.casts, casts.cast_bytes)


def _kinds(traced: Any) -> list[str]:
    return [node.kind() for node in traced.inlined_graph.nodes()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_traced_calls_are_left_alone() -> None:
    """Of a trace sizes are tensors; to ask for them would add to it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    expected = torch.jit.trace(model, X)
    with hmpx.record() as rec:
        traced = torch.jit.trace(model, X)
        torch.export.export(model, (X,))
    assert _kinds(traced) == _kinds(expected)
    assert rec.rows == () or all(type(row.bytes) is int for row in rec.rows)
    assert rec.to_json()


def test_a_function_first_compiled_inside_runs_uncompiled() -> None:
    """In a process that has not imported torch.compile; after the record it is compiled."""
    program = """
import sys, torch, hmpx
seen = []
def backend(graph, inputs):
    seen.append(1)
    return graph.forward
x = torch.ones(2, 8)
with hmpx.convert(device_types={"cpu"}, legalize="never"):
    with hmpx.record() as rec:
        x @ x.t()
    assert [row.flops for row in rec.rows] == [2 * 2 * 8 * 2]
    assert "torch._dynamo" not in sys.modules
    with hmpx.record() as rec:
        compiled = torch.compile(lambda x: torch.mm(x, x.t()).softmax(-1), backend=backend)
        compiled(x)
    print(sorted((row.op, row.calls) for row in rec.rows), seen)
    compiled(x)
    print(seen)
"""
    done = forks.run("-c", program, timeout=120, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[('mm', 1), ('softmax', 1)] []", "[1]"], done.stdout


def _kept(rec: hmpx.record) -> int:
    return len(rec._recorder._entries)


def test_variety_is_folded_and_nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shapes, in forward and backward: sums are those without folding."""
    weight = nn.Parameter(torch.ones(8, 8))

    def program() -> None:
        for size in range(1, 40):
            torch.mm(torch.ones(size, 8), weight).softmax(-1).sum().backward()
            torch.mm(torch.ones(size, 8), weight).exp()

    with hmpx.record() as expected:
        program()
    monkeypatch.setattr(recorder, "_MOST_ENTRIES", 10)
    with hmpx.record() as rec:
        program()
    assert _kept(rec) <= 11 + 2 * len(rec.rows) < 100
    assert [_sums(row) for row in rec.rows] == [_sums(row) for row in expected.rows]
    wasted = {(each.kind, each.times, each.bytes) for each in expected.waste()}
    assert {(each.kind, each.times, each.bytes) for each in rec.waste()} == wasted


def _sums(row: Any) -> tuple[Any, ...]:
    line = int(row.location.rpartition(":")[2])
    return (
        row.op, row.phase, line, row.calls, row.casts, row.cast_bytes, row.flops, row.bytes
    )  # fmt: skip


def test_threads_count_together() -> None:
    """A server starts one for each request."""
    with hmpx.record() as rec:
        for _ in range(20):
            thread = threading.Thread(target=lambda: torch.mm(WEIGHT, WEIGHT.t()))
            thread.start()
            thread.join()
    assert _kept(rec) == 1
    assert [row.calls for row in rec.rows] == [20]
