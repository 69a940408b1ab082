"""One variant of a benchmark: its own step, its own random numbers, and what its runs gave."""

from __future__ import annotations

import contextlib
import copy
import math
import numbers
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode, resolve_name

from .. import arguments, freezing, session
from ..errors import BenchError, shown
from ..observers import user_location
from ..places import located
from ..tensors import LOW_DTYPES, floats_of
from .memory import peak_bytes
from .randomness import Randomness
from .variants import Conditions, Variant

#: Most steps of a run.
_MOST_STEPS: Final = 10_000


@dataclass
class Runner:
    """A variant that takes turns with others.

    Attributes:
        variant: What it is.
        conditions: What it has in common with the others.
        randomness: Its random numbers.
        step: What is timed.
        model: The model, if one was given instead of a step.
        inputs: What the model is called with.
        run_times: Seconds of a step, for each run.
        losses: What each step returned, or named ``loss``, if that is a real number; else None.
        outputs: The tensors that the first step returned, if that is no number alone.
        error: What ended it, or None.
        memory_bytes: What `measure_memory` found.
        trained: The parameters that its optimizers stepped while it warmed up.
    """

    variant: Variant
    conditions: Conditions
    randomness: Randomness
    step: Callable[[], Any]
    model: nn.Module | None = None
    inputs: Any = None
    run_times: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    outputs: list[Tensor] | None = None
    error: BaseException | None = None
    memory_bytes: int | None = None
    trained: list[Tensor] = field(default_factory=list)
    _returned: list[Tensor | float | None] = field(default_factory=list)
    _steps: int = 1
    _frozen: freezing.Frozen | None = None
    _was_training: list[tuple[nn.Module, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Puts a model into evaluation mode."""
        if self.model is not None:
            self._was_training = [(each, each.training) for each in self.model.modules()]
            self.model.eval()

    @property
    def steps_per_run(self) -> int:
        """How many steps a run has."""
        return self._steps

    def warm_up(self, steps: int, run_s: float) -> None:
        """Makes some steps, and decides how many a run has: as many as ``run_s`` has time for."""
        with self._region(), trained() as self.trained:
            for _ in range(steps):
                self._noted(arguments.has_run("the step", self.step()))
            self.synchronize()
            start = time.perf_counter()  # a step that waits takes no processor time, but the user's
            self._noted(self.step())
            self.synchronize()
            elapsed_s = time.perf_counter() - start
            self._read()
        self._steps = min(_MOST_STEPS, max(1, math.ceil(run_s / max(elapsed_s, 1e-9))))

    def run(self) -> None:
        """Makes one step that is not timed, as torch has just been changed, and then those that are."""
        with self._region():
            self._noted(arguments.has_run("the step", self.step()))
            self.synchronize()
            start = self.conditions.clock()
            for _ in range(self._steps):
                self._noted(self.step())  # at once: a loss keeps the step's activations alive
            self.synchronize()
            self.run_times.append((self.conditions.clock() - start) / self._steps)
            self._read()

    def measure_memory(self) -> None:
        """Makes one step that may compile and cache, as torch has just been changed, and one that is measured."""
        with self._region():
            self.step()
            self.memory_bytes = peak_bytes(self.step, self.conditions.device_type)

    def low_op(self) -> str:
        """Makes one more step, and returns its first op in low precision, as `low_op_of` says it."""
        with self._region():
            return low_op_of(self.step)

    def close(self) -> None:
        """Leaves the model as it was given."""
        if self._frozen is not None:
            self._frozen.undo()
        for module, was_training in self._was_training:
            module.training = was_training

    def synchronize(self) -> None:
        """Waits until the device has done all that it was asked to."""
        if self.conditions.device_type != "cpu":
            module: Any = torch.get_device_module(self.conditions.device_type)
            module.synchronize()

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        with self.conditions.region(self.variant), self.randomness.in_force():
            store = self.variant.store
            if store is not None and self._frozen is None:
                args, kwargs = given_to(self.inputs)
                assert self.model is not None
                self._frozen = freezing.freeze(self.model, *args, store=store, **kwargs)
            yield

    def _noted(self, returned: Any) -> None:
        loss: Any = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, numbers.Real):
            self._returned.append(float(loss))
        elif _is_real_number(loss):
            self._returned.append(loss.detach())
        else:
            loss = None
            self._returned.append(None)
        if self.outputs is None and (loss is None or loss is not returned):
            self.outputs = [each.detach().clone() for each in floats_of(returned)]

    def _read(self) -> None:
        """Reads the losses from the device, which waits for it: not while steps are timed."""
        self.losses += [None if each is None else float(each) for each in self._returned]
        self._returned.clear()


def _is_real_number(returned: Any) -> bool:
    return isinstance(returned, Tensor) and returned.numel() == 1 and not returned.is_complex()


def made(
    make: Callable[[], Any], inputs: Any, taken: Collection[nn.Module | None]
) -> tuple[Callable[[], Any], nn.Module | None, Any]:
    """Returns a step, made anew; and if ``make`` returns a model, that and its inputs.

    A model that is one of those ``taken`` by other variants is copied.

    Raises:
        BenchError: ``make`` returns something else, or a model without inputs.
    """
    found = arguments.has_run("make", make())
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise BenchError(
                "make() must return the step, a function without arguments, or a model; it returned "
                f"{shown(found)}"
            )
        return found, None, None
    if inputs is None:
        raise BenchError(
            f"make() returned a model, {type(found).__name__}: inputs must be what its forward is called "
            "with; for training, return a function that makes a step"
        )
    is_given = isinstance(inputs, (Tensor, Mapping, list, tuple)) or not callable(inputs)
    given = inputs if is_given else inputs()
    args, kwargs = given_to(given)
    model = copy.deepcopy(found) if found in taken else found

    def forward() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return forward, model, given


def given_to(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments: a tuple holds the former, a mapping the latter."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def low_op_of(step: Callable[[], Any]) -> str:
    """Runs a step, and returns its first op in low precision: ``"linear gives bfloat16, at train.py:12"``.

    ``""`` if there is none. Compiled functions run as written, for compiled graphs show no ops.
    """
    noting = _Noting()
    with torch.compiler.set_stance("force_eager"), noting:
        step()
    return noting.found


class _Noting(TorchFunctionMode):
    """Notes the first op with a result in low precision."""

    found = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        if not self.found:
            low = [each.dtype for each in floats_of(returned) if each.dtype in LOW_DTYPES]
            if low or session.is_converted():
                self.found = _said(func, low)
        return returned


def _said(func: Callable[..., Any], low: list[torch.dtype]) -> str:
    name = str(resolve_name(func) or getattr(func, "__name__", func)).rpartition(".")[2]
    does = f"gives {str(low[0]).removeprefix('torch.')}" if low else "runs under hmpx.convert()"
    where = user_location()
    return f"{name} {does}, at {located(where)}" if where else f"{name} {does}"


@contextlib.contextmanager
def trained() -> Iterator[list[Tensor]]:
    """Gives the parameters of the optimizers that step inside the block.

    Variants must not share them: the losses of one model that all train are nobody's.
    """
    found: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found.extend(each for group in optimizer.param_groups for each in group["params"])

    hook = register_optimizer_step_post_hook(note)
    try:
        yield found
    finally:
        hook.remove()
