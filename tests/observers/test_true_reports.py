"""What is said of calls is what was done."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hmpx


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_tensors_on_other_devices_are_not_reported_as_cast() -> None:
    calls: list[hmpx.OpCall] = []
    x = torch.ones(2, 2)
    with hmpx.convert(device_types={"cuda"}), hmpx.attach(calls.append):
        torch.mm(x, x)
    (call,) = calls
    assert (call.dtype, call.cast_policy, call.cast_bytes) == (None, "PASS", 0)
    assert call.cast_dtypes == call.output_dtypes * 2 == (torch.float32,) * 2
    assert "cpu" in call.reason


@pytest.mark.parametrize("off", [hmpx.disable_casts, lambda: torch.autocast("cpu", enabled=False)])
def test_compare_and_tune_refuse_where_casts_are_off(off: object) -> None:
    x = torch.ones(2, 2)
    with hmpx.convert(device_types={"cpu"}), off():  # type: ignore[operator]
        with pytest.raises(hmpx.OptionError, match=r"compare .* casts are off"):
            hmpx.compare(torch.nn.Linear(2, 2), x)
        with pytest.raises(hmpx.OptionError, match=r"tune .* casts are off"):
            hmpx.tune(torch.nn.Linear(2, 2), [x], tolerance=0.1)


def test_compare_names_outputs_that_differ_otherwise_or_that_it_can_not_look_at() -> None:
    class Slotted:
        __slots__ = ("y",)

    def model(x: torch.Tensor) -> object:
        y = x @ x
        count = int((y != y.bfloat16()).sum())
        return {"y": y, "low": y == y.bfloat16(), "count": count, "same": 3, "object": Slotted()}

    found = hmpx.compare(model, torch.full((2, 2), 1.01))
    notes = [
        "output ['low']: 4 of 4",
        "output ['count'] is 4 in fp32, 0 in",
        "output ['object'] can't",
    ]
    assert [a.startswith(b) for a, b in zip(found.output_notes, notes, strict=True)] == [True] * 3
    assert all(note in str(found).replace("\n", " ") for note in notes)


@pytest.mark.parametrize("returned", [None, object()])
def test_tune_refuses_what_has_no_numbers(returned: object) -> None:
    with pytest.raises(hmpx.OptionError, match="sees no numbers; return tensors"):
        hmpx.tune(lambda x: (x @ x, returned)[1], [torch.ones(2, 2)], tolerance=0.1)


def seen(function: Callable[[], object], **options: Any) -> hmpx.OpCall:
    """Returns the last call that ``function`` makes."""
    calls: list[hmpx.OpCall] = []
    with (
        hmpx.convert(device_types={"cpu"}, **options),
        hmpx.attach(calls.append, every_op=True),
    ):
        function()
    return calls[-1]


def test_what_was_tried_again_in_fp32_is_reported_as_such(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
def refuse(x):
    if str(x.dtype) != "torch.float32":
        raise RuntimeError("not implemented for 'BFloat16'")
    return x + 1
"""
    (tmp_path / "refusing_kernels.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    kernels = importlib.import_module("refusing_kernels")
    policy = {"lists": "none", "low": ["refusing_kernels.refuse"]}
    found = seen(lambda: kernels.refuse(torch.ones(2)), policy=policy)
    assert (found.op, found.legalized) == ("refusing_kernels.refuse", True)


def test_what_torch_autocast_casts_is_reported_as_it_ran() -> None:
    def in_region(*inputs: torch.Tensor) -> hmpx.OpCall:
        def call() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                torch.mm(*inputs)

        return seen(call, policy={"lists": "none", "low": ["relu"]})

    x = torch.eye(2)
    found = in_region(x, x)
    assert (found.dtype, found.cast_policy, found.reason) == (
        torch.bfloat16, "PASS", "torch.autocast",
    )  # fmt: skip
    assert (found.cast_dtypes, found.cast_bytes) == (found.input_dtypes, 0)
    assert in_region(x.bfloat16(), x.bfloat16()).dtype is None, "it was left alone"
    assert in_region(x.double(), x.double()).dtype is None


@pytest.mark.parametrize(
    ("mode", "said"),
    [("never", "100 % were computed natively, 0 % in"), ("always", "100 % in fp32 and")],
)
def test_the_verdict_says_what_was_computed_natively(mode: str, said: str) -> None:
    with hmpx.convert(device_types={"cpu"}, legalize=mode), hmpx.record() as recording:
        torch.mm(torch.eye(2), torch.eye(2))
    report = recording.report()
    assert said in str(report).splitlines()[1]
    assert [row.legalized for row in report.rows] == [mode == "always"]


def test_where_casts_are_off_calls_are_reported_once() -> None:
    """Ops that a rule decides too, and not what a reported function calls."""
    calls: list[hmpx.OpCall] = []
    x = torch.rand(4)
    with (
        hmpx.convert(device_types={"cpu"}),
        hmpx.attach(calls.append, every_op=True),
        hmpx.disable_casts(),
    ):
        torch.einsum("i,j->ij", x, x)
        torch.nn.functional.softmin(x, 0)
        torch.norm(x)
    assert [call.op for call in calls] == ["einsum", "softmin", "norm"]
