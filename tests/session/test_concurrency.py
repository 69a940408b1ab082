"""Threads and signals: no thread finds half a conversion, and no state is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import Policy
from tests import forks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = ["linear", "mm", "matmul", "gelu", "layer_norm", "dropout2d"]
BFLOATS, HALVES = Policy.from_ops(low=LOW), Policy.from_ops(low=LOW, low_precision_type=FP16)

#: How often something happens at a random moment.
TIMES = 8

linear = F.linear  # a name from before convert


def a() -> Tensor:
    return torch.ones(2, 2)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Has threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# --- threads ------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
def test_conversions_records_and_frozen_models_in_threads_of_their_own() -> None:
    x, model, end = torch.ones(4, 8), nn.Linear(8, 8).eval(), time.monotonic() + 8
    wrong: list[BaseException] = []

    def repeat(enter: Callable[[], Any]) -> None:
        while time.monotonic() < end and not wrong:
            try:
                with enter():
                    model(x)
            except hmpx.FreezeError:
                continue  # while another thread has converted torch
            except BaseException as error:
                wrong.append(error)

    kinds: list[Callable[[], Any]] = [
        lambda: hmpx.convert(device_types={"cpu"}),
        lambda: hmpx.record(memory=True),
        lambda: hmpx.freeze(nn.Linear(8, 8).eval(), store="bfloat16", compute="float32"),
    ]
    threads = [threading.Thread(target=repeat, args=(kind,)) for kind in kinds]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.sampled(2)
def test_a_call_amid_a_change_of_policies_follows_the_old_or_the_new_one() -> None:
    """Never torch without any: while two threads compute, by names of before and of later."""
    x, is_over, wrong = a(), threading.Event(), []
    calls: list[Callable[[], Tensor]] = [
        lambda: F.linear(x, x),
        lambda: linear(x, x),
        lambda: kept(x, x),
        lambda: x @ x,
        lambda: torch.mm(x, x),
        lambda: F.gelu(x),
        lambda: F.layer_norm(x, (2,)),
    ]

    def compute() -> None:
        while not is_over.is_set():
            for position, call in enumerate(calls):
                dtype = call().dtype
                if dtype not in (BF16, FP16):
                    wrong.append((position, dtype))

    with hmpx.convert(policy=BFLOATS, legalize="never"):
        kept = F.linear
        threads = [threading.Thread(target=compute) for _ in range(2)]
        with switching_often():
            for thread in threads:
                thread.start()
            try:
                for _ in range(TIMES):
                    hmpx.convert(policy=HALVES, legalize="never")
                    hmpx.convert(policy=BFLOATS, legalize="never")
            finally:
                is_over.set()
                for thread in threads:
                    thread.join()
        hmpx.revert()
    assert wrong == []


def test_conversions_and_rules_of_several_threads_take_turns() -> None:
    """Each finds a whole state, and the last revert brings torch back."""
    errors: list[BaseException] = []

    def change(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(15):
                action = choose.randrange(4)
                if action == 0:
                    hmpx.convert(policy=choose.choice([BFLOATS, HALVES]), legalize="never")
                elif action == 1:
                    hmpx.revert()
                elif action == 2:
                    hmpx.register_rule("exp", lambda call: None)
                else:
                    with hmpx.disable_casts():
                        assert F.linear(a(), a()).dtype is FP32
        except BaseException as error:
            errors.append(error)

    with switching_often():
        threads = [threading.Thread(target=change, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    hmpx.revert()
    hmpx.casting.RULES.change(())
    assert errors == []


# --- signals ------------------------------------------------------------------------------------


class Signal(BaseException):
    """What the handler raises."""


@contextlib.contextmanager
def raising_after(seconds: float) -> Iterator[None]:
    """Has a signal's handler raise `Signal` after a while, somewhere in the block.

    Not inside of logging: its lock would stay taken, and each later thread that logs would wait for ever.
    """

    def handler(number: int, frame: types.FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == logging.__file__:
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            return
        raise Signal

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lost(
    context: Callable[[], Any], is_lost: Callable[[], bool], restore: Callable[[], Any]
) -> int:
    """Returns in how many of 300 signals amid entering and leaving ``context`` the state is lost."""
    choose, count = random.Random(0), 0
    for _ in range(300):
        with contextlib.suppress(Signal), raising_after(choose.uniform(1e-5, 1e-3)):
            for _ in range(100_000):
                with context():
                    pass
        if is_lost():
            count += 1
            restore()
    return count


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timers")
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function (Weak|gc_cumulative_time):pytest.PytestUnraisableExceptionWarning"
)
def test_a_signal_amid_convert_and_revert_leaves_one_state_or_the_other() -> None:
    """At random times of two conversions and the way back."""
    choose, seen = random.Random(0), set()

    def change() -> None:
        hmpx.convert(policy=BFLOATS, legalize="never")
        hmpx.convert(policy=HALVES, legalize="never")
        hmpx.revert()

    change()
    start = time.perf_counter()
    change()
    took_s = time.perf_counter() - start
    for _ in range(TIMES):
        end = time.perf_counter() + 2 * took_s  # a signal amid a weak reference's callback is lost
        with contextlib.suppress(Signal), raising_after(choose.uniform(1e-4, 1.5 * took_s)):
            while time.perf_counter() < end:
                change()
        dtypes = {F.linear(a(), a()).dtype, (a() @ a()).dtype, linear(a(), a()).dtype}
        assert len(dtypes) == 1
        assert hmpx.is_converted() is (dtypes != {FP32})
        seen |= dtypes
        hmpx.revert()
        assert F.linear(a(), a()).dtype is FP32
    assert seen > {FP32}  # signals came amid changes


# --- regions that end elsewhere -----------------------------------------------------------------


def paused() -> Iterator[None]:
    with hmpx.disable_casts():
        yield


def in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_generator_closed_in_another_thread_changes_nothing_here_or_there() -> None:
    """The region that it opened here is over, that thread's own stays open."""
    with hmpx.convert(policy=BFLOATS):
        generator = paused()
        next(generator)
        assert not hmpx.casts_enabled()

        def close() -> list[bool]:
            before = hmpx.casts_enabled()
            with hmpx.disable_casts():
                generator.close()
                return [before, hmpx.casts_enabled()]

        assert in_thread(close) == [True, False]
        assert hmpx.casts_enabled()
        assert F.linear(a(), a()).dtype is BF16
        assert not torch.is_autocast_enabled("maia")


def test_a_region_goes_on_where_another_thread_reverts_and_converts() -> None:
    """It ends with the conversion only in the thread that has reverted that."""

    def again() -> None:
        hmpx.revert()
        hmpx.convert(policy=BFLOATS)

    hmpx.convert(policy=BFLOATS)
    with hmpx.disable_casts():
        for _ in range(2):
            in_thread(again)
            assert F.linear(a(), a()).dtype is FP32
            assert not hmpx.casts_enabled()
            assert in_thread(lambda: F.linear(a(), a()).dtype) is BF16
    assert F.linear(a(), a()).dtype is BF16


def test_nothing_but_its_block_ends_a_region() -> None:
    """No conversion, and no tool that makes some."""
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    helpers: list[Callable[[], object]] = [
        lambda: hmpx.plan(model, x),
        lambda: (hmpx.revert(), hmpx.convert(policy=HALVES)),
        lambda: hmpx.convert(policy=BFLOATS).revert(),
    ]
    for off in (hmpx.disable_casts, lambda: torch.autocast("cpu", enabled=False)):
        hmpx.convert(policy=BFLOATS)
        with off():
            for helper in helpers:
                helper()
                hmpx.convert(policy=BFLOATS)
                assert F.linear(x, x).dtype is FP32
                assert not hmpx.casts_enabled()
        assert F.linear(x, x).dtype is BF16
        hmpx.revert()


def test_a_task_that_ends_a_region_of_another_leaves_its_own_state() -> None:
    """An async generator is closed by whichever task comes last."""

    async def agenerator() -> Any:
        with hmpx.disable_casts():
            yield

    async def main() -> list[bool]:
        generator = agenerator()
        await generator.__anext__()
        before = hmpx.casts_enabled()
        await asyncio.create_task(generator.aclose())
        return [before, hmpx.casts_enabled()]

    with hmpx.convert(policy=BFLOATS):
        assert asyncio.run(main()) == [False, True]


# --- locks ----------------------------------------------------------------------------------------

#: One thread imports a module whose ops are listed. The other scripts a model meanwhile, for which hmpx
#: takes its patches away: the model's own code imports the same module.
IMPORTING = """
import pathlib, sys, tempfile, threading, time, torch, hmpx
importing, scripting = threading.Event(), threading.Event()
source = '''
import threading, time, torch, __main__
def op(x): return torch.mm(x, x)
__main__.importing.set()
__main__.scripting.wait(20)
time.sleep(.2)
'''
sys.path.insert(0, tempfile.mkdtemp())
pathlib.Path(sys.path[0], "lib.py").write_text(source)

class Model(torch.nn.Module):
    def forward(self, x):
        return x
    def __prepare_scriptable__(self):
        scripting.set()
        import lib
        return self

def import_it():
    import lib

hmpx.registry._PATIENCE_S = 0.2
with hmpx.convert(policy={"lists": "none", "low": ["lib.op"]}, device_types={"cpu"}):
    thread = threading.Thread(target=import_it, daemon=True)
    thread.start()
    assert importing.wait(20)
    torch.jit.script(Model())
    thread.join(20)
    assert not thread.is_alive()
    import lib
    end = time.monotonic() + 20
    while lib.op(torch.ones(2, 2)).dtype is not torch.bfloat16:
        assert time.monotonic() < end
        time.sleep(.01)
assert lib.op(torch.ones(2, 2)).dtype is torch.float32
"""

#: One thread compiles, and imports the compiler. The other converts meanwhile, which resets torch.compile.
COMPILING = """
import sys, threading, time, torch, torch._dynamo, hmpx
assert "torch._inductor.compile_fx" not in sys.modules
compiling, found = threading.Event(), []

def backend(graph, inputs):
    compiling.set()
    time.sleep(.5)
    import torch._inductor.compile_fx
    return graph

def compile_it():
    found.append(torch.compile(lambda x: x @ x, backend=backend)(torch.ones(2, 2)).dtype)

hmpx.registry._PATIENCE_S = 0.2
hmpx.convert(policy={"lists": "none", "low": ["matmul"]}, device_types={"cpu"})
thread = threading.Thread(target=compile_it, daemon=True)
thread.start()
assert compiling.wait(60)
hmpx.convert(policy={"lists": "none", "low": ["linear"]}, device_types={"cpu"})
thread.join(60)
assert not thread.is_alive() and len(found) == 1
hmpx.revert()
assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", [IMPORTING, COMPILING], ids=["importing", "compiling"])
def test_no_thread_waits_for_one_that_waits_for_it(script: str, tmp_path: Path) -> None:
    """Neither in an import nor in a compilation, whose locks a change in another thread may need."""
    (tmp_path / "script.py").write_text(script)
    path = str(tmp_path / "script.py")
    done = forks.run("-W", "ignore", path, imported=forks.TORCH, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
