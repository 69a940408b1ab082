"""Signal handlers that raise anywhere in a block's beginning or end leave nothing of it in force."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hmpx
from hmpx import blocks, registry
from hmpx.freezing import frozen
from hmpx.observers import ATTACHED, PAUSED, attached
from hmpx.recording import context, memory
from hmpx.torch_internals import stance
from hmpx.watching import watcher

# Python drops what is raised while it frees a generator.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Signal(BaseException):
    """Raised by a signal's handler."""


class Raising:
    """A profile function that raises at the ``at``-th moment at which Python may run a signal's handler.

    That is where functions of ``files`` begin, and after each call in them: of C functions always,
    of Python functions if torch.compile is at work.

    Attributes:
        seen: The moments so far.
    """

    def __init__(self, files: set[str], at: int) -> None:
        self._files, self._at = files, at
        self._calling: list[types.FrameType] = []  # C functions
        self.seen: list[str] = []

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        code, outer = frame.f_code, frame.f_back
        if event == "c_call":
            self._calling.append(frame)
        elif event in ("c_return", "c_exception") and self._calling:
            self._calling.pop()
        is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
        if event == "c_return" or (event == "call" and not is_generator):
            is_moment = code.co_filename in self._files
        elif event == "return" and outer is not None and not is_generator:
            called = dis.opname[outer.f_code.co_code[outer.f_lasti]]
            is_moment = outer.f_code.co_filename in self._files and called.startswith("CALL")
            is_moment &= outer not in self._calling[-1:]  # else it returns to a C function
        else:
            return
        if is_moment:
            self.seen.append(f"{event} in {code.co_filename}:{frame.f_lineno} {code.co_name}")
            if len(self.seen) == self._at:
                raise Signal


def moments(files: set[str], block: Callable[[], object], step: int = 1) -> Iterator[str]:
    """Runs a block with a signal at each moment in turn, or each ``step``-th; yields the moment after each."""
    for at in range(1, 2000, step):
        raising, kept = Raising(files, at), None
        sys.setprofile(raising)
        try:
            block()
        except Signal as signal:
            kept = signal  # with its frames, and what these hold
        finally:
            sys.setprofile(None)
        if len(raising.seen) < at:
            assert at > 10
            return
        yield raising.seen[-1]
        del kept
    raise AssertionError("the block does not end")


def in_force() -> dict[str, object]:
    """Returns the state that blocks change, except their conversions."""
    return {
        "attached": ATTACHED.value,
        "paused": set(PAUSED),
        "stance": torch._dynamo.eval_frame._stance.stance,
        "hooks": [
            len(hooks)
            for hooks in (
                hooks_of_optimizers._global_optimizer_pre_hooks,
                hooks_of_optimizers._global_optimizer_post_hooks,
                hooks_of_modules._global_forward_pre_hooks,
            )
        ],
        "modes": _get_current_dispatch_mode_stack(),
        "saved": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "lock": is_free(registry.LOCK),
        "stance lock": is_free(stance._uncompiled._lock),
    }


def is_free(lock: Any) -> bool:
    found: list[bool] = []

    def take() -> None:
        if lock.acquire(timeout=5):
            lock.release()
            found.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(found)


BLOCKS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "attach": lambda: hmpx.attach(print),
    "record": hmpx.record,
    "record memory": lambda: hmpx.record(memory=True),
    "watch": lambda: hmpx.watch("collect"),
}
FILES = {module.__file__ or "" for module in (blocks, attached, context, memory, stance, watcher)}


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_signal_at_any_moment_of_a_block_leaves_nothing_of_it(
    name: str, is_converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the signal's exception is kept."""
    if not is_converted:  # what becomes of conversions has its own tests
        monkeypatch.setattr(hmpx.session, "restore", lambda *_: contextlib.nullcontext())

    def block() -> None:
        with BLOCKS[name]():
            pass

    policy = hmpx.Policy.from_ops(low=["mm"])
    with hmpx.convert(policy=policy) if is_converted else contextlib.nullcontext():
        before = in_force()
        for moment in moments(
            FILES, block, step=7 if is_converted else 1
        ):  # a conversion takes long
            assert in_force() == before, moment
            assert hmpx.is_converted() is is_converted, moment


def test_a_signal_at_any_moment_of_a_watch_leaves_torch_unconverted() -> None:
    """A watch of a program that is not converted converts torch, with an empty policy."""

    def block() -> None:
        with hmpx.watch("collect"):
            pass

    for moment in moments({blocks.__file__, watcher.__file__ or ""}, block, step=11):
        assert not hmpx.is_converted() and not ATTACHED.value, moment


def test_a_signal_before_or_after_a_block_of_freeze_leaves_the_fp32_weights() -> None:
    model, x = nn.Linear(2, 3).eval(), torch.ones(1, 2)

    def block() -> None:
        with hmpx.freeze(model, x):
            pass

    with hmpx.convert(device_types={"cpu"}):
        for moment in moments({blocks.__file__, frozen.__file__ or ""}, block):
            assert model.weight.dtype is torch.float32, moment
            assert not model._forward_pre_hooks, moment
