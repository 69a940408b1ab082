"""Random histories of all that changes the state of the process, against a small model of that state.

A sample of steps runs here, 6,000 with ``--whole``; signals at random times likewise.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx import Policy, casting, formats
from hmpx.torch_state import switch
from tests.conftest import differences, namespaces, opened

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
POLICIES = (
    (Policy.from_ops(low=["linear"]), {"linear": BF16}),
    (Policy.from_ops(low=["linear", "mm"], low_precision_type=FP16), {"linear": FP16, "mm": FP16}),
    (Policy.from_ops(low=["mm"]), {"mm": BF16}),
)
X = torch.ones(2, 2)
TINY = formats.Float("tiny", 3, 2)


def deny(call: hmpx.Call) -> hmpx.CastPolicy:
    return hmpx.DENY


# --- the model ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Converted:
    """What the model knows of a conversion."""

    policy: int
    previous: Converted | None
    converts: int = 1
    is_entered: bool = False
    is_left: bool = False


@dataclass
class Place:
    """A thread: runs functions, and has regions, innermost last."""

    regions: list[object] = field(default_factory=list)
    calls: queue.Queue[Callable[[], object] | None] = field(default_factory=queue.Queue)
    done: queue.Queue[object] = field(default_factory=queue.Queue)
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Runs functions in a thread of its own from here on."""
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.done.put(call())
            except BaseException as error:
                self.done.put(error)

    def run(self, call: Callable[[], Any]) -> Any:
        """Returns the result of ``call`` in this thread."""
        if self.thread is None:
            return call()
        self.calls.put(call)
        result = self.done.get()
        if isinstance(result, BaseException):
            raise result
        return result


def paused() -> Generator[None, None, None]:
    with hmpx.disable_casts():
        yield


class History:
    """The process, driven at random, and what it should be like."""

    def __init__(self, seed: int) -> None:
        """Starts where torch is as it was."""
        self.choose = random.Random(seed)
        self.current: Converted | None = None
        self.blocks: list[tuple[hmpx.Session, Any, Converted]] = []
        self.places = [Place(), Place()]
        self.places[1].start()
        self.open: list[tuple[Place, object, Callable[[], object]]] = []
        self.observers: list[Any] = []
        self.told = 0
        self.denies = False
        self.model = nn.Linear(2, 2).eval()
        self.weights = [each.detach().clone() for each in self.model.parameters()]
        self.frozen: hmpx.Frozen | None = None

    # --- steps ---

    def convert(self, is_block: bool) -> None:
        """`convert`, by itself or for a block."""
        index = self.choose.randrange(len(POLICIES))
        session = hmpx.convert(policy=POLICIES[index][0], legalize="never", device_types={"cpu"})
        before = self.current
        if before is not None and before.policy == index:
            before.converts += 1
        else:
            self.current = Converted(index, before)
            if before is not None and not before.is_entered:
                before.previous = None
        assert self.current is not None
        if is_block:
            leave = session.__exit__  # as ``with`` does
            assert session.__enter__() is session
            self.current.is_entered = True
            self.blocks.append((session, leave, self.current))

    def leave(self) -> None:
        """The end of a block, mostly of the innermost one."""
        if not self.blocks:
            return
        innermost = self.choose.random() < 0.8
        at = -1 if innermost else self.choose.randrange(len(self.blocks))
        _, leave, state = self.blocks.pop(at)
        leave(None, None, None)
        if state.converts > 1:
            state.converts -= 1
            return
        state.is_left = True
        previous = state.previous
        while previous is not None and previous.is_left:
            previous = previous.previous
        if state is self.current:
            self.current = previous

    def revert(self) -> None:
        """`revert`."""
        hmpx.revert()
        if self.current is not None and not self.current.is_entered:
            self.current.previous = None
        self.current = None

    def open_region(self) -> None:
        """Switches casts off, in one of the threads."""
        place, region = self.choose.choice(self.places), object()
        kind = self.choose.choice(["block", "autocast", "generator"])
        if kind == "generator":
            generator = paused()
            place.run(lambda: next(generator))
            end: Callable[[], object] = generator.close
        else:
            block: Any = (
                hmpx.disable_casts() if kind == "block" else torch.autocast("cpu", enabled=False)
            )
            leave = block.__exit__
            place.run(block.__enter__)
            end = lambda: leave(None, None, None)  # noqa: E731
        if kind != "autocast" or self.current is not None:
            place.regions.append(region)
        self.open.append((place, region, end))

    def close_region(self) -> None:
        """Ends a region, mostly the innermost one; those within it end with it."""
        if not self.open:
            return
        at = -1 if self.choose.random() < 0.7 else self.choose.randrange(len(self.open))
        place, region, end = self.open.pop(at)
        place.run(end)
        if region in place.regions:
            del place.regions[place.regions.index(region) :]

    def observe(self) -> None:
        """Attaches an observer, or records."""
        if self.choose.random() < 0.7:
            self.observers.append(contextlib.closing(_Attached(self)))
        else:
            self.observers.append(hmpx.record())
            self.observers[-1].__enter__()

    def detach(self) -> None:
        """Ends an observation."""
        if self.observers:
            at = self.choose.randrange(len(self.observers))
            self.observers.pop(at).__exit__(None, None, None)

    def rule(self) -> None:
        """Registers or unregisters one."""
        (hmpx.unregister_rule if self.denies else hmpx.register_rule)("mm", deny)
        self.denies = not self.denies

    def format(self) -> None:
        """Registers a number format, or unregisters it."""
        if "tiny" in formats.names():
            formats.unregister("tiny")
        else:
            formats.register(TINY, 200)

    def freeze(self) -> None:
        """`freeze`, or its undo."""
        if self.frozen is not None:
            self.frozen.undo()
            self.frozen = None
        elif self.current is not None and not self.places[0].regions:
            self.frozen = hmpx.freeze(self.model, X)

    def use(self) -> None:
        """A tool that makes conversions of its own."""
        if self.current is not None:
            hmpx.plan(nn.Linear(2, 2), X)

    def compiled(self) -> None:
        """torch.compile follows the state, too."""
        function = torch.compile(lambda x: F.linear(x, x), backend="eager")
        assert function(X).dtype is self.expected("linear", self.places[0])

    # --- checks ---

    def expected(self, op: str, place: Place) -> torch.dtype:
        """Returns the dtype of the op's result there."""
        if self.current is None or place.regions or (op == "mm" and self.denies):
            return FP32
        return POLICIES[self.current.policy][1].get(op, FP32)

    def check(self) -> None:
        """All that can be seen of the state is as the model says."""
        assert hmpx.is_converted() is (self.current is not None)
        for place in self.places:
            self.told = 0
            assert place.run(lambda: F.linear(X, X).dtype) is self.expected("linear", place)
            attached = sum(isinstance(each, contextlib.closing) for each in self.observers)
            if self.expected("linear", place) is not FP32:
                assert self.told == attached
            assert place.run(lambda: torch.mm(X, X).dtype) is self.expected("mm", place)
            is_on = self.current is not None and not place.regions
            assert place.run(hmpx.casts_enabled) is is_on
        if self.frozen is None:
            assert [*map(torch.equal, self.model.parameters(), self.weights)] == [True] * 2

    def end(self) -> None:
        """Ends all that is open; torch is as it was."""
        while self.open:
            self.close_region()
        while self.observers:
            self.detach()
        if self.denies:
            self.rule()
        if "tiny" in formats.names():
            formats.unregister("tiny")
        if self.frozen is not None:
            self.freeze()
        while self.blocks:
            self.leave()
        self.revert()
        self.places[1].calls.put(None)
        assert self.places[1].thread is not None
        self.places[1].thread.join()
        self.check_is_clean()

    def check_is_clean(self) -> None:
        """Nothing is open any more."""
        assert [*map(torch.equal, self.model.parameters(), self.weights)] == [True] * 2
        hmpx.convert(policy=POLICIES[0][0], legalize="never", device_types={"cpu"}).revert()
        assert not opened()
        assert not switch.marked()
        assert casting.all_rules() == ()


class _Attached:
    """An attached observer that can be closed."""

    def __init__(self, history: History) -> None:
        def count(call: hmpx.Call) -> None:
            history.told += call.op == "linear"

        self.close = hmpx.attach(count).detach


STEPS: dict[str, tuple[Callable[[History], object], int]] = {
    "convert": (lambda h: h.convert(is_block=False), 8),
    "block": (lambda h: h.convert(is_block=True), 10),
    "leave": (History.leave, 11),
    "revert": (History.revert, 4),
    "region": (History.open_region, 12),
    "end of region": (History.close_region, 14),
    "observe": (History.observe, 4),
    "detach": (History.detach, 5),
    "rule": (History.rule, 4),
    "format": (History.format, 2),
    "freeze": (History.freeze, 5),
    "plan": (History.use, 1),
    "compile": (History.compiled, 1),
}
LENGTH = 40


def walk(seed: int) -> None:
    """Takes one history; a failure names its steps."""
    history = History(seed)
    taken: list[str] = []
    names, weights = [*STEPS], [weight for _, weight in STEPS.values()]
    try:
        for _ in range(LENGTH):
            name = history.choose.choices(names, weights)[0]
            taken.append(name)
            STEPS[name][0](history)
            history.check()
        history.end()
    except BaseException as error:
        error.add_note(f"seed {seed}, after {', '.join(taken)}")
        history.places[1].calls.put(None)
        raise


def test_random_histories_are_as_the_model_says(pytestconfig: pytest.Config) -> None:
    """Whatever comes in whatever order, within blocks and threads."""
    before = namespaces()
    for seed in range(150 if pytestconfig.getoption("whole") else 2):
        walk(seed)
    assert differences(before) == []


# --- signals ------------------------------------------------------------------------------------


def converts() -> None:
    hmpx.convert(policy=POLICIES[1][0], legalize="never")
    hmpx.convert(policy=POLICIES[0][0], legalize="never")
    hmpx.revert()


def blocks() -> None:
    with hmpx.convert(policy=POLICIES[0][0], legalize="never"):
        with hmpx.disable_casts(), torch.autocast("cpu", enabled=False):
            pass
        with hmpx.convert(policy=POLICIES[2][0], legalize="never"):
            pass
