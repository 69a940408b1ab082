"""Exceptions of signal handlers, in any line and at any time, change no weight."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import linecache
import random
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _len_torch_dispatch_stack,
    _pop_mode,
)

import hmpx
from hmpx.session import switching
from tests.samples import is_drawn

pytestmark = [
    pytest.mark.filterwarnings("ignore:what hmpx.freeze returned"),
    # Of those that come while an object ends, Python only prints a report.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

FREEZING = str(Path(hmpx.__file__).parent / "freezing")


class InterruptError(BaseException):
    """What the signal handler raises."""


class Model(nn.Module):
    """Tied weights, a large convolution, a recurrent layer and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 128, 3)
        self.norm = nn.BatchNorm2d(128)
        self.lstm = nn.LSTM(128, 8, batch_first=True)
        self.head, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, 32, height, width]
        hidden = self.norm(self.conv(x)).mean(-1).transpose(1, 2)
        return self.tied(self.head(self.lstm(hidden)[0])) @ self.scale


def made() -> tuple[Model, Tensor]:
    """Returns a model in evaluation mode with gradients, and its input."""
    model, x = Model(), torch.randn(2, 32, 4, 4)
    model(x).sum().backward()
    return model.eval(), x


def _bits(each: Tensor) -> bytes:
    return each.detach().clone().view(-1).view(torch.uint8).numpy().tobytes()


def state(model: nn.Module) -> dict[str, Any]:
    """Returns all that an interrupt might leave changed."""
    found: dict[str, Any] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, each in named:
        bits = _bits(each)
        found[name] = id(each), each.dtype, each.requires_grad, each.untyped_storage()._cdata, bits
        found[f"{name}'s hooks"] = len(each._backward_hooks or ())
        grad = each.grad
        found[f"{name}.grad"] = None if grad is None else (id(grad), grad.dtype, _bits(grad))
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        found[f"{name}: module"] = type(module), module.training, hooks
    found["modes"] = (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        hmpx.torch_state.is_off(), hmpx.session.current() is None, _len_torch_dispatch_stack(),
        hmpx.observers.ATTACHED.value,
    )  # fmt: skip
    for owner in (torch, F, torch.linalg, Tensor, torch._C._nn):
        found[f"slots of {owner.__name__}"] = {
            key: id(value) for key, value in vars(owner).items() if callable(value)
        }
    return found


def assert_as_before(model: nn.Module, before: dict[str, Any], when: object) -> None:
    gc.collect(1)
    after = state(model)
    changed = [name for name in {**after, **before} if after.get(name) != before.get(name)]
    for name in list(changed):
        if name.startswith("slots"):
            was, now = before[name], after[name]
            changed += [f"{name}: {key}" for key in {**was, **now} if was.get(key) != now.get(key)]
    torch.set_grad_enabled(True)
    assert not changed, (changed[:30], len(changed), when, after["modes"])


# --- in each line ----------------------------------------------------------------------------------

Form = Callable[[nn.Module, Tensor], object]


def block(**options: Any) -> Form:
    def run(model: nn.Module, x: Tensor) -> None:
        with hmpx.freeze(model, x, **options):
            model(x)

    return run


def layer_cast(model: nn.Module, x: Tensor) -> None:
    with hmpx.freeze(model, store="bfloat16", compute="float32"):
        model(x)


def undone(model: nn.Module, x: Tensor) -> None:
    frozen = hmpx.freeze(model, x, outputs="keep")
    model(x)
    frozen.undo(strict=False)
    frozen.undo()


FORMS: dict[str, tuple[Form, dict[str, Any] | None]] = {
    "dtype": (block(), {}),
    "undo": (undone, {}),
    "codes": (block(store="codes"), {"low_precision_type": "float8_e4m3fn"}),
    "scales": (block(store="codes"), {"low_precision_type": "nvfp4"}),
    "bfloat16": (layer_cast, None),
}


def under(options: dict[str, Any] | None) -> contextlib.AbstractContextManager[Any]:
    if options is None:
        return contextlib.nullcontext()
    return hmpx.convert(device_types={"cpu"}, legalize="never", **options)


class Tracer:
    """Counts the lines of freezing that run, and raises an error before one of them."""

    def __init__(self, stop: tuple[str, int, int] | None = None) -> None:
        self.stop = stop  # file, line, how often it has run
        self.runs: dict[tuple[str, int], int] = {}

    def stops(self) -> list[tuple[str, int, int]]:
        """Returns each line where it ran first and last.

        Python comes back to the line of a `with` after its block, where no signal can stop it.
        """
        found = {(*place, n) for place, times in self.runs.items() for n in (1, times)}
        return sorted(s for s in found if s[2] == 1 or "with " not in linecache.getline(*s[:2]))

    def __call__(self, frame: types.FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(FREEZING) and frame.f_code.co_name != "to_the_end":
            return None
        if event == "call" and self.stop is not None and not _has(frame.f_code, *self.stop[:2]):
            return None
        if event == "line":
            place = name, frame.f_lineno
            self.runs[place] = self.runs.get(place, 0) + 1
            if self.stop == (*place, self.runs[place]):
                self.stop = None
                raise InterruptError(place)
        return self


@functools.cache
def _has(code: types.CodeType, file: str, line: int) -> bool:
    """Whether a line is of this code, and not of a function in it."""
    return code.co_filename == file and any(each[2] == line for each in code.co_lines())


def traced(tracer: Tracer, run: Callable[[], object]) -> bool:
    """Runs a function under a tracer; returns whether it was interrupted."""
    former = sys.gettrace()
    sys.settrace(tracer)
    try:
        run()
    except InterruptError:
        return True
    finally:
        sys.settrace(former)
    return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_in_each_line_of_freeze_and_undo(form: str, request: pytest.FixtureRequest) -> None:
    """Each line where it runs first and last; a quarter of those that `undo` runs, too."""
    run, options = FORMS[form]
    model, x = made()
    without = Tracer()
    if form != "undo" and not request.config.getoption("whole"):
        with under({}):
            traced(without, lambda: undone(model, x))
    before = state(model)
    with under(options):
        expected = model(x)
        run(model, x)
        counted = Tracer()
        assert not traced(counted, lambda: run(model, x))
        assert len(counted.runs) > 100
        inside = state(model)
        for stop in counted.stops():
            if stop[:2] in without.runs and not is_drawn(f"{stop[1:]}", 4):
                continue
            tracer = Tracer(stop)
            assert traced(tracer, lambda: run(model, x)) or tracer.stop is None, stop
            assert_as_before(model, inside, stop)
        assert torch.equal(model(x), expected)
    assert_as_before(model, before, form)


def test_for_good_all_weights_are_stored_low_or_none() -> None:
    model, x = made()

    def run() -> None:
        hmpx.freeze(copied, x, keep_fp32=False)

    with under({}):
        copied = copy.deepcopy(model)
        run()
        low = [each.dtype for each in copied.parameters()]
        copied, counted = copy.deepcopy(model), Tracer()
        traced(counted, run)
        for stop in random.sample(counted.stops(), 40):
            copied = copy.deepcopy(model)
            before = state(copied)
            if traced(Tracer(stop), run) and [p.dtype for p in copied.parameters()] != low:
                assert_as_before(copied, before, stop)


@pytest.mark.parametrize("touch", ["call", "freeze"])
def test_in_each_line_of_the_end_of_what_freeze_returned(
    touch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python swallows an exception there, so the model's next call or freeze does the rest."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps the object alive
    model, x = made()

    counted = Tracer()
    begun: dict[tuple[str, int], int] = {}

    def dropped() -> None:
        frozen = hmpx.freeze(model, x)
        begun.update(counted.runs)
        frozen.summary()
        del frozen

    with under({}):
        inside = state(model)
        traced(counted, dropped)
        stops = [stop for stop in counted.stops() if stop[2] > begun.get(stop[:2], 0)]
        for stop in stops if touch == "call" else stops[::5]:
            traced(Tracer(stop), dropped)
            if touch == "call":
                model(x)
            else:
                hmpx.freeze(model, x).undo()
            assert_as_before(model, inside, stop)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["dtype", "bfloat16"])
def test_two_threads_never_take_each_others_weights(form: str) -> None:
    model, x = made()
    options = {"store": "bfloat16", "compute": "float32"} if form == "bfloat16" else {}
    inputs = () if options else (x,)
    start = threading.Barrier(2)

    def freeze() -> None:
        start.wait()
        with contextlib.suppress(hmpx.FreezeError):
            frozen.append(hmpx.freeze(model, inputs, **options))

    with under(None if options else {}):
        before = {
            name: bits[:3] + bits[4:]
            for name, bits in state(model).items()
            if isinstance(bits, tuple) and len(bits) == 5
        }
        for _ in range(10):
            frozen: list[hmpx.Frozen] = []
            threads = [threading.Thread(target=freeze) for _ in range(2)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert frozen
            for each in frozen:
                each.undo()
            after = {
                name: bits[:3] + bits[4:]
                for name, bits in state(model).items()
                if isinstance(bits, tuple) and len(bits) == 5
            }
            assert after == before


@pytest.mark.parametrize("touch", ["call", "freeze"])
def test_what_touches_the_model_next_completes_its_undo(
    touch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each try of `undo` was stopped, and what `freeze` returned is kept."""
    model, x = made()
    with under({}):
        expected = model(x)
        inside = state(model)
        frozen = hmpx.freeze(model, x)
        with monkeypatch.context() as patch:

            def interrupt(*_: Any) -> None:
                raise InterruptError

            patch.setattr(Tensor, "requires_grad_", interrupt)
            with pytest.raises(InterruptError):
                frozen.undo()
        assert model.tied.bias.dtype is torch.bfloat16
        if touch == "call":
            assert torch.equal(model(x), expected)
        else:
            hmpx.freeze(model, x).undo()
        assert_as_before(model, inside, touch)


# --- at any time -------------------------------------------------------------------------------------


def converted(model: nn.Module, x: Tensor) -> None:
    with hmpx.convert(device_types={"cpu"}):
        model(x)


def tuned(model: nn.Module, x: Tensor) -> None:
    hmpx.tune(model, x, tolerance=0.9, budget=2, device_types={"cpu"}, progress=False)


#: What runs or changes a model, and the options of the conversion that it needs.
TOOLS: dict[str, tuple[Form, dict[str, Any] | None]] = {
    **FORMS,
    "converted": (converted, None),
    "compare": (lambda model, x: hmpx.compare(model, x, device_types={"cpu"}), None),
    "tune": (tuned, None),
    "plan": (lambda model, x: hmpx.plan(model, x, "cpu"), None),
    "draw": (lambda model, x: hmpx.draw(model, x), None),
    "expect.of": (lambda model, x: hmpx.expect.of(model, x), None),
    "invariance": (lambda model, x: hmpx.invariance(model, x), None),
}


def interrupted(model: nn.Module, x: Tensor, tool: Form, count: int) -> int:
    """Runs a tool ``count`` times, each with an interrupt at a random time; returns how many came."""
    is_armed = False

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        names = {each.f_code.co_name for each, _ in traceback.walk_stack(frame)}
        if not is_armed:
            return
        if names & {"find_torch_dispatch_rule", "__torch_dispatch__"}:
            # Called by C++ code of torch that ends the process at some errors.
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
        else:
            raise InterruptError

    tool(model, x)
    start = time.perf_counter()
    tool(model, x)
    took = time.perf_counter() - start
    inside, came = state(model), 0
    former = signal.signal(signal.SIGALRM, interrupt)
    for number in range(count):
        after = random.uniform(1e-5, 1.1 * took)
        try:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, after)
            tool(model, x)
            is_armed = False
        except InterruptError:
            is_armed, came = False, came + 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert_as_before(model, inside, (number, after, took))
    signal.signal(signal.SIGALRM, former)
    return came


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TOOLS)
def test_at_random_times(name: str, request: pytest.FixtureRequest) -> None:
    """Of those, 3,000 with ``--whole``."""
    tool, options = TOOLS[name]
    model, x = made()
    before = state(model)
    with under(options):
        count = 300 if request.config.getoption("whole") else 15
        assert interrupted(model, x, tool, count) > count / 3
    assert_as_before(model, before, name)


# --- blocks -----------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Any]]] = {
    "attach": lambda path: hmpx.attach(lambda call: None, every_op=True),
    "expect": lambda path: hmpx.expect({"expect": [{"op": "conv2d", "compute": "bfloat16"}]}),
    "lint": lambda path: hmpx.lint(),
    "record": lambda path: hmpx.record(memory=True),
    "trace": lambda path: hmpx.trace(path / "a.hmpx"),
    "watch": lambda path: hmpx.watch("collect"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_is_interrupted_in_its_beginning_or_end_is_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever one of its changes of torch is made."""
    model, x = made()
    changes: list[int] = []
    stop = -1
    change = switching._change

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        changes.append(len(changes))
        found = change(*args, **kwargs)
        if len(changes) - 1 == stop:
            raise InterruptError
        return found

    def run() -> None:
        with BLOCKS[name](tmp_path):
            model(x)

    monkeypatch.setattr(switching, "_change", interrupt)
    with hmpx.convert(device_types={"cpu"}):
        before = state(model)["modes"]
        changes.clear()
        run()
        count = len(changes)
        assert count >= 2
        for stop in range(count):
            changes.clear()
            with pytest.raises(InterruptError):
                run()
            assert state(model)["modes"] == before, stop
        stop = -1


class Seeing(TorchDispatchMode):
    """A mode that passes calls on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Stopped(nn.Module):
    """Interrupted where contexts that it has entered can't end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Seeing().__enter__()
        hmpx.attach(lambda call: None)
        hmpx.convert(policy={"low": ["mm"]}, device_types={"cpu"})
        torch.set_grad_enabled(False)
        raise InterruptError


RUNNERS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    **{name: getattr(hmpx, name) for name in ("compare", "draw", "freeze", "invariance")},
    "bench": lambda model, x: hmpx.bench(lambda: lambda: model(x), runs=1, warmup=1),
    "expect.of": hmpx.expect.of,
    "plan": lambda model, x: hmpx.plan(model, x, "cpu"),
    "tune": lambda model, x: hmpx.tune(model, [x], tolerance=0.5, progress=False),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_tools_restore_what_contexts_that_never_ended_have_changed(name: str) -> None:
    """Dispatch modes, observers, the conversion, and whether gradients are recorded."""
    model, x = Stopped().eval(), torch.randn(2, 4)
    with hmpx.convert(device_types={"cpu"}) if name == "freeze" else contextlib.nullcontext():
        before = state(model)["modes"]
        try:
            with pytest.raises(InterruptError):
                RUNNERS[name](model, x)
            assert state(model)["modes"] == before
        finally:
            while _len_torch_dispatch_stack():
                _pop_mode()
            torch.set_grad_enabled(True)
