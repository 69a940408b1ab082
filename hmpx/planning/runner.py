"""One variant of a benchmark: its own step, its own random numbers, and the figures of its runs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import math
import numbers
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode, resolve_name

from .. import arguments, freezing, session
from ..errors import BenchError, passing_over, raised_here, shown
from ..inputs import arguments_of, is_factory
from ..observers import user_location
from ..places import located
from ..policy import CastPolicy, Decision, Policy
from ..recording import record
from ..reports import fixes
from ..tensors import LOW_DTYPES, copied, floats_of
from ..torch_state import RandomStates, accelerators, seed_all, unchanged

#: The variant that all others are compared with.
BASE: Final = "fp32"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a program."""

    name: str  # The name that users give
    label: str  # The name in tables
    legalize: str | None = None  # Argument of `hmpx.convert`; None leaves torch unconverted
    is_autocast: bool = False  # Steps run in regions of torch.autocast
    is_frozen: bool = False  # `hmpx.freeze` stores the model's weights
    has_fixes: bool = (
        False  # The lines of op lists that a record of its first step proposes are in force
    )


#: Name -> variant, in the order of tables.
VARIANTS: Final[Mapping[str, Variant]] = {
    variant.name: variant
    for variant in (
        Variant(BASE, BASE),
        Variant("autocast", "torch.autocast", is_autocast=True),
        Variant("auto", "hmpx auto", legalize="auto"),
        Variant("fast", "hmpx fast", legalize="fast"),
        Variant("frozen", "hmpx frozen", legalize="auto", is_frozen=True),
        Variant("fixes", "hmpx fixes", legalize="auto", has_fixes=True),
        Variant("always", "hmpx always", legalize="always"),
        Variant("never", "hmpx never", legalize="never"),
    )
}

#: The default variants; ``"frozen"`` only for a model.
DEFAULT: Final = (BASE, "autocast", "auto", "fast", "frozen")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all variants have in common."""

    device_type: str
    low_dtype: torch.dtype | None  # That of torch.autocast; None for a number format
    conversion: Mapping[str, Any]  # Options of convert
    clock: Callable[[], float]
    seed: int


@dataclass
class Runner:
    """A variant of the benchmark, with its own step, model and random numbers."""

    variant: Variant
    conditions: Conditions
    own_step: Callable[[], Any] = field(init=False)
    model: nn.Module | None = None
    inputs: Any = None
    run_times: list[float] = field(default_factory=list)  # Seconds per step of each run
    # The number that each step returned, or its ``loss``; else None
    losses: list[float | None] = field(default_factory=list)
    # The tensors that the first step returned, unless that is a single number
    outputs: list[Tensor] | None = None
    error: BaseException | None = None
    memory_bytes: int | None = None  # Peak of a step
    trained: list[Tensor] = field(default_factory=list)  # Parameters that warmup has stepped
    steps: int = 1  # Per run
    fixes: tuple[str, ...] | None = None  # In force; None before the first step
    _returned: list[Tensor | float | None] = field(default_factory=list)
    _random: RandomStates | None = None
    _frozen: freezing.Frozen | None = None
    _fixed: Policy | None = None
    _on_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def make(
        self, make: Callable[[], Any], inputs: Any, taken: Collection[nn.Module | None]
    ) -> None:
        """Makes the step; a model is copied if it is in ``taken``.

        Raises:
            BenchError: ``make`` returns no step, or a model without inputs.
        """
        with self._own_random_numbers():
            found = arguments.has_run("make", make())
            if not isinstance(found, nn.Module):
                if not callable(found):
                    raise BenchError(
                        "make() must return the step, a function without arguments, or a model; it returned "
                        f"{shown(found)}"
                    )
                self.own_step = found
                return
            if inputs is None:
                raise BenchError(
                    f"make() returned a model, {type(found).__name__}: inputs must be what its forward is "
                    "called with; for training, return a function that makes a step"
                )
            self.inputs = copied(inputs() if is_factory(inputs) else inputs)
            self.model = model = copy.deepcopy(found) if found in taken else found
        if self.variant.name == BASE:  # other variants have copies, or models of their own
            self._on_close.enter_context(unchanged(model, self.inputs))
        model.eval()
        args, kwargs = arguments_of(self.inputs)

        @torch.no_grad()
        def forward() -> Any:
            return model(*args, **kwargs)

        self.own_step = forward

    def step(self) -> Any:
        """Makes a step."""
        if not self.variant.is_autocast:
            return self.own_step()
        # A region for each step: a region keeps its casts of weights, which optimizers change.
        with torch.autocast(self.conditions.device_type, self.conditions.low_dtype):
            return self.own_step()

    def warm_up(self, steps: int, run_s: float) -> None:
        """Makes some steps, and sets the number of steps per run to fit ``run_s``."""
        with self._region(), _trained() as self.trained:
            for _ in range(steps):
                self._noted(arguments.has_run("the step", self.step()))
            # wall time, since a waiting step uses no processor
            step_s = self._seconds_per_step(1, time.perf_counter)
        self.steps = min(10_000, max(1, math.ceil(run_s / max(step_s, 1e-9))))

    def run(self) -> None:
        """Makes one untimed step, since torch has just been changed, and then the timed ones."""
        with self._region():
            self._noted(arguments.has_run("the step", self.step()))
            self.run_times.append(self._seconds_per_step(self.steps, self.conditions.clock))

    def _seconds_per_step(self, steps: int, clock: Callable[[], float]) -> float:
        self._synchronize()
        start = clock()
        for _ in range(steps):
            self._noted(self.step())  # at once: a loss keeps the step's activations alive
        self._synchronize()
        elapsed_s = clock() - start
        # Reading losses from the device synchronizes, so it is never done while steps are timed.
        self.losses += [None if each is None else float(each) for each in self._returned]
        self._returned.clear()
        return elapsed_s / steps

    def measure_memory(self) -> None:
        """Makes one step to compile and fill caches, since torch has just been changed, then a measured one."""
        with self._region():
            self.step()
            self.memory_bytes = peak_bytes(self.step, self.conditions.device_type)

    def low_op(self) -> str:
        """Makes one more step, and returns its first op in low precision; ``""`` if there is none.

        Compiled functions run uncompiled, since compiled graphs hide their ops.
        """
        noting = _Noting()
        with self._region(), torch.compiler.set_stance("force_eager"), noting:
            self.step()
        return noting.found

    def close(self) -> None:
        """Restores the model as it was given."""
        if self._frozen is not None:
            self._frozen.undo()
        self._on_close.close()

    def _synchronize(self) -> None:
        if self.conditions.device_type != "cpu":
            module: Any = torch.get_device_module(self.conditions.device_type)
            module.synchronize()

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        legalize = self.variant.legalize
        with contextlib.ExitStack() as stack:
            if legalize is not None:
                types, conversion = {self.conditions.device_type}, self.conditions.conversion
                converted = session.convert(legalize=legalize, device_types=types, **conversion)
                stack.enter_context(converted)
                if self.variant.has_fixes:
                    self._fixed = self._fixed or self._policy_with_fixes(converted.policy)
                    fixed = {**converted.arguments(), "policy": self._fixed}
                    stack.enter_context(session.restore(**fixed))
            stack.enter_context(self._own_random_numbers())
            if self.variant.is_frozen and self._frozen is None:
                assert self.model is not None
                self._frozen = freezing.freeze(self.model, self.inputs)
            yield

    def _policy_with_fixes(self, policy: Policy) -> Policy:
        """Records the first step, and returns the policy with the lines of op lists that this record proposes."""
        with self._own_random_numbers(), record() as recorded:
            self._noted(self.step())
        self.outputs = None  # the first results under the new policy count
        lines = [
            each.line for each in fixes(recorded.waste()) if each.line.startswith("bf16.txt: ")
        ]
        self.fixes = tuple(lines)
        decisions = dict(policy.decisions)
        for line in lines:
            op = line.removeprefix("bf16.txt: ")
            if op.startswith("-"):
                decisions.pop(op[1:], None)
            else:
                decisions[op] = Decision(CastPolicy.LOW, reason=line)
        return replace(policy, decisions=decisions)

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Uses the variant's generator states inside the block, and restores the user's after it."""
        outside = RandomStates(accelerators())
        if self._random is None:
            seed_all(self.conditions.seed)
        else:
            self._random.restore()
        try:
            yield
        finally:
            self._random = RandomStates(accelerators())
            outside.restore()

    def _noted(self, returned: Any) -> None:
        loss: Any = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, numbers.Real):
            self._returned.append(float(loss))
        elif isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            self._returned.append(loss.detach())
        else:
            loss = None
            self._returned.append(None)
        if self.outputs is None and (loss is None or loss is not returned):
            self.outputs = [each.detach().clone() for each in floats_of(returned)]


class _Noting(TorchFunctionMode):
    """Records the first op with a low-precision result: ``"linear gives bfloat16, at train.py:12"``."""

    found: str = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        low = [each.dtype for each in floats_of(returned) if each.dtype in LOW_DTYPES]
        if not self.found and (low or session.is_converted()):
            name = str(resolve_name(func) or getattr(func, "__name__", func)).rpartition(".")[2]
            does = "runs under hmpx.convert()"
            if low:
                does = f"gives {str(low[0]).removeprefix('torch.')}"
            where = user_location()
            self.found = f"{name} {does}, at {located(where)}" if where else f"{name} {does}"
        return returned


@contextlib.contextmanager
def _trained() -> Iterator[list[Tensor]]:
    """Yields the parameters of the optimizers that step inside the block."""
    found: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found.extend(each for group in optimizer.param_groups for each in group["params"])

    with register_optimizer_step_post_hook(note):
        yield found


# --- memory --------------------------------------------------------------------------------------


def peak_bytes(step: Callable[[], Any], device_type: str) -> int | None:
    """Runs one step, and returns its peak memory above the memory in use before it.

    On an accelerator torch's allocator reports it. On the CPU it is resident memory without pages of files,
    read from Linux's /proc; other systems have no figure.
    """
    gc.collect()
    if device_type == "cpu":
        return _resident_bytes(step)
    module: Any = torch.get_device_module(device_type)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    module.synchronize()
    before: int = module.memory_allocated()
    module.reset_peak_memory_stats()
    step()
    module.synchronize()
    peak: int = module.max_memory_allocated()
    return peak - before


def _resident_bytes(step: Callable[[], Any]) -> int | None:
    with passing_over(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        before = _status_bytes("RssAnon")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    except raised_here(OSError, StopIteration):
        return None
    step()
    return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - before)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024  # "VmHWM:   123 kB"
