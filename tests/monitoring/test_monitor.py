"""`hmpx.monitor`: its figures are those of an independent count, and the program does not change."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.cli import main

pytestmark = pytest.mark.native

_NUMPY = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
_RANGES = {
    torch.bfloat16: ml_dtypes.finfo(ml_dtypes.bfloat16),
    torch.float16: np.finfo(np.float16),
}


class Net(nn.Module):
    """Two layers with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.norm(self.fc1(x))))


def train(
    net: nn.Module, steps: int, on_step: Callable[[int], object] | None = None, lr: float = 0.01
) -> list[Tensor]:
    """Trains a net and returns its parameters."""
    torch.manual_seed(3)
    dtype = next(net.parameters()).dtype
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(steps):
        x = torch.randn(4, 8, dtype=dtype)
        loss = (net(x).float() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if on_step is not None:
            on_step(step)
    return [each.detach().clone() for each in net.parameters()]


def counted(values: Tensor, of: torch.dtype, *, is_cast: bool) -> dict[str, float]:
    """Returns the figures of values, counted by numpy in float64."""
    x = values.detach().double().numpy()
    x = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float32).astype(_NUMPY[of]).astype(np.float64) if is_cast else x
    held, limit = np.isfinite(rounded), _RANGES[of]
    nonzero = np.count_nonzero(x)
    most, least = float(limit.max), float(limit.smallest_normal)
    sizes = np.abs(np.where(held, rounded, x))
    found = {
        "zeros": np.mean(x == 0),
        "amax": np.abs(x).max(),
        "near_max": np.mean((np.abs(x) > most / 4) & (np.abs(x) < most)),
        "subnormal": np.count_nonzero((sizes > 0) & (sizes < least)) / nonzero,
    }
    if is_cast:
        errors = np.where(held, rounded - x, 0)
        found |= {
            "underflow": np.count_nonzero((rounded == 0) & (x != 0)) / nonzero,
            "overflow": np.mean(~held),
            "error": np.sqrt(np.sum(errors**2) / np.sum(x**2)),
        }
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-38, 3e4])
def test_figures_are_those_of_an_independent_count(low: torch.dtype, scale: float) -> None:
    x = torch.randn(31, 8).mul(scale).mul(torch.randn(31, 8).exp())
    x[0], x[1, 0], x[2] = 0, 2.0**-25, float(_RANGES[low].max)
    linear = nn.Linear(8, 4)
    with (
        hmpx.convert(low_precision_type=low, device_types={"cpu"}),
        hmpx.monitor(formats=["float16", "bfloat16"]) as monitor,
    ):
        y = linear(x)
        _ = x.double() * 1.0  # which the compiled kernel doesn't read
        monitor.step()
    found = monitor.figures
    expected = {
        "linear/input/": counted(x, low, is_cast=True),
        "linear/activation/": counted(y, low, is_cast=False),
        "weight/weight/": counted(linear.weight, low, is_cast=True),
        "mul/activation/float16.": _rounded(counted(x, torch.float16, is_cast=True)),
        "mul/activation/bfloat16.": _rounded(counted(x, torch.bfloat16, is_cast=True)),
        "linear/input/float16.": _rounded(counted(x, torch.float16, is_cast=True)),
    }
    for row, figures in expected.items():
        for name, value in figures.items():
            rel = 1e-5 if name == "error" else 1e-12
            assert found[f"hmpx/{row}{name}"] == pytest.approx(value, rel=rel), (row, name)


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """Returns the figures that a format has that is only tried."""
    return {name: value for name, value in figures.items() if name not in ("zeros", "amax")}


def test_gradients_weights_states_and_steps() -> None:
    net = Net().to(torch.bfloat16)
    gradients: dict[str, Tensor] = {}
    with hmpx.monitor(every=1) as monitor:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
        x = torch.randn(4, 8, dtype=torch.bfloat16)
        net(x).sum().backward()
        gradients = {name: each.grad.clone() for name, each in net.named_parameters()}  # type: ignore[union-attr]
        before = [each.detach().clone() for each in net.parameters()]
        optimizer.step()
    figures = monitor.figures
    for (name, parameter), old in zip(net.named_parameters(), before, strict=True):
        path = name.replace(".", "/")
        gradient = gradients[name]
        assert figures[f"hmpx/{path}/gradient/amax"] == gradient.abs().max().item()
        moving = gradient != 0
        unchanged = ((parameter == old) & moving).sum() / moving.sum()
        assert figures[f"hmpx/{path}/weight/unchanged"] == pytest.approx(unchanged.item())
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert figures[f"hmpx/{path}.momentum_buffer/state/amax"] == momentum.abs().max().item()
    assert figures["hmpx/fc2/linear/gradient/amax"] == 1.0  # of the results of a call
    assert {each.name for each in monitor.alarms} >= {"hmpx/fc1/weight/weight/unchanged"}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("way", ["fp32", "convert", "autocast", "bfloat16"])
def test_the_training_keeps_its_bits(way: str, every: int) -> None:
    torch.manual_seed(0)
    made = [Net(), Net()]
    made[1].load_state_dict(made[0].state_dict())
    if way == "bfloat16":
        made = [each.bfloat16() for each in made]

    def run(net: nn.Module) -> list[Tensor]:
        if way != "autocast":  # a region that is not enabled switches casts off
            return train(net, 7)
        with torch.autocast("cpu", torch.bfloat16):
            return train(net, 7)

    if way == "convert":
        hmpx.convert(device_types={"cpu"})
    plain = run(made[0])
    with hmpx.monitor(every=every, formats=["float8_e4m3fn"]):
        monitored = run(made[1])
    assert all(map(torch.equal, plain, monitored))


def test_one_step_in_every_is_logged() -> None:
    steps: list[int] = []
    with hmpx.monitor(every=3, log=lambda figures, step: steps.append(step)) as monitor:
        train(Net(), 8)
    assert steps == [0, 3, 6]
    assert monitor.step_number == 8


def test_modules_and_ops_are_chosen() -> None:
    with hmpx.monitor(every=1, modules=["fc*"], ops=["linear"]) as monitor:
        train(Net(), 1)
    rows = {name.rsplit("/", 2)[0] for name in monitor.figures}
    assert {"hmpx/fc1/linear", "hmpx/fc2/linear", "hmpx/fc1/weight"} <= rows
    assert not any("norm" in each or "relu" in each for each in rows)


def test_evaluation_between_steps_is_left_out() -> None:
    net = Net()

    def evaluate(step: int) -> None:
        net.eval()
        with torch.no_grad():
            net(torch.full((4, 8), 1e30))
        net.train()

    with hmpx.monitor(every=1) as monitor:
        train(net, 3, evaluate)
    assert max(v for n, v in monitor.figures.items() if n.endswith("activation/amax")) < 100


def test_loss_scaling_is_a_figure_and_skipped_steps_are_steps() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    logged: dict[int, dict[str, float]] = {}
    limits = {"hmpx/skipped_steps": 0.5}
    with hmpx.monitor(
        every=1,
        log=lambda figures, step: logged.update({step: dict(figures)}),
        alarms=limits,
        on_alarm="collect",
    ) as monitor:
        for step in range(4):
            loss = net(torch.randn(4, 8)).mean()
            scaler.scale(loss * math.inf if step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert monitor.step_number == 4
    assert [each["hmpx/skipped_steps"] for each in logged.values()] == [0.0, 1.0, 1.0, 1.0]
    assert [logged[step]["hmpx/loss_scale"] for step in range(4)] == [1024.0, 1024.0, 512.0, 512.0]
    assert logged[1]["hmpx/fc1/weight/weight/amax"] == logged[2]["hmpx/fc1/weight/weight/amax"]
    assert [(each.name, each.step) for each in monitor.alarms] == [("hmpx/skipped_steps", 1)]


def test_gradients_that_a_closure_makes_are_measured() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    with hmpx.monitor(every=1) as monitor:
        optimizer.step(closure)
    assert net.weight.grad is not None
    assert monitor.figures["hmpx/weight/gradient/amax"] == net.weight.grad.abs().max().item()


def test_patterns_that_match_nothing_are_named() -> None:
    limits = {**hmpx.monitoring.ALARMS, "*/weight/amaxx": 1.0}  # those of hmpx need not match
    with (
        hmpx.monitor(every=1, modules=["fc1", "fcc*"], alarms=limits),
        pytest.warns(hmpx.HmpxWarning) as found,
    ):
        train(Net(), 3)
    assert sorted({str(each.message) for each in found}) == [
        "hmpx.monitor: alarms['*/weight/amaxx'] matches none of the figures of step 0, such as "
        "'hmpx/fc1/weight/weight/zeros'",
        "hmpx.monitor: modules='fcc*' matches none of the modules of step 0, such as 'norm'",
    ]


def test_beside_other_observers_a_call_runs_and_is_described_once() -> None:
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **kwargs or {})

    x, seen = torch.randn(8, 8), [list[Any](), list[Any]()]
    with hmpx.convert(device_types={"cpu"}):
        with hmpx.monitor(every=1) as alone:
            torch.mm(x, x)
            alone.step()
        with (
            hmpx.record() as record,
            hmpx.watch(),
            hmpx.monitor(every=1) as monitor,
            hmpx.attach(seen[0].append, every_op=True),
            hmpx.attach(seen[1].append, every_op=True),
        ):
            with Products() as products:
                torch.mm(x, x)
            monitor.step()
    assert products.count == len(record.by_op()) == 1
    assert [[id(call) for call in calls] for calls in seen] == [[id(seen[0][0])]] * 2
    assert monitor.figures == alone.figures


def test_a_figure_that_swings_gives_one_alarm() -> None:
    with hmpx.monitor(alarms={"*/amax": 9.0}, on_alarm="collect", every=1) as monitor:
        for value in (10.0, 8.0, 10.0, 4.0, 10.0):
            torch.ones(2) * value
            monitor.step()
    assert [each.step for each in monitor.alarms] == [0, 4]


def test_a_view_whose_node_is_forbidden_is_measured() -> None:
    base = torch.zeros(3, requires_grad=True) * 1.0
    with torch.no_grad():
        view = base[:2]
    base.mul_(2.0)
    with hmpx.monitor(every=1) as monitor, torch.no_grad():
        view.add_(1.0)
        monitor.step()
    assert monitor.figures["hmpx/add/activation/amax"] == 1.0


def test_models_that_are_gone_are_forgotten() -> None:
    with hmpx.monitor(every=1) as monitor:
        for _ in range(3):
            net = Net()
            gone = weakref.ref(net)
            net(torch.ones(1, 8)).sum().backward()
            monitor.step()
            assert "hmpx/fc1/linear/activation/amax" in monitor.figures
            del net
            gc.collect()
            assert gone() is None


def test_two_models_have_two_names() -> None:
    a, b = Net(), Net()
    with hmpx.monitor(every=1) as monitor:
        b(a(torch.ones(1, 8)))
        monitor.step()
    assert {"hmpx/fc1/linear/activation/amax", "hmpx/Net/fc1/linear/activation/amax"} <= {
        *monitor.figures
    }


def test_casts_of_autocast_are_measured() -> None:
    x, linear = torch.randn(2, 3) * 1e5, nn.Linear(3, 3)
    with torch.autocast("cpu", torch.float16), hmpx.monitor(on_alarm="collect") as monitor:
        linear(x)
        monitor.step()
    expected = (x.half().isinf().double().mean() > 0).item()
    assert (monitor.figures["hmpx/linear/input/overflow"] > 0) == expected
    assert monitor.figures["hmpx/weight/weight/error"] > 0


def test_odd_optimizers_do_not_stop() -> None:
    embedding = nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    optimizer.state["global"] = 1  # type: ignore[index]
    with hmpx.monitor(every=1) as monitor:
        embedding(torch.tensor([1, 2])).float().sum().backward()
        optimizer.step()
    assert monitor.step_number == 1


def test_several_optimizers_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (a, b)]
    with hmpx.monitor(every=1):
        for _ in range(3):
            b(a(torch.ones(1, 2))).sum().backward()
            for each in optimizers:
                each.step()
    assert caplog.text.count("call the monitor's .step()") == 1


def test_steps_by_hand_of_two_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (a, b)]
    logged: list[tuple[int, int]] = []
    with hmpx.monitor(every=1, log=lambda figures, step: logged.append((step, len(figures)))) as m:
        for _ in range(3):
            b(a(torch.ones(1, 2))).sum().backward()
            for each in optimizers:
                each.step()
            m.step()
    assert [step for step, _ in logged][-2:] == [2, 3]
    assert logged[-1][1] == logged[-2][1]  # of both
    assert "call the monitor's .step()" in caplog.text
    with hmpx.monitor(every=1, step=7) as m:
        for _ in range(2):
            a(torch.ones(1, 2)).sum().backward()
            optimizers[0].step()
            m.step()
    assert m.step_number == 9


def test_a_block_without_a_step_is_one_and_counts_do_not_pile_up() -> None:
    net = Net()
    with hmpx.monitor() as monitor:
        for _ in range(1000):
            net(torch.ones(1, 8))
        assert 0 < len(monitor._measured) < 5000  # of 6,000
    assert monitor.figures["hmpx/fc1/linear/activation/nonfinite"] == 0.0


def test_a_part_called_alone_does_not_rename_parameters() -> None:
    net = Net()
    with hmpx.monitor(every=1) as monitor:
        for _ in range(2):
            train(net, 1)
            net.fc1(torch.ones(1, 8))
    assert "hmpx/fc1/weight/gradient/amax" in monitor.figures
    assert not any(name.startswith("hmpx/Linear/weight") for name in monitor.figures)


def test_a_learning_rate_of_zero_is_no_lost_update() -> None:
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        train(Net().bfloat16(), 1, lr=0.0)
    assert not any("unchanged" in name for name in monitor.figures)


def test_parameters_of_a_compiled_model_have_their_names() -> None:
    net = Net()
    compiled = torch.compile(net, backend="aot_eager")
    with hmpx.monitor(every=1, model=compiled) as monitor:
        compiled(torch.ones(2, 8)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert "hmpx/fc1/weight/gradient/amax" in monitor.figures


# --- alarms --------------------------------------------------------------------------------------


def overflowing(scale: float, weight: Tensor = torch.ones(4, 4)) -> None:  # noqa: B008
    torch.nn.functional.linear(torch.full((2, 4), scale), weight)


def test_an_alarm_names_figure_limit_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    hmpx.convert(low_precision_type=torch.float16, device_types={"cpu"})
    with caplog.at_level(logging.WARNING, "hmpx"), hmpx.monitor(every=1) as monitor:
        for scale in (1.0, 6000.0, 6000.0, 1.0, 6000.0):
            overflowing(scale)
            monitor.step()
    assert [each.step for each in monitor.alarms] == [1, 4]  # once while it lasts
    first = monitor.alarms[0]
    assert (first.name, first.op) == ("hmpx/linear/activation/near_max", "linear")
    assert "bfloat16 for linear holds all values" in first.remedy
    assert "hmpx/linear/activation/near_max is 1 in step 1, over 0" in caplog.text


def test_an_alarm_is_raised_or_passed_on() -> None:
    hmpx.convert(low_precision_type=torch.float16, device_types={"cpu"})
    with hmpx.monitor(every=1, on_alarm="raise") as monitor:
        overflowing(6000.0)
        with pytest.raises(hmpx.AlarmError, match="near_max") as raised:
            monitor.step()
    assert raised.value.alarm is monitor.alarms[0]
    found: list[hmpx.Alarm] = []
    with hmpx.monitor(every=1, on_alarm=found.append) as monitor:
        overflowing(6000.0)
        monitor.step()
    assert found == monitor.alarms


def test_an_alarm_that_is_caught_ends_its_step() -> None:
    steps: list[int] = []
    net = Net().bfloat16()
    with hmpx.monitor(every=1, on_alarm="raise", log=lambda f, step: steps.append(step)) as monitor:
        for _ in range(3):
            with contextlib.suppress(hmpx.AlarmError):
                train(net, 1, lr=1e-9)
    assert monitor.alarms
    assert (steps, monitor.step_number) == ([0, 1, 2], 3)


def test_own_limits_replace_the_default_ones() -> None:
    hmpx.convert(low_precision_type=torch.float16, device_types={"cpu"})
    limits = {"*/amax": 100.0, "*/activation/amax": math.inf}
    with hmpx.monitor(every=1, alarms=limits, on_alarm="collect") as monitor:
        overflowing(6000.0)
        monitor.step()
    assert [each.name for each in monitor.alarms] == ["hmpx/linear/input/amax"]


def test_a_loss_scale_that_helps_is_named() -> None:
    net = nn.Linear(4, 4).half()
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        (net(torch.ones(2, 4).half()) * 2.0**-18).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    found = [each for each in monitor.alarms if each.name.endswith("weight/gradient/subnormal")]
    assert "a loss scale of 2**" in found[0].remedy


def test_a_remedy_is_tried_at_the_next_checked_step() -> None:
    hmpx.convert(low_precision_type=torch.float16, device_types={"cpu"})
    told: list[hmpx.Alarm] = []
    with hmpx.monitor(every=2, on_alarm=told.append) as monitor:
        for _ in range(5):
            overflowing(6000.0)
            monitor.step()
    name = "hmpx/linear/activation/near_max"
    assert [(each.name, bool(each.tried)) for each in told] == [(name, False), (name, True)]
    assert monitor.alarms == [told[1]]
    assert told[1].tried == "in step 2 bfloat16 gave 0 in place of 1"


def test_casts_of_the_program_are_not_tried() -> None:
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        for _ in range(2):
            torch.full((2, 4), 1e9).clamp(max=448.0).to(torch.float8_e4m3fn)
            monitor.step()
    (alarm,) = [each for each in monitor.alarms if each.name.endswith("to/activation/saturated")]
    assert not alarm.tried


def test_a_step_is_tried_in_float32() -> None:
    linear = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-6)
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            linear(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
            weight, gradient = linear.weight.detach().float(), linear.weight.grad.float()  # type: ignore[union-attr]
            optimizer.step()
    unchanged = (weight - 1e-6 * gradient == weight) & (gradient != 0)
    share = unchanged.sum().item() / gradient.count_nonzero().item()
    assert 0 < share < 0.9
    tried = {each.name: each.tried for each in monitor.alarms}["hmpx/weight/weight/unchanged"]
    assert tried == f"in step 1 float32 gave {share:.3g} in place of 1"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_trials_of_remedies_change_no_bit(low: torch.dtype) -> None:
    made = [nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(8, 8)).to(low) for _ in "ab"]
    made[1].load_state_dict(made[0].state_dict())
    limits = {"*/unchanged": 0.5, "*/error_of_spread": 0.0, "*/subnormal": 1e-9}
    plain = train(made[0], 4, lr=1e-6)
    with hmpx.monitor(every=1, alarms=limits, on_alarm="collect") as monitor:
        monitored = train(made[1], 4, lr=1e-6)
    assert all(map(torch.equal, plain, monitored))
    tried = {each.name: each.tried for each in monitor.alarms if each.tried}
    assert "in place of" in tried["hmpx/0.fc1/linear/activation/error_of_spread"]
    assert "hmpx/1/dropout/activation/error_of_spread" not in tried  # it would draw other numbers


# --- logs ----------------------------------------------------------------------------------------


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []


def _writer(found: _Recorder) -> object:
    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            found.calls.append((name, value, step))

    return Writer()


def _metrics(found: _Recorder) -> object:
    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            found.calls.extend((name, value, step) for name, value in metrics.items())

    return Logger()


def _run(found: _Recorder) -> object:
    class Run:
        def log(self, data: dict[str, float], step: int) -> None:
            found.calls.extend((name, value, step) for name, value in data.items())

    return Run()


@pytest.mark.parametrize("made", [_writer, _metrics, _run])
def test_known_loggers_get_each_figure(made: Callable[[_Recorder], object]) -> None:
    found = _Recorder()
    with hmpx.monitor(every=1, log=made(found)) as monitor:
        train(Net(), 1)
    assert found.calls == [(name, value, 0) for name, value in monitor.figures.items()]


def test_a_log_that_fails_does_not_stop_the_training() -> None:
    def fails(figures: object, step: int) -> None:
        raise OSError("the network is down")

    steps: list[int] = []
    logs = [fails, lambda figures, step: steps.append(step)]
    with pytest.warns(hmpx.HmpxWarning, match=r"failed in step 0.*the network is down"):  # noqa: SIM117
        with hmpx.monitor(every=1, log=logs):
            train(Net(), 3)
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"hmpx_monitor": 1, "about": {}}\n',
        '{"hmpx_monitor": 2, "about": {}}\n{"step": 0, "figures": {}}\n',
        "[1]\n",
        '{"hmpx_monitor": 1, "about": {}}\n{"step": 0, "figures": {"a": null}}\n{"step": 1, "figures": {}}\n',
        '{"hmpx_monitor": 1, "about": {}}\n{"step": 0, "figures": {"a": 1%s}}\n{"step": 1}\n'
        % ("0" * 400),
    ],
)
def test_odd_files_are_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text, "utf-8")
    assert main(["monitor", str(path)]) == 2
    assert "odd.jsonl" in capsys.readouterr().err


def test_a_run_is_written_read_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    with hmpx.monitor(every=2, log=path) as monitor:
        train(Net().bfloat16(), 6, lr=1e-6)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 99, "fig')  # a kill
    with hmpx.monitor(every=2, log=path):
        train(Net().bfloat16(), 6)
    header, *lines = map(json.loads, path.read_text("utf-8").splitlines()[:4])
    assert header["about"]["torch"] == torch.__version__
    assert [each["step"] for each in lines] == [0, 2, 4]
    assert lines[-1]["figures"] == monitor.figures
    assert main(["monitor", str(path), str(path), "--html", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "unchanged of each weight" in text and "fc1/weight" in text
    assert main(["monitor", str(path)]) == 0
    assert "run.jsonl: 3 checked steps" in capsys.readouterr().out


def test_a_file_of_something_else_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("{}\n", "utf-8")
    with pytest.raises(hmpx.OptionError, match=r"not a file of hmpx\.monitor; give another path"):
        hmpx.monitor(log=path)
    assert path.read_text("utf-8") == "{}\n"
    assert main(["monitor", str(path)]) == 2
    assert "mine.jsonl:1: not a file of hmpx.monitor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every must be an int of at least 1, not 0"),
        ({"ops": ["linearr"]}, "did you mean 'linear'?"),
        ({"log": "run.csv"}, r"log must be .*jsonl.*, not 'run.csv'"),
        ({"log": 3}, r"log must be .*, not 3"),
        ({"log": "missing/run.jsonl"}, "its directory does not exist; make it first"),
        ({"model": 3}, "model must be an nn.Module, not 3"),
        ({"step": -1}, "step must be an int of at least 0, not -1"),
        ({"alarms": {"*/amax": "high"}}, r"alarms\['\*/amax'\] must be a number, not 'high'"),
        ({"alarms": 3}, "alarms must be a dict of pattern -> limit, not 3"),
        ({"on_alarm": "stop"}, "on_alarm"),
        ({"formats": ["float9"]}, "float9"),
    ],
)
def test_bad_options_are_named_before_anything_runs(options: dict[str, Any], said: str) -> None:
    with pytest.raises(hmpx.OptionError, match=said):
        hmpx.monitor(**options)


def _monitored_half(steps: int = 3) -> tuple[dict[str, float], list[str]]:
    """Returns the last figures of a bf16 training with a loss scaler, and the alarms whose remedy was tried."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).bfloat16(), torch.ones(4, 8, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(x).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return monitor.figures, [each.tried for each in monitor.alarms if each.tried]


def test_a_group_of_one_process_changes_nothing(tmp_path: Path) -> None:
    """Types keep their identity on their way through the processes."""
    expected = _monitored_half()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        found = _monitored_half()
    finally:
        torch.distributed.destroy_process_group()
    assert found == expected
    assert found[0]["hmpx/loss_scale"] == 1024.0
    assert found[1]


class _Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_within_a_step_is_no_step() -> None:
    """`Optimizer.step` of a parent class has hooks of its own once that class was made."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = _Twice([weight], 1e-6)
    with hmpx.monitor(every=1, on_alarm="collect") as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
    assert monitor.step_number == 4
    assert [each.tried for each in monitor.alarms if each.tried]
