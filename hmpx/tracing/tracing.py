"""`trace`: writes numbers of each call to a file, to be compared with another run's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import arguments, session
from ..comparing import may_read
from ..errors import OptionError, raised_here, short, to_the_end, warn
from ..files import unwritable
from ..observers import Attached, CallTensors, OpCall, spared
from ..policy import load_policy, matches
from ..torch_state import spot
from .writing import Writer


class trace:  # noqa: N801  # a context manager, like torch.no_grad
    """Writes numbers of each call of the block to a file; `diff_runs` compares two of them.

    Works with and without a conversion, also over torch.autocast; changes no result of uncompiled
    code. For each call: op, module, line, dtypes, decision and arguments; numbers of each tensor
    and gradient, such as a hash and the norm; and by how much the call amplifies rounding. An
    optimizer's step ends a step: gradients of parameters and its settings are written there.

    Each step is in the file when it ends. Several processes of torch.distributed write
    ``PATH.rank1`` and so on. Of compiled functions it traces the calls of their graphs, which may
    be fused otherwise then.

    Args:
        path: The file; an earlier one is replaced.
        steps: Numbers of the steps to trace, from 0: ``range(10)``. All by default.
        every: Traces one step out of ``every``, from the first on.
        modules: Globs of the modules whose calls are traced.

    Raises:
        OptionError: The file can't be written, or an option is wrong.

    Example:
        >>> with hmpx.trace("a.hmpx"):
        ...     y = torch.nn.functional.silu(torch.ones(4))
        >>> hmpx.diff_runs("a.hmpx", "a.hmpx").rows[0].op
        'silu'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        steps: Iterable[int] | None = None,
        every: int = 1,
        modules: Iterable[str] = (),
    ) -> None:
        """Checks the arguments."""
        if not isinstance(path, (str, os.PathLike)):
            raise OptionError(f"a trace is written to a path, not to {short(str(path))}")
        self._path = Path(os.fspath(path)).absolute()  # the program may change its directory
        self._chosen = arguments.chosen_steps(steps, every)
        self._modules = arguments.texts("modules", modules)
        self._block: contextlib.ExitStack | None = None
        self._model: nn.Module | None = None  # the one that names parameters

    def __repr__(self) -> str:
        return f"<hmpx.trace to {self._path.name}>"

    @session.restoring
    def __enter__(self) -> trace:
        if self._block is not None:
            raise OptionError("this trace was entered before; make a new one with hmpx.trace()")
        rank = int(os.environ.get("RANK", "0"))
        path = self._path.with_name(f"{self._path.name}.rank{rank}") if rank else self._path
        with contextlib.ExitStack() as block:
            try:
                file = path.open("w", encoding="utf-8", buffering=1 << 20)
            except raised_here(OSError) as error:
                raise unwritable(path, error) from error
            self._writer = Writer(file)
            self._attached = Attached(self._observe, tensors=True, every_op=True, graphs=True)
            block.callback(self._writer.end)
            block.enter_context(session.observable(load_policy()))
            block.enter_context(self._attached)
            block.enter_context(register_optimizer_step_pre_hook(self._before_step))
            block.enter_context(register_optimizer_step_post_hook(self._after_step))
            self._step, self._model = 0, None
            self._follow()
            self._block = block.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._block is not None:
            to_the_end(self._block.close)
        if self._modules and not self._writer.calls and error is None:
            warn(f"nothing was traced: no call was in the modules {', '.join(self._modules)}")

    def _is_traced(self) -> bool:
        return self._chosen(self._step) and self._writer.is_open

    def _follow(self) -> None:
        """Observes calls in steps to trace, and in no others."""
        if self._is_traced():
            self._attached.resume()
        else:
            self._attached.pause()

    # --- what is seen ----------------------------------------------------------------------------

    @spared
    def _observe(self, call: OpCall, tensors: CallTensors | None, /) -> None:
        is_wanted = not self._modules or any(
            matches("module", f"{each}{inner}", call.module)
            for each in self._modules
            for inner in ("", ".*")
        )
        model, _ = spot()
        if is_wanted and model is not None and model is not self._model:
            self._model = model
            self._writer.name(model)
        # Unpickled tensors come in the order of the workers that sent them.
        if tensors is not None and is_wanted and may_read() and call.op != "set":
            self._writer.call(call, tensors)

    @spared
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and self._is_traced():
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        self._writer.parameter_gradient(each, each.grad)
            self._writer.optimizer(optimizer)

    @spared
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if self._is_traced():
            self._writer.step(self._step)
        self._step, self._model = self._step + 1, None
        self._follow()
