"""`record`: which dtypes ops ran in, why, and at what cost."""

from __future__ import annotations

import contextlib
import traceback
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import arguments
from ..errors import OptionError, said_by, to_the_end
from ..observers import Attached, spared, user_location
from ..patches import SCALERS
from ..reports import Memory, Report, Row, Views, Waste
from ..session import about_run, restoring
from ..tensors import long_name
from ..torch_internals import uncompiled
from .memory import Ledger
from .recorder import Recorder


class record(Views):  # noqa: N801  # a context manager, like torch.no_grad
    """Records each call of an op that computes: its dtypes, casts, costs, module and line.

    It holds for all threads, and nests. Compiled functions run uncompiled. No tensor of the program
    is kept alive, and no device is waited for unless ``times`` is set.

    Not recorded: calls that raise, calls that are traced for a graph, tangents, and batched
    gradients such as those of ``torch.func.jacrev``. Under ``torch.func.vmap`` a call's costs cover
    the whole batch.

    Args:
        times: Whether to time calls. Each call then waits for its accelerator.
        memory: Whether to follow the memory of tensors, for ``memory``: of this thread's
            computation and its backward, without what autograd saves inside of ``torch.func``
            transforms. Each call then takes some 10 us longer, and the record grows with calls.

    Raises:
        OptionError: ``times`` or ``memory`` is not a bool, or the record is entered twice.

    Example:
        >>> model, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.record() as rec:
        ...     model(x).sum().backward()
        >>> [(row.op, row.phase, row.dtype, row.flops) for row in rec.rows if row.op == "linear"]
        [('linear', 'backward', 'bfloat16', 48), ('linear', 'forward', 'bfloat16', 48)]
    """

    def __init__(self, *, times: bool = False, memory: bool = False) -> None:
        self._is_timed = arguments.truth("times", times)
        self._ledger = Ledger() if arguments.truth("memory", memory) else None
        self._recorder = Recorder(is_timed=self._is_timed)
        self._block: contextlib.ExitStack | None = None
        self._about: dict[str, str] = {}
        self._optimizers: dict[str, set[str]] = {}
        self._is_scaled = False  # while an optimizer stepped
        self._stepped = weakref.WeakSet[torch.optim.Optimizer]()
        self._error: str | None = None
        self._error_location = ""

    @restoring
    def __enter__(self) -> record:
        if self._block is not None:
            raise OptionError("this record was entered before; make a new one with hmpx.record()")
        attached = Attached(self._recorder, every_op=True, values=True, times=self._is_timed)
        with contextlib.ExitStack() as block:
            block.callback(setattr, self._recorder, "is_on", False)
            block.enter_context(uncompiled())
            block.enter_context(attached)
            block.enter_context(register_optimizer_step_post_hook(self._note_optimizer))
            if self._ledger is not None:
                block.enter_context(self._ledger.noting())
            self._block = block.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._about = about_run()
            if self._optimizers:
                self._about["loss scaler"] = "yes" if self._is_scaled else "none"
            if error is not None:
                self._error, self._error_location = said_by(error), raised_at(error)
        finally:
            if self._block is not None:
                to_the_end(self._block.close)

    @spared
    def _note_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Notes the dtypes of an optimizer's parameters and state after its first step."""
        self._is_scaled |= any(scaler.is_enabled() for scaler in list(SCALERS))
        if optimizer in self._stepped:
            return
        self._stepped.add(optimizer)
        named = [
            ("parameters", each) for group in optimizer.param_groups for each in group["params"]
        ]
        named += [each for state in list(optimizer.state.values()) for each in state.items()]
        for name, value in named:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                key = f"{type(optimizer).__name__}.{name}"
                self._optimizers.setdefault(key, set()).add(long_name(value.dtype))

    def forget(self) -> None:
        """Drops all recorded calls. A forked process drops those of its parent."""
        self._recorder.forget()

    def report(self) -> Report:
        """Returns the calls recorded so far, as data."""
        rows, waste = self._recorder.rows(), self._recorder.waste()
        optimizers = {name: ", ".join(sorted(each)) for name, each in self._optimizers.items()}
        about = self._about or about_run()
        return Report(rows, waste, about, self._error, self._error_location, optimizers)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The recorded calls, the most expensive first."""
        return self._recorder.rows()

    @property
    def memory(self) -> Memory | None:
        """The memory of tensors so far; None without ``memory=True``.

        Optimizer state counts from the start, as in every step but the first.
        """
        return None if self._ledger is None else self._ledger.memory()

    def waste(self) -> tuple[Waste, ...]:
        """Returns unnecessary casts, each with a fix."""
        return self._recorder.waste()

    def __repr__(self) -> str:
        rows = self.rows
        return f"<hmpx.record: {sum(each.calls for each in rows):,} calls in {len(rows):,} rows>"


def raised_at(error: BaseException) -> str:
    """Returns the innermost program line that an exception passed through; ``""`` if unknown."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = frame.f_code.co_filename
        if user_location(frame).rpartition(":")[0] == path:
            return f"{path}:{line}"
    return ""
