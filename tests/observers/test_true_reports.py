"""What is said of calls is what was done."""

from __future__ import annotations

import pytest
import torch

import hmpx


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


def test_operators_in_python_that_wrap_c_functions_are_observed() -> None:
    y = torch.tensor([1.0, 2.0])
    calls: list[hmpx.OpCall] = []
    with (
        hmpx.convert(policy={"lists": "none", "low": ["linear"]}, device_types={"cpu"}),
        hmpx.attach(calls.append, every_op=True),
    ):
        y**2
        y**y
        2**y
        y **= 1
        y.pow(2)
    assert [call.op for call in calls if "pow" in call.op] == ["pow"] * 3 + ["ipow", "pow"]


def test_compare_does_not_say_0_of_outputs_that_it_does_not_look_at() -> None:
    def spectrum(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(torch.tanh(x @ x.t()).float())

    found = hmpx.compare(spectrum, torch.randn(6, 6))
    assert found.output_rel != 0
    assert "differ by 0" not in str(found)
