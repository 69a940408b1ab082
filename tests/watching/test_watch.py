"""The block that is watched: its modes and steps, and that the program does not notice."""

from __future__ import annotations

import logging
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import NonFiniteError, OptionError
from hmpx.observers import ATTACHED, PAUSED
from hmpx.watching.notes import Notes
from tests import forks

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16 = torch.float16


def convert(**options: Any) -> hmpx.Session:
    return hmpx.convert(device_types={"cpu"}, **options)


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Training:
    """A small model whose input is as large as a step says."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def gradients(self, scale: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = torch.exp(scale * self.model(torch.ones(2, 4)).float().abs()).mean()
        loss.backward()
        return loss

    def step(self, scale: float = 1.0) -> None:
        self.gradients(scale)
        self.optimizer.step()


BAD = 1e4


def test_an_error_is_raised_before_weights_change() -> None:
    training = Training()
    error = pytest.raises(NonFiniteError, match="exp: infinity in step 1")
    with convert(), error as caught, hmpx.watch():
        training.step()
        before = [p.clone() for p in training.model.parameters()]
        training.step(BAD)
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    offence = caught.value.offence
    assert (offence.op, offence.step, offence.phase) == ("exp", 1, "forward")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.offence == offence and str(copy) == str(offence)


def test_the_log_names_each_offence_once(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with caplog.at_level(logging.WARNING, "hmpx"), convert(), hmpx.watch("log") as w:
        for _ in range(3):
            training.step(BAD)
    assert len(w.offences) > 1
    assert len([each for each in caplog.messages if each.startswith("exp: infinity")]) == 1


def test_one_step_of_several_is_watched() -> None:
    training = Training()
    with convert(), hmpx.watch("collect", every=3) as w:
        for step in range(7):
            assert bool(PAUSED) == (step % 3 != 0)
            training.step(BAD if step in (1, 3) else 1.0)
            for p in training.model.parameters():
                nn.init.constant_(p.data, 0.1)
    assert w.first is not None and w.first.step == 3


@pytest.mark.parametrize("steps", [[2, 3], range(2, 4)])
def test_a_window_of_steps_is_watched(steps: Any) -> None:
    with convert(), hmpx.watch("collect", steps=steps) as w:
        for _ in range(6):
            torch.exp(torch.full((2,), BAD))
            w.step()
    assert [each.step for each in w.offences] == [2, 3]


def test_a_pair_of_steps_still_works() -> None:
    """Under a warning, since elsewhere it would be two steps."""
    with pytest.warns(DeprecationWarning, match=r"steps=\(2, 4\) is now steps=range\(2, 4\)"):
        w = hmpx.watch("collect", steps=(2, 4))
    with convert(), w:
        for _ in range(6):
            torch.exp(torch.full((2,), BAD))
            w.step()
    assert [each.step for each in w.offences] == [2, 3]


@pytest.mark.parametrize("steps", [3, "first", [], [-1], [None]])
@pytest.mark.parametrize("tool", [hmpx.watch, lambda steps: hmpx.trace("a.hmpx", steps=steps)])
def test_wrong_steps_are_errors(tool: Any, steps: Any) -> None:
    with pytest.raises(hmpx.OptionError, match=r"steps (must be|are) number"):
        tool(steps=steps)


def test_every_counts_from_the_first_step_chosen() -> None:
    with convert(), hmpx.watch("collect", steps=range(1, 6), every=2) as w:
        for _ in range(8):
            torch.exp(torch.full((2,), BAD))
            w.step()
    assert [each.step for each in w.offences] == [1, 3, 5]


def test_a_closure_is_run_again_op_by_op_on_the_same_random_numbers() -> None:
    training = Training()
    losses: list[float] = []

    def gradients(scale: float) -> Tensor:
        loss = training.gradients(scale)
        losses.append(loss.item())
        return loss

    with convert(), hmpx.watch("collect", step=gradients) as w:
        w.step(1.0)
        assert len(losses) == 1 and w.first is None
        loss = w.step(1.0)
        state = torch.get_rng_state()
        torch.set_rng_state(state)
        w.step(1e3)
        expected = torch.rand(1)
    assert isinstance(loss, Tensor) and loss.isfinite()
    assert len(losses) == 4 and losses[2] == losses[3]
    assert w.first is not None and (w.first.op, w.first.step) == ("exp", 2)
    torch.set_rng_state(state)
    with convert():
        training.gradients(1e3)
    assert torch.equal(torch.rand(1), expected)


def test_nothing_has_to_be_converted() -> None:
    with hmpx.watch("collect") as w:
        y = F.linear(torch.ones(2, 3), torch.full((4, 3), 1e30)).square()
    assert y.dtype is torch.float32
    assert w.first is not None and (w.first.op, w.first.kind) == ("square", "inf")
    assert not hmpx.is_converted() and not ATTACHED.value and not PAUSED


def test_names_and_text() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act = nn.Linear(2, 2), Exp()

        def forward(self, h: Tensor) -> Tensor:
            return self.act(self.first(h) * 0 + 20)

    class Exp(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return torch.exp(h)

    with convert(lists="lean", low_precision_type=FP16), hmpx.watch("collect") as w:
        Net()(x(3, 2))
    assert w.first is not None and w.first.module == "act"
    lines = str(w.first).splitlines()
    assert lines[:2] == ["exp: overflow in step 0, forward", "  module   act"]
    assert lines[3] == "  input 0  20 .. 20"
    assert lines[-1] == "  remedy   fp32.txt: exp"
    assert [each.op for each in w.first.context] == ["linear", "mul", "add"]
    assert w.first.ranges[0].amax == 20


# --- the program does not notice ---------------------------------------------------------------


@pytest.mark.parametrize("legalize", ["never", "always"])
def test_results_gradients_random_numbers_and_versions_are_the_same(legalize: str) -> None:
    def outcome() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        head = nn.Sequential(nn.Dropout(0.5), nn.Linear(108, 5))
        given = x(4, 2, 8, 8).requires_grad_()
        hidden = model(given)
        versions = torch.tensor([hidden._version, given._version])
        loss = F.cross_entropy(head(hidden), torch.arange(4))
        loss.backward()
        parameters = [*model.parameters(), *head.parameters()]
        grads = [p.grad for p in parameters]
        return [loss, given.grad, *grads, *model.buffers(), versions, torch.rand(1)]

    with convert(legalize=legalize):
        expected = outcome()
        with hmpx.watch(underflow=True) as w:
            actual = outcome()
    assert w.first is None
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_several_threads() -> None:
    def run() -> None:
        for seed in range(5):
            h = x(8, 8, seed=seed).requires_grad_()
            torch.tanh(torch.mm(h, h)).sum().backward()

    with convert(), hmpx.watch("collect") as w:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert w.first is None
        torch.exp(torch.full((2,), BAD))
    assert w.first is not None and w.first.op == "exp"


def test_a_step_that_another_thread_ends_amid_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that was measured before belongs to the next step, with its own values."""
    kept = Notes.try_backward

    def try_backward(notes: Notes, *args: Any) -> None:
        monkeypatch.undo()
        thread = threading.Thread(target=w.step)
        thread.start()
        thread.join()
        kept(notes, *args)

    monkeypatch.setattr(Notes, "try_backward", try_backward)
    with convert(), hmpx.watch("collect") as w:
        x(8, 8).requires_grad_().sum().backward()
        for _ in range(20):
            torch.exp(torch.full((2,), BAD))
    assert {each.op for each in w.offences} == {"exp"}


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_models_run_eagerly() -> None:
    model = torch.compile(lambda h: torch.exp(h * BAD), backend="eager")
    with convert():
        model(torch.ones(2))
        with hmpx.watch("collect") as w:
            model(torch.ones(2))
    assert w.first is not None and w.first.op == "exp"


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "warn"}, {"every": 0}, {"every": 1.5}, {"step": 3}, {"steps": range(3, 3)}, {"steps": 7},
        {"underflow": 2.0}, {"underflow": "yes"},
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        hmpx.watch(**options)


# --- loss scaling and underflow ----------------------------------------------------------------


def scaled_steps(w: hmpx.Watch, count: int, factor: float) -> torch.amp.GradScaler:
    """Trains with gradients that overflow float16 at every scale above ``60000 / factor``."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, backoff_factor=0.5)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    for _ in range(count):
        optimizer.zero_grad()
        loss = (weight.half() * factor).float().sum() / factor
        loss = loss + ((weight.half() * 2).float() * 1e-3).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_a_loss_scale_that_is_being_found_is_no_offence() -> None:
    with convert(low_precision_type=FP16), hmpx.watch("raise") as w:
        scaler = scaled_steps(w, 12, 100.0)
    assert w.first is None and scaler.get_scale() < 2.0**16


def test_a_loss_scale_that_falls_for_ever_is_one() -> None:
    with convert(low_precision_type=FP16), hmpx.watch("collect") as w:
        scaler = torch.amp.GradScaler("cpu")
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], lr=1e-6)
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale((weight * 1).sqrt().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.first is not None and (w.first.kind, w.first.op) == ("scale", "sqrt")
    assert w.first.step == 10


def test_a_step_that_a_loss_scaler_should_have_skipped() -> None:
    """Its gradients overflow at this scale, and the program steps with them."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    with convert(low_precision_type=FP16), hmpx.watch("collect") as w:
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((weight.half() * 100).float().sum()).backward()
            optimizer.step()
    (found,) = w.offences
    assert (found.op, found.phase, found.step, found.parameter) == (
        "SGD",
        "optimizer",
        0,
        "0 of group 0",
    )
    assert found.remedy == "none: the gradients were not finite; GradScaler.step skips such steps"


def test_underflow_is_sampled() -> None:
    tiny = x(200, 100).mul(1e-6)
    policy = hmpx.Policy.from_ops(low=["mm"], low_precision_type=FP16)
    with convert(policy=policy), hmpx.watch(underflow=True) as w:
        torch.mm(tiny, x(100, 2))
    (row,) = w.underflow
    assert (row.op, row.module) == ("mm", "")
    assert 3000 < row.samples < 3 * 4096
    assert 0.01 < row.share_zero < 0.06 and row.share_subnormal > 0.5
    assert 0 < row.error < 0.01


def test_underflow_of_a_number_format() -> None:
    with convert(low_precision_type="float8_e4m3fn"), hmpx.watch(underflow=0.5) as w:
        for _ in range(4):
            torch.mm(torch.full((4, 4), 2.0**-12), torch.full((4, 4), 2.0**-8))
    (row,) = w.underflow
    assert (row.share_zero, row.share_subnormal, row.samples) == (0.5, 0.5, 64)


def test_least_normal_numbers_of_a_format_with_another_bias_are_not_subnormal() -> None:
    with convert(low_precision_type="float8_e4m3fnuz"), hmpx.watch(underflow=True) as w:
        torch.mm(torch.full((4, 4), 2.0**-7), torch.full((4, 4), 2.0**-8))
    assert [row.share_subnormal for row in w.underflow] == [0.5]


# --- the command line --------------------------------------------------------------------------


SCRIPT = """
import torch
weight = torch.nn.Parameter(torch.full((2,), 200.0))
optimizer = torch.optim.SGD([weight], lr=1.0)
torch.exp(weight * 1).sum().backward()
print("stepping", flush=True)
optimizer.step()
print("stepped", flush=True)
"""


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_a_script_is_watched(mode: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = forks.run("-m", "hmpx", "run", "--watch", mode, "script.py", cwd=tmp_path)
    assert finished.returncode == (1 if mode == "raise" else 0)
    assert finished.stdout.split() == (["stepping"] if mode == "raise" else ["stepping", "stepped"])
    assert "exp: infinity in step 0, forward" in finished.stderr
    assert "script.py:5" in finished.stderr


def test_a_parameter_that_is_not_finite_is_named() -> None:
    """By the name that the outermost module's ``named_parameters`` gives it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with torch.no_grad():
        model[1][1].bias[1] = math.nan
    with hmpx.watch("collect") as w:
        model(torch.ones(1, 3)).sum().backward()
    assert w.first is not None
    [name] = [name for name, p in model.named_parameters() if p is model[1][1].bias]
    assert (w.first.source, w.first.parameter) == ("parameter", name)
    assert f"NaN in the parameter {name} in step 0" in str(w.first)


def test_a_parameter_that_another_module_uses_is_named() -> None:
    """Multi-head attention reads the weight of its child without calling it."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with torch.no_grad():
        attention.out_proj.weight[0, 0] = math.inf
    x = torch.ones(1, 3, 4)
    with hmpx.watch("collect") as w:
        nn.Sequential(Attending(attention))(x).sum().backward()
    assert w.first is not None
    assert w.first.parameter == "0.attention.out_proj.weight"


class Attending(nn.Module):
    """Calls an attention on itself."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_watch_shows_what_it_has_found() -> None:
    with hmpx.watch("collect") as w:
        assert repr(w) == "<hmpx.Watch open, in step 0: no offence>"
        torch.log(torch.tensor([-1.0]))
    assert repr(w) == "<hmpx.Watch closed: first: log in step 0>"
