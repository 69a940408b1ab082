"""`monitor`: a block that measures activations, gradients, weights and optimizer states of one step in many."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import arguments
from ..comparing import is_readable, may_read
from ..errors import AlarmError, OptionError, shown, to_the_end, warn
from ..number_formats import Format, get
from ..observers import LOGGER, Attached, OpCall, Values, spared
from ..ops import is_view, names
from ..patches import ON_SKIP, SCALERS
from ..session import about_run, observable, restoring
from ..tensors import LOW_DTYPES, floating_in, is_captured, is_leaf, node_of
from ..torch_internals import unseen
from ..torch_state import apart, named_tensors, spot, unwrapped
from ..watching import is_inner_step
from .alarms import ALARMS, Alarm, MonitoredRow, checked_alarms, limit_of, matches
from .figures import Counts, Type, fold, gather, measured, measured_step
from .loggers import logging_to, safely
from .processes import Processes, is_distributed, rank
from .remedies import TRIED, Remedies, Remedy, remedy

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: The row of the loss scale.
_SCALE: Final = MonitoredRow("", "", "loss_scale", torch.float32)

#: Measured tensors that are kept before their counts are added up.
_MOST_MEASURED: Final = 4096


class Monitor:
    """A context manager returned by `monitor`.

    Attributes:
        step_number: The number of the current step, from 0.
        figures: The figures of the last checked step, by name.
        alarms: The alarms so far, in order.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> with hmpx.monitor(every=1) as monitor:
        ...     _ = model(torch.ones(2, 4))
        ...     monitor.step()
        >>> monitor.figures["hmpx/weight/weight/zeros"]
        0.0
    """

    _attached: Attached  # in the block

    def __init__(  # noqa: PLR0917  # as `monitor`
        self,
        every: int,
        model: nn.Module | None,
        modules: Sequence[str],
        chosen_ops: frozenset[str],
        formats: Sequence[Format],
        logs: Sequence[Any],
        alarms: Mapping[str, float],
        on_alarm: Any,
        step: int,
    ) -> None:
        """Is called by `monitor` only."""
        self.step_number, self.figures, self.alarms = step, dict[str, float](), list[Alarm]()
        self._first, self._model = step, model
        self._every, self._modules, self._ops = every, modules, chosen_ops
        self._formats, self._limits, self._on_alarm = formats, alarms, on_alarm
        self._logs = [logging_to(each, about_run) for each in logs]
        self._failed = set[int]()  # logs that have failed, by position
        self._measured: list[tuple[MonitoredRow, Tensor]] = []
        self._processes, self._remedies = Processes(), Remedies()
        self._roots: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._cast_to: dict[int, tuple[Tensor, Type]] = {}  # parameters that calls cast
        self._before: list[tuple[MonitoredRow, Tensor, Tensor]] = []
        self._steps_by_hand = self._is_trying = False
        self._unnamed: dict[int, int] = {}  # parameters of unknown models -> numbers
        self._optimizers = set[int]()  # that have stepped
        self._has_just_ended = False  # a step, and nothing has run since
        self._skipped = 0  # steps that loss scalers have skipped
        self._chosen: dict[str, bool] = {}  # paths of modules that ran
        self._raised = set[str]()  # names of figures beyond their limits
        self._block: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        return f"<hmpx.Monitor: step {self.step_number}, {len(self.figures)} figures, {len(self.alarms)} alarms>"

    # --- the block -------------------------------------------------------------------------------

    @restoring
    def __enter__(self) -> Monitor:
        if self._block is not None:
            raise OptionError("this monitor was entered before; make a new one with hmpx.monitor()")
        self._attached = Attached(self._measure_call, every_op=True, values=True)
        if self._model is not None:
            self._path_of(unwrapped(self._model), "")
        with contextlib.ExitStack() as block:
            block.enter_context(observable())
            block.enter_context(self._attached)
            block.enter_context(register_optimizer_step_pre_hook(self._before_step))
            block.enter_context(register_optimizer_step_post_hook(self._after_step))
            ON_SKIP.append(self._after_skip)
            block.callback(ON_SKIP.remove, self._after_skip)
            self._block = block.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._block is not None:
            to_the_end(self._block.close)
        has_ended = self.step_number > self._first
        if error is None and not has_ended and not is_distributed():  # ranks may leave apart
            self._end_step()
        self._measured, self._before = [], []
        self._roots.clear()
        self._cast_to.clear()

    def step(self) -> None:
        """Ends a step. From its first call on, only this ends one; steps of optimizers no longer do."""
        was_ended = self._has_just_ended and not self._steps_by_hand  # by the optimizer
        self._steps_by_hand = True
        if was_ended:
            return
        if self._is_checked:
            with apart():
                self._measure_parameters()
        self._end_step()

    @property
    def _is_checked(self) -> bool:
        return self.step_number % self._every == 0

    # --- calls -----------------------------------------------------------------------------------

    @spared
    def _measure_call(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        self._has_just_ended = False
        if not self._is_checked:
            self._attached.pause()  # until the next one
            return
        inputs, *_ = values
        if not may_read() or call.phase == "backward" or (self._ops and call.op not in self._ops):
            return
        root, _ = spot()
        is_evaluation = not torch.is_grad_enabled() and root is not None and not root.training
        if is_evaluation and not self._steps_by_hand:
            return
        module = self._path_of(root, call.module)
        if not self._is_chosen(module):
            return
        with apart():
            if call.phase == "forward":
                self._measure_inputs(call, module, inputs)
            self._measure_result(call, module, *values)

    def _path_of(self, root: nn.Module | None, module: str) -> str:
        """Returns the path of a module: behind the class of its model unless no other model is running."""
        if root is None:
            return module
        known, own = id(root), type(root).__name__
        if known not in self._roots:
            taken = {name for _, name in self._roots.values()}
            names = itertools.chain(["", own], (f"{own}{n}" for n in itertools.count(2)))

            def forget(_: object) -> None:
                self._roots.pop(known, None)

            found = next(name for name in names if name not in taken)
            self._roots[known] = weakref.ref(root, forget), found
        return "/".join(filter(None, [self._roots[known][1], module]))

    def _is_chosen(self, module: str) -> bool:
        if module not in self._chosen:
            is_chosen = any(fnmatch.fnmatchcase(module, each) for each in self._modules)
            self._chosen[module] = is_chosen or not self._modules
        return self._chosen[module]

    def _measure_inputs(self, call: OpCall, module: str, inputs: list[Tensor]) -> None:
        """Measures the inputs that a call casts, but for parameters, whose type it notes."""
        for tensor, cast in zip(inputs, call.cast_dtypes, strict=False):
            is_format = not isinstance(call.dtype, (torch.dtype, type(None)))
            is_autocast = call.cast_policy == "PASS" and call.dtype is not None
            to: Any = call.dtype if is_format or is_autocast else cast
            if to != tensor.dtype and (is_format or to in LOW_DTYPES):
                if isinstance(tensor, nn.Parameter):
                    self._cast_to[id(tensor)] = tensor, to
                else:
                    self._measure(MonitoredRow(module, call.op, "input", to, is_cast=True), tensor)

    def _measure_result(self, call: OpCall, module: str, /, *values: Unpack[Values]) -> None:
        inputs, args, kwargs, result = values
        if is_view(call.op) and call.output_dtypes[:1] == call.input_dtypes[:1]:
            return
        for tensor in inputs[:1] if result is None else floating_in([result]):
            if call.phase == "forward":
                row = MonitoredRow(module, call.op, "activation", tensor.dtype)
                self._measure(row, tensor)
                self._measured += self._remedies.measured_call(row, call, args, kwargs, result)
            node = None if is_leaf(tensor) else node_of(tensor)
            if node is not None:
                at = self.step_number, module, call.op, tensor.output_nr
                node.register_prehook(functools.partial(self._measure_gradient, *at))

    @spared
    @unseen
    def _measure_gradient(
        self, step: int, module: str, op: str, output: int, gradients: tuple[Tensor | None, ...]
    ) -> None:
        gradient = gradients[output] if output < len(gradients) else None
        if gradient is not None and step == self.step_number and may_read():
            with apart():
                self._measure(MonitoredRow(module, op, "gradient", gradient.dtype), gradient)

    def _measure(self, row: MonitoredRow, tensor: Tensor) -> None:
        tensor = _local(tensor)
        if tensor.numel() and is_readable(tensor) and not is_captured(tensor):
            self._measured.append((row, measured(tensor, row.of if row.is_cast else None)))
            self._measured += self._remedies.measured(row, tensor)
            for each in self._formats:
                trial = row._replace(of=each, is_cast=True, trial=each.name)
                self._measured.append((trial, measured(tensor, each)))
        if len(self._measured) > _MOST_MEASURED:
            parts = [*fold(self._measured)]
            self._measured = [
                (row, each) for rows, of in parts for row, each in zip(rows, of, strict=True)
            ]

    # --- steps -----------------------------------------------------------------------------------

    @spared
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_checked or self._is_trying or is_inner_step(optimizer):
            return
        has_gradients = not _has_closure(args, kwargs)  # which makes them later
        with apart():
            self._before = []
            for row, parameter, group in self._parameters_of(optimizer):
                if has_gradients:
                    self._measure_own_gradient(row, parameter)
                if (gradient := parameter.grad) is not None and parameter.dtype in LOW_DTYPES:
                    are_readable = all(map(is_readable, map(_local, (parameter, gradient))))
                    if are_readable and group.get("lr") != 0:
                        own = row._replace(of=parameter.dtype, is_cast=False)
                        self._before.append((own, parameter, _local(parameter).clone()))
                        self._is_trying = True  # a copy's step may run these hooks
                        try:
                            trials = self._remedies.measured_step(own, optimizer, parameter)
                            self._measured += trials if has_gradients else ()
                        finally:
                            self._is_trying = False
                if id(parameter) in self._unnamed:
                    self._measure(row, parameter)
            if not self._steps_by_hand:
                self._measure_parameters()

    def _measure_own_gradient(self, row: MonitoredRow, parameter: Tensor) -> None:
        if (gradient := parameter.grad) is not None:
            own = row._replace(kind="gradient", of=gradient.dtype, is_cast=False)
            self._measure(own, gradient)

    def _parameters_of(
        self, optimizer: Optimizer
    ) -> Iterator[tuple[MonitoredRow, Tensor, Mapping[str, Any]]]:
        """Yields the chosen parameters of an optimizer, each with its row and its group."""
        named = self._named_parameters()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in named:
                    _, row = named[id(parameter)]
                else:
                    number = self._unnamed.setdefault(id(parameter), len(self._unnamed))
                    row = MonitoredRow("", f"parameter {number}", "weight", parameter.dtype)
                if self._is_chosen(row.module):
                    yield row, parameter, group

    def _named_parameters(self) -> dict[int, tuple[Tensor, MonitoredRow]]:
        """Returns ``id`` of a parameter -> it and its row, by its name in the largest model that has it."""
        found: dict[int, tuple[Tensor, MonitoredRow]] = {}
        models = [model for known, _ in [*self._roots.values()] if (model := known()) is not None]
        named = [(each, [*named_tensors(each)]) for each in models]
        for root, tensors in sorted(named, key=lambda each: -len(each[1])):
            for name, tensor in tensors:
                if isinstance(tensor, nn.Parameter) and id(tensor) not in found:
                    path, _, own = name.rpartition(".")
                    _, to = self._cast_to.get(id(tensor), (None, tensor.dtype))
                    module, is_cast = self._path_of(root, path), to != tensor.dtype
                    found[id(tensor)] = tensor, MonitoredRow(module, own, "weight", to, is_cast)
        return found

    @spared
    def _measure_parameters(self) -> None:
        for tensor, row in self._named_parameters().values():
            if self._is_chosen(row.module):
                self._measure(row, tensor)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_trying or is_inner_step(optimizer):
            return
        if self._is_checked:
            with apart():
                self._measure_step(optimizer, makes_gradients=_has_closure(args, kwargs))
        self._step_of(optimizer)

    def _after_skip(self, optimizer: Optimizer) -> None:
        """Ends a step that a loss scaler has skipped."""
        self._skipped += 1
        if self._is_checked and not self._steps_by_hand:
            with apart():
                self._measure_parameters()
        self._step_of(optimizer)

    def _step_of(self, optimizer: Optimizer) -> None:
        if self._steps_by_hand:
            return
        is_new = id(optimizer) not in self._optimizers
        self._optimizers.add(id(optimizer))
        if is_new and len(self._optimizers) == 2:
            LOGGER.warning(
                "hmpx.monitor: each step of one of several optimizers counts as a step; call the monitor's "
                ".step() at the end of an iteration instead"
            )
        self._end_step()
        self._has_just_ended = True

    @spared
    def _measure_step(self, optimizer: Optimizer, *, makes_gradients: bool) -> None:
        """Measures what a step has done: weights that it has not changed, and states; gradients if a closure made them."""
        if makes_gradients:
            for row, parameter, _ in self._parameters_of(optimizer):
                self._measure_own_gradient(row, parameter)
        for row, parameter, before in self._before:
            gradient, after = parameter.grad, _local(parameter)
            if gradient is not None and after.shape == before.shape:
                self._measured.append((row, measured_step(before, after, _local(gradient))))
        self._before = []
        for row, parameter, _ in self._parameters_of(optimizer):
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and value.numel() > 1:
                    own = MonitoredRow(row.module, f"{row.op}.{key}", "state", value.dtype)
                    self._measure(own, value)

    def _end_step(self) -> None:
        try:
            if self._is_checked:
                rows, scaling = self._rows()
                self._cast_to.clear()
                if self.step_number == self._first:
                    self._warn_of_modules()
                if rows:
                    self._tell(self._judged(rows, scaling) or [])
        finally:
            self.step_number += 1
            if self._is_checked:
                self._attached.resume()

    def _warn_of_modules(self) -> None:
        for pattern in self._modules if any(self._chosen) else ():
            if not any(fnmatch.fnmatchcase(each, pattern) for each in self._chosen):
                warn(
                    f"hmpx.monitor: modules={pattern!r} matches none of the modules of step {self.step_number}, "
                    f"such as {max(self._chosen)!r}"
                )

    @unseen
    def _rows(self) -> tuple[dict[MonitoredRow, Counts], dict[str, float]]:
        """Returns the counts of the step, over all processes of a distributed run, and the figures of loss scaling."""
        found, self._measured = self._measured, []
        scaler = next((each for each in SCALERS if each.is_enabled()), None)
        with apart():
            if scaler is not None and found:  # read with the others
                _, like = found[0]
                scale = scaler.scale(torch.ones((), device=like.device)).to(like.dtype)
                found.append((_SCALE, scale.expand_as(like)))
            if is_distributed():
                rows, vectors = self._processes.gather(found)
            else:
                rows, vectors = gather(found, torch.device("cpu"))
        counts = map(Counts._make, vectors.tolist())
        known = {
            row: each for row, each in zip(rows, counts, strict=True) if each.values or each.moving
        }
        if (last := known.pop(_SCALE, None)) is None:
            return known, {}
        skipped = float(self._skipped)
        return known, {"hmpx/loss_scale": last.amax, "hmpx/skipped_steps": skipped}

    @spared
    def _judged(
        self, rows: Mapping[MonitoredRow, Counts], scaling: dict[str, float]
    ) -> list[Alarm]:
        """Logs the figures of a step, and returns the alarms that it gives: new ones, and tried ones again."""
        helping = list[tuple[MonitoredRow, str, Alarm, Remedy]]()
        alarms = [
            Alarm(name, self.step_number, value, limit, "", "", "")
            for name, value in scaling.items()
            if value > (limit := limit_of(name, self._limits))
        ]
        found, beyond = scaling, {each.name for each in alarms}
        for where, counts in [(where, of) for where, of in rows.items() if where.trial != TRIED]:
            for figure, value in where.figures(counts):
                name = where.name(figure)
                found[name] = max(value, found.get(name, value))  # of those in several types
                limit = limit_of(name, self._limits)
                if name in self._raised and value > limit / 2:  # it may swing
                    beyond.add(name)
                if value > limit and not (where.kind == "gradient" and self._may_overflow(figure)):
                    beyond.add(name)
                    helps, at = remedy(where, figure, counts), (where.module, where.op)
                    alarms.append(Alarm(name, self.step_number, value, limit, *at, helps.text))
                    if name not in self._raised:
                        helping.append((where, figure, alarms[-1], helps))
        if not self.figures:
            for pattern in self._limits.keys() - ALARMS.keys():
                if not any(matches(name, pattern) for name in found):
                    warn(
                        f"hmpx.monitor: alarms[{pattern!r}] matches none of the figures of step {self.step_number}, "
                        f"such as {max(found)!r}"
                    )
        self.figures = found
        for position, log in enumerate(self._logs if rank() == 0 else ()):
            if not safely(log, found, self.step_number, warns=position not in self._failed):
                self._failed.add(position)
        new = [each for each in alarms if each.name not in self._raised]
        tried = dict(self._remedies.judged(rows, found, beyond, self.step_number))
        for each in helping:
            self._remedies.add(*each)
        self._raised = beyond
        self.alarms[:] = [*[tried.get(each, each) for each in self.alarms], *new]
        return [*new, *tried.values()]

    def _tell(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms if rank() == 0 else ():
            if callable(self._on_alarm):
                self._on_alarm(alarm)
            elif self._on_alarm == "log":
                LOGGER.warning("hmpx.monitor: %s", alarm)
        new = next((each for each in alarms if not each.tried), None)
        if new is not None and self._on_alarm == "raise":
            raise AlarmError(new)

    @staticmethod
    def _may_overflow(figure: str) -> bool:
        """Whether a loss scaler makes gradients so on purpose, to find the largest scale."""
        is_range = figure in ("nonfinite", "near_max", "saturated")
        return is_range and any(each.is_enabled() for each in SCALERS)


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(map(callable, (*args[1:], *kwargs.values())))


def _local(tensor: Tensor) -> Tensor:
    """Returns a tensor's own values: of a distributed one the part that is here."""
    local: Any = getattr(tensor, "to_local", None)
    return tensor.detach() if local is None else local().detach()


def monitor(
    *,
    every: int = 50,
    model: nn.Module | None = None,
    modules: Iterable[str] = (),
    ops: Iterable[str] = (),
    formats: Iterable[str] = (),
    log: object = (),
    alarms: Mapping[str, float] | None = None,
    on_alarm: str | Callable[[Alarm], object] = "log",
    step: int = 0,
) -> Monitor:
    """Measures a training over time: activations, gradients, weights and optimizer states, one step in ``every``.

    A step ends with `Optimizer.step`, or with the block's ``.step()`` once that is called. A checked step gives plain
    numbers named ``hmpx/MODULE/OP/KIND/FIGURE``, such as ``hmpx/fc1/linear/activation/near_max``, which
    [figures](reports.md#names-and-figures) explains. Works with and without a conversion, also over torch.autocast; no
    result changes. In distributed runs all processes must enter the block and end as many steps; figures are of all of them
    together, and rank 0 logs.

    Args:
        every: Checks one step in ``every``, from the first on.
        model: Names the parameters also where no module's call is seen, as under torch.compile.
        modules: Patterns of paths of modules, such as ``"layers.*"``; default: all.
        ops: Names of ops; default: all.
        formats: Number formats to try on each tensor besides: figures such as ``float8_e4m3fn.error``.
        log: Gets the figures of each checked step: a function ``log(figures, step)``, a path that ends in ``.jsonl``, a
            `SummaryWriter`, a run of W&B, ``mlflow`` or its client, a logger of Lightning; or a list of these. One that
            fails gives a warning.
        alarms: Pattern of a name -> limit, the last pattern that matches a name counting; None: `hmpx.monitoring.ALARMS`,
            {} for none.
        on_alarm: ``"log"``, ``"raise"``, ``"collect"``, or a function that gets the `Alarm`. A figure gives
            one alarm until it has been below half of its limit; it comes again once its remedy was tried.
        step: The number of the first step, of a run that goes on.

    Raises:
        OptionError: An argument has an invalid value.
        AlarmError: A figure is beyond its limit, under ``"raise"``; at the end of the step.

    Example:
        >>> found = []
        >>> linear = torch.nn.Linear(2, 2)
        >>> with hmpx.monitor(log=lambda figures, step: found.append(step)) as monitor:
        ...     _ = linear(torch.ones(1, 2))
        ...     monitor.step()
        >>> found
        [0]
    """
    chosen = frozenset(arguments.texts("ops", ops))
    for each in chosen:
        arguments.choice("an op", each, names())
    if not callable(on_alarm):
        arguments.choice("on_alarm", on_alarm, ("log", "raise", "collect"))
    logs = list(log) if isinstance(log, (list, tuple)) else [log]
    tried = [get(each) for each in arguments.texts("formats", formats)]
    limits = ALARMS if alarms is None else checked_alarms(alarms)
    paths = arguments.texts("modules", modules)
    if not isinstance(model, (nn.Module, type(None))):
        raise OptionError(f"model must be an nn.Module, not {shown(model)}")
    every, first = arguments.whole("every", every, 1), arguments.whole("step", step, 0)
    return Monitor(every, model, paths, chosen, tried, logs, limits, on_alarm, first)
