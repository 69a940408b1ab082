"""`watch`: a block that reports the first op that makes finite values non-finite."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import arguments, session
from ..errors import NonFiniteError, OptionError, noted, shown, to_the_end
from ..observers import LOGGER, Attached, OpCall, Values, spared, user_location
from ..patches import SCALERS
from ..places import own_line
from ..renames import old_window
from ..tensors import floating_in, node_of
from ..torch_internals import uncompiled, unseen
from ..torch_state import state_of_random_numbers
from .culprit import OriginSearch
from .notes import Notes, sources_of
from .offences import Offence, offence_of
from .optimizers import OptimizerSteps
from .records import is_measurable
from .slots import Slots
from .step_repeats import is_closure
from .underflow import Underflow, UnderflowCounts

if TYPE_CHECKING:
    from typing_extensions import Unpack

Mode = Literal["raise", "log", "collect"]

#: Most offences kept.
_MOST_OFFENCES: Final = 100

#: A loss scaler may skip this share of so many steps; a scale below the floor no longer scales up.
_STEPS: Final = 200
_MOST_SKIPPED: Final = 0.05
_FLOOR: Final = 1.0


class Watch:
    """A context manager returned by `watch`; it can be used again.

    Attributes:
        offences: The offences found so far, in order; at most a hundred.

    Example:
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.watch("collect") as w:
        ...     for scale in (1.0, 100.0):
        ...         y = torch.exp(torch.full((2,), scale))
        ...         w.step()
        >>> w.first.op, w.first.step, len(w.offences)
        ('exp', 1, 1)
    """

    def __init__(
        self,
        mode: Mode,
        step: Callable[..., Any] | None,
        chosen: Callable[[int], bool],
        underflow: float,
    ) -> None:
        self.offences: list[Offence] = []
        self._mode, self._closure, self._chosen = mode, step, chosen
        self._notes = Notes()
        self._judge = OriginSearch(self._notes.living, self._notes.is_named)
        self._scaling, self._underflow = _LossScaling(), UnderflowCounts(underflow)
        self._optimizers = OptimizerSteps(self._notes.name_of, self._underflow)
        self._block: Generator[None, None, None] | None = None
        self._attached: Attached | None = None
        self._number = 0
        self._steps_by_hand = self._has_optimizer = False
        self._logged: set[tuple[str, ...]] = set()

    @property
    def first(self) -> Offence | None:
        """The first offence, or None."""
        return self.offences[0] if self.offences else None

    @property
    def underflow(self) -> list[Underflow]:
        """Values that casts to low precision made zero or subnormal, most first; needs ``underflow=``."""
        return self._underflow.rows()

    def __repr__(self) -> str:
        state = "closed" if self._attached is None else f"open, in step {self._number}"
        first = f"first: {self.first.op} in step {self.first.step}" if self.first else "no offence"
        return f"<hmpx.Watch {state}: {first}>"

    # --- the block -------------------------------------------------------------------------------

    @session.restoring
    def __enter__(self) -> Watch:
        if self._attached is not None:
            raise OptionError("this watch is running already; make another one with hmpx.watch()")
        self._block = self._observing()
        try:
            next(self._block)
            return self
        except BaseException:
            self._block.close()
            raise

    def _observing(self) -> Generator[None, None, None]:
        """Observes from the generator's first step until it is closed."""
        try:
            with (
                session.observable(),
                Attached(self._observe, every_op=True, values=True, carries=True) as self._attached,
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
                uncompiled(),
            ):
                self._notes.is_open = True
                self._pause_or_resume()
                yield
        finally:
            self._attached = None
            self._notes.is_open = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        before = len(self.offences)
        try:
            self._close_step(may_raise=error is None)
        finally:
            if self._block is not None:
                to_the_end(self._block.close)
        found = self.offences[before:]
        is_own = isinstance(error, NonFiniteError)
        if found and error is not None and not is_own and self._mode == "raise":
            noted(error, f"hmpx.watch: {found[0]}")
            self._log(found[0])

    # --- steps -----------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Ends a step. With ``watch(step=closure)`` runs one, and if it fails, again with every op watched.

        From its first call on, only this ends a step; optimizer steps no longer do.

        Returns:
            The result of the closure; None without one.
        """
        self._steps_by_hand = True
        if self._closure is None:
            self._close_step()
            return None
        run = _StepRun(self._closure, args, kwargs)
        result = run.first()
        try:
            if run.is_bad(result):
                self._run_again(run)
        finally:
            self._number += 1
            self._pause_or_resume()
        return result

    def locate(self, closure: Callable[[], Any]) -> Offence | None:
        """Runs ``closure`` with every op watched, then restores the RNG state.

        Args:
            closure: One step, without the optimizer's. It should set gradients to zero itself.

        Returns:
            Its first offence, or None.
        """
        before = len(self.offences)
        self._run_again(_StepRun(closure, (), {}), may_raise=False)
        return self.offences[before] if len(self.offences) > before else None

    def _run_again(self, run: _StepRun, *, may_raise: bool = True) -> None:
        attached = self._attached
        if attached is None:
            raise OptionError("enter the watch first: `with hmpx.watch(...) as w:`")
        self._judge_notes(ends_step=True, may_raise=False)
        attached.resume()
        number, self._notes.waits = self._number, True
        try:
            run.again()
        finally:
            self._notes.waits = False
            try:
                self._close_step(may_raise=may_raise)
            finally:
                self._number = number
                self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        """Observes calls only in watched steps."""
        is_watched = self._chosen(self._number)
        if self._attached is None:
            return
        self._notes.step = self._number
        if is_watched and self._closure is None:
            self._attached.resume()
        else:
            self._attached.pause()

    @spared
    def _before_optimizer(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Ends the step. If the optimizer gets a closure, that ends one, since it runs the step."""
        if self._optimizers.is_inner(optimizer):
            return None
        self._has_optimizer = self._has_optimizer or not self._steps_by_hand
        closures = [value for value in (*args[1:], *kwargs.values()) if is_closure(value)]
        number = self._number
        if not closures and not self._steps_by_hand:
            self._notes.are_checked = False  # the program steps, whatever it has found
            self._close_step()
        if self._attached is None:
            return None
        self._attached.pause()  # its arithmetic is not observed: this is the fastest way
        if self._chosen(number):
            self._optimizers.begin(optimizer, number)
        if not closures:
            return None
        watched = {id(closure): self._ending_a_step(closure) for closure in closures}
        new_kwargs = {name: watched.get(id(value), value) for name, value in kwargs.items()}
        return tuple(watched.get(id(value), value) for value in args), new_kwargs

    @spared
    def _after_optimizer(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._optimizers.is_inner(optimizer):
            return
        self._pause_or_resume()
        location, may_skip = own_line(user_location()), self._may_skip()
        found = self._optimizers.end(optimizer, args, kwargs, location, may_skip=may_skip)
        rates = [each for group in optimizer.param_groups for each in group.values()]
        if found is not None and self._judge.number is not None and not all(map(_is_finite, rates)):
            found = offence_of(self._judge.number)
        if found is not None:
            self._report([found], may_raise=True)

    def _ending_a_step(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an optimizer's closure that observes calls and then ends the step."""

        @functools.wraps(closure)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._pause_or_resume()
            result = closure(*args, **kwargs)
            self._optimizers.add_closure(result)
            if not self._steps_by_hand:
                self._close_step()
            if self._attached is not None:
                self._attached.pause()
            return result

        return watched

    def _close_step(self, *, may_raise: bool = True) -> None:
        try:
            self._judge_notes(ends_step=True, may_raise=may_raise)
        finally:
            self._number += 1
            self._pause_or_resume()

    # --- calls -----------------------------------------------------------------------------------

    @spared
    def _observe(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        notes = self._notes
        if notes.is_full:
            self._judge_notes(ends_step=False)
        elif (
            notes.has_gradients
            and call.phase == "forward"
            and not self._steps_by_hand
            and (self._may_skip() or not self._has_optimizer)
            and any([each.requires_grad for each in values[0]])  # noqa: C419  # not of gradients
        ):
            self._close_skipped()
        notes.add_call(call, *values)
        self._underflow.add(call, values[0])

    def _close_skipped(self) -> None:
        """Ends a step that may have ended without an optimizer's: skipped by a loss scaler, or done by hand."""
        found = self._judge_notes(ends_step=True)
        self._notes.has_gradients = False
        if found or not self._may_skip():
            self._number += 1
            self._pause_or_resume()

    def _may_skip(self) -> bool:
        """Whether a loss scaler, or the program itself, may skip steps with gradients that are not finite."""
        return self._scaling.is_used() or self._notes.are_checked

    # --- verdicts --------------------------------------------------------------------------------

    @spared
    @unseen
    def _judge_notes(self, *, ends_step: bool, may_raise: bool = True) -> bool:
        """Reads the measurements; returns whether anything was wrong."""
        records = self._notes.take(ends_step=ends_step)
        origins = self._judge.judge(records, ends_step=ends_step, trains=self._notes.trains)
        reported = []
        for origin in origins:
            is_scaled = origin.gradients is not None and self._may_skip()
            if is_scaled and not origin.bits:
                continue  # another scale may do
            leaf = None if origin.parameter is None else origin.parameter.reference()
            if not self._optimizers.is_known(leaf) and (not is_scaled or self._scaling.is_lost()):
                reported.append(offence_of(origin, "scale" if is_scaled else None))
        if ends_step:
            self._scaling.end_step(is_used=self._may_skip())
        self._report(reported, may_raise=may_raise)
        return bool(origins)

    def _report(self, reported: list[Offence], *, may_raise: bool) -> None:
        for offence in reported:
            if len(self.offences) < _MOST_OFFENCES:
                self.offences.append(offence)
            if self._mode == "log":
                self._log(offence)
        if reported and self._mode == "raise" and may_raise:
            raise NonFiniteError(reported[0])

    def _log(self, offence: Offence) -> None:
        key = (offence.op, offence.module, offence.location, offence.kind, offence.phase)
        if key not in self._logged:
            self._logged.add(key)
            LOGGER.warning("%s", offence)


# --- steps -------------------------------------------------------------------------------------------


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class _StepRun:
    """One step as a function."""

    def __init__(
        self, closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._closure, self._args, self._kwargs = closure, args, kwargs
        self._state = self._random_state()

    def _random_state(self) -> Any:
        tensors = [*self._args, *self._kwargs.values()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # the step may draw there
            tensors.append(torch.empty(0, device="cuda"))
        return state_of_random_numbers(tensors)

    def first(self) -> Any:
        """Runs the step."""
        return self._closure(*self._args, **self._kwargs)

    def again(self) -> Any:
        """Runs the step again with its first RNG state, then restores the current one."""
        now = self._random_state()
        self._state.restore()
        try:
            return self.first()
        finally:
            now.restore()

    @staticmethod
    def is_bad(result: Any) -> bool:
        """Whether the result, or a gradient behind it, is not finite; waits for devices."""
        results = floating_in(result.values() if isinstance(result, dict) else [result])
        slots = Slots()
        made = [node for each in results if (node := node_of(each)) is not None]
        leaves = {node.variable for node, _ in sources_of(made)}
        gradients = [each.grad for each in leaves if each.grad is not None]
        for tensor in (*results, *gradients):
            if is_measurable(tensor):
                slots.measure(tensor)
        if isinstance(result, float) and not math.isfinite(result):
            return True
        return slots.read() is not None


class _LossScaling:
    """The steps skipped by loss scalers, which sometimes make gradients overflow on purpose."""

    def __init__(self) -> None:
        self._skipped: deque[bool] = deque(maxlen=_STEPS)
        self._is_bad = False
        SCALERS.clear()

    def is_used(self) -> bool:
        """Whether a loss has been scaled since the watch began."""
        return any(scaler.is_enabled() for scaler in list(SCALERS))

    def is_lost(self) -> bool:
        """Records non-finite gradients; returns whether no scale helps."""
        self._is_bad = True
        if sum(self._skipped) + 1 > _MOST_SKIPPED * _STEPS:
            return True
        return any(scaler.is_enabled() and scaler.get_scale() < _FLOOR for scaler in list(SCALERS))

    def end_step(self, *, is_used: bool) -> None:
        """Starts the next step."""
        if is_used:
            self._skipped.append(self._is_bad)
        self._is_bad = False


def watch(
    mode: Mode = "raise",
    every: int = 1,
    step: Callable[..., Any] | None = None,
    steps: Iterable[int] | None = None,
    underflow: bool | float = False,
) -> Watch:
    """Returns a context manager that reports the first op that makes finite values NaN or infinite.

    It covers the forward, checkpoints' recomputation and the backward. It ignores masks of
    infinities, and ops that only pass on non-finite values. A step ends where an optimizer steps,
    at `Watch.step`, and with the block. Only then is a device read.

    Args:
        mode: ``"raise"`` raises an error at the end of the step, before the optimizer changes any
            weight; ``"log"`` logs to the logger ``hmpx``; ``"collect"`` only fills the result.
        every: Watches one step out of ``every``, from the first on; the others cost next to nothing.
        step: One step as a function, without the optimizer's, for `Watch.step` to run. If its
            result or gradients are not finite, it runs again with every op watched.
        steps: The steps to watch, from 0: ``range(1000, 1010)``. All by default.
        underflow: Also samples values that casts to low precision make zero or subnormal: True, or the
            share of calls to sample.

    Raises:
        OptionError: An argument has an invalid value.

    Example:
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.watch("collect") as w:
        ...     y = torch.exp(torch.mm(torch.full((1, 2), 60.0), torch.ones(2, 1)))
        >>> w.first.op, w.first.kind
        ('exp', 'inf')
    """
    if mode not in ("raise", "log", "collect"):
        raise OptionError(f'mode must be "raise", "log" or "collect", not {shown(mode)}')
    if isinstance(steps, tuple) and len(steps) == 2:
        steps = old_window(steps)
    if step is not None and not callable(step):
        raise OptionError(f"step must be a function that runs one step, not {shown(step)}")
    if not (isinstance(underflow, (bool, int, float)) and 0 <= underflow <= 1):
        raise OptionError(f"underflow must be a bool or a share of calls, not {shown(underflow)}")
    return Watch(mode, step, arguments.chosen_steps(steps, every), float(underflow))
