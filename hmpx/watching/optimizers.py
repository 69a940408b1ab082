"""Faults made in `Optimizer.step`: if its result is not finite, a copy of the step runs again, op by op."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import passing_over
from ..observers import user_location
from ..patching import unpatched
from ..places import own_line
from ..tensors import CAST, LOW_DTYPES, is_captured, is_floating, leaves, map_tensors, tensors_in
from ..torch_internals import DispatchMode, foreach_copy, foreach_norm, unseen
from .offences import EarlierCall, Kind, Offence, Range
from .records import NAN, bits_of, is_measurable, is_off_limits, storage_of
from .slots import Slots, exact, exact_finite
from .trials import aside, text_of
from .underflow import UnderflowCounts

_isfinite, _stack = unpatched(torch.isfinite, torch.stack)

#: Most bytes copied before a step. Larger optimizers are tried on the values after it, where these are finite.
_MOST_BYTES: Final = 1 << 22

#: Number of earlier ops shown with an offence.
_CONTEXT: Final = 5

#: Ops that write a number that the program has chosen.
_WRITING: Final = (
    "fill",
    "full",
    "full_like",
    "new_full",
    "masked_fill",
    "scalar_tensor",
    "lift_fresh",
)

#: A common eps, tried in place of a smaller one.
_EPS: Final = 1e-8

#: Attributes of an optimizer that are not copied as they are.
_OF_USERS: Final = ("param_groups", "state", "step", "zero_grad")

#: Settings by which an optimizer of torch's computes on lists of tensors, to about the same values.
_ON_LISTS: Final = ("foreach", "fused")

_NOT_SKIPPED: Final = "none: the gradients were not finite; GradScaler.step skips such steps"

#: In place of the position of an op: the values were not finite before the step.
_OUTSIDE: Final = -1

#: A parameter's id, and the name of its state, ``""`` for itself.
_Key = tuple[int, str]


class _Value(NamedTuple):
    """A tensor of an optimizer."""

    parameter: Tensor
    state: str
    tensor: Tensor

    @property
    def key(self) -> _Key:
        return id(self.parameter), self.state


def _values(optimizer: Optimizer) -> list[_Value]:
    """Returns the parameters and the floating tensors of their state."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(_Value(parameter, "", parameter))
            own = optimizer.state.get(parameter, {})
            for state, value in own.items() if isinstance(own, dict) else ():
                found += [_Value(parameter, state, each) for each in tensors_in([value])]
    return [each for each in found if is_measurable(each.tensor)]


def _tensors(optimizer: Optimizer, left_out: str = "") -> list[Tensor]:
    """Returns the tensors of `_values`, faster; ``left_out`` is a state."""
    state = optimizer.state
    found = [each for group in optimizer.param_groups for each in group["params"]]
    for each in found[:]:
        own = state.get(each, {})
        for name, value in own.items() if isinstance(own, dict) else ():
            if type(value) is Tensor:
                if name != left_out:
                    found.append(value)
            elif type(value) in (list, tuple):
                found += tensors_in(value)
    return list(filter(is_measurable, found))


def is_closure(value: Any) -> bool:
    """Whether an argument of a step is the program's forward and backward."""
    return callable(value) and not isinstance(value, (nn.Module, Optimizer))


class OptimizerSteps:
    """Looks at the steps of optimizers."""

    def __init__(self, name_of: Callable[[Tensor], str], counts: UnderflowCounts) -> None:
        self._counts = counts
        self._spoiled: dict[_Key, weakref.ref[Tensor]] = {}
        self._reported: set[_Key] = set()  # of these
        self._name_of = name_of
        self._slots = Slots()
        self._buffers: weakref.WeakKeyDictionary[Optimizer, dict[int, Tensor]]
        self._buffers = weakref.WeakKeyDictionary()
        self._starts: list[_Start] = []  # of nested ones

    @unseen
    def begin(self, optimizer: Optimizer, number: int) -> None:
        """Keeps the state before a step, as far as that is cheap."""
        tensors = _tensors(optimizer)
        if not tensors or is_off_limits() or is_captured(tensors[0]):
            return
        if optimizer not in self._buffers:
            self._add_known(optimizer, tensors)  # not its steps' doing
        is_small = sum([each.nbytes for each in tensors]) <= _MOST_BYTES
        kept = tensors if is_small else [each for each in tensors if each.numel() == 1]
        old = self._buffers.get(optimizer, {})
        buffers = {id(each): _buffer(each, old.get(id(each))) for each in kept}
        self._buffers[optimizer] = buffers
        if kept:
            with torch.no_grad():
                foreach_copy(list(buffers.values()), kept)
        self._starts = [each for each in self._starts if each.optimizer is not optimizer]
        self._starts.append(_Start(optimizer, number, buffers, is_small))

    def add_closure(self, result: Any) -> None:
        """Notes what the optimizer's closure gave: some optimizers call it several times."""
        if self._starts and self._starts[-1].is_small:
            self._starts[-1].add_closure(result)

    @unseen
    def end(
        self,
        optimizer: Optimizer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        location: str,
        *,
        may_skip: bool,
    ) -> Offence | None:
        """Returns the fault of the step that has ended; None if its result is finite.

        With ``may_skip`` gradients that are not finite were excused, since the program skips such steps.
        """
        start = next((each for each in self._starts if each.optimizer is optimizer), None)
        if start is None:
            return None
        self._starts.remove(start)
        tensors = _tensors(optimizer, "step")
        fresh = self._add_known(optimizer, tensors)
        given = [each.parameter.grad for each in fresh]
        if not fresh:
            # A step of the program's own may have effects beyond its optimizer.
            is_torchs = type(optimizer).__module__.startswith("torch.")
            has_low = is_torchs and any(each.dtype in LOW_DTYPES for each in tensors)
            if has_low and self._counts.is_next():
                start.count(args, kwargs, self._name_of, self._counts)
            return None
        if any(is_measurable(each) and bits_of(exact(each)) for each in given):
            if may_skip:
                self._reported |= {each.key for each in fresh}
                return start.offence(fresh[0], self._name_of, location, _NOT_SKIPPED)
            for each in fresh:
                self._spoiled.pop(each.key, None)
            return None  # gradients are reported where they come from
        found = start.fault(fresh, args, kwargs, self._name_of, location)
        if found is not None:  # else a later call that takes them reports them
            self._reported |= {each.key for each in fresh}
        return found

    def _add_known(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> list[_Value]:
        """Returns the parameters and states that are not finite, and were not known to be so."""
        with torch.no_grad():
            if self._are_finite(tensors):
                now_finite = set(map(id, tensors)) if self._spoiled else set()
                for key in [each for each in self._spoiled if each[0] in now_finite]:
                    del self._spoiled[key]
                    self._reported.discard(key)
                return []
            bad = [each for each in _values(optimizer) if bits_of(exact(each.tensor))]
        fresh = [each for each in bad if not self._is_spoiled(each.parameter, each.state)]
        self._spoiled |= {each.key: weakref.ref(each.parameter) for each in bad}
        return fresh

    def is_known(self, parameter: Tensor | None) -> bool:
        """Whether a parameter is not finite since a step, which was reported."""
        return (id(parameter), "") in self._reported and self._is_spoiled(parameter, "")

    def _is_spoiled(self, parameter: Tensor | None, state: str) -> bool:
        found = self._spoiled.get((id(parameter), state))
        return found is not None and found() is parameter

    def _are_finite(self, tensors: Sequence[Tensor]) -> bool:
        elsewhere: dict[Any, list[Tensor]] = {}
        for each in tensors:
            if each.is_cpu:
                self._slots.measure(each)
            else:
                elsewhere.setdefault((each.device, each.dtype), []).append(each)
        norms = [_stack(foreach_norm(each, math.inf)) for each in elsewhere.values()]
        return self._slots.read() is None and all(bool(_isfinite(each).all()) for each in norms)


def _buffer(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
        return old
    return torch.empty_like(tensor, requires_grad=False)


# --- run again -----------------------------------------------------------------------------------


class _StepOp(NamedTuple):
    """An op of a step, with copies of its arguments."""

    full_name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: list[Tensor]
    memory: list[int]  # of the results
    location: str

    @property
    def name(self) -> str:
        """The op, also of its variants on lists and in place."""
        return self.full_name.strip("_").removeprefix("foreach_")

    @property
    def inputs(self) -> list[Tensor]:
        """The floating inputs."""
        return _measurable([*self.args, *self.kwargs.values()])

    def in_fp32(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the results, and those in float32 of the same inputs."""
        args, kwargs = map_tensors(self.args, _in_fp32), _mapped(self.kwargs, _in_fp32)
        returned = self.function(*args, **kwargs)
        exact_results = _results(self.full_name, args, kwargs, returned)
        return list(zip(self.results, exact_results, strict=False))

    def is_lossy(self, bad: Tensor) -> bool:
        """Whether zeros of its results are not zero in float32, where ``bad`` is true."""
        for low, high in self.in_fp32():
            is_lost = (low == 0) & (high != 0)
            if bool((is_lost & bad if is_lost.shape == bad.shape else is_lost).any()):
                return True
        return False

    def call(self) -> EarlierCall:
        """Returns the op as reports show it."""
        dtypes = [tuple([each.dtype for each in values]) for values in (self.inputs, self.results)]
        return EarlierCall(self.name, "", self.location, *dtypes)


class _Repeat(NamedTuple):
    """The ops of a step, and values that were not finite after it -> the first op that made them so."""

    ops: list[_StepOp]
    makers: dict[_Key, int]
    names: dict[int, _Key]  # memory -> the value in it


class _Start:
    """The state before a step, from which it can run again."""

    def __init__(
        self, optimizer: Optimizer, number: int, before: Mapping[int, Tensor], is_small: bool
    ) -> None:
        self.optimizer, self.is_small = optimizer, is_small
        self._number, self._before = number, before
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {
            each: {k: copy.copy(v) if type(v) in (list, dict) else v for k, v in state.items()}
            for each, state in optimizer.state.items()
            if isinstance(state, dict)
        }
        self._closures: list[tuple[Any, dict[int, Tensor]]] = []

    def count(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name_of: Callable[[Tensor], str],
        counts: UnderflowCounts,
    ) -> None:
        """Counts the values of parameters and states that the step's ops made zero or subnormal."""
        run = self.run(args, kwargs)
        parameters = {id(each): each for group in self._groups for each in group["params"]}
        for op in () if run is None else run.ops:
            if LOW_DTYPES.isdisjoint([each.dtype for each in op.results]):
                continue
            with aside([]):
                for memory, (low, high) in zip(op.memory, op.in_fp32(), strict=False):
                    parameter, state = run.names.get(memory, (0, "")) if run else (0, "")
                    if parameter and low.dtype in LOW_DTYPES:
                        name = name_of(parameters[parameter]) or self._number_of(
                            parameters[parameter]
                        )
                        counts.add_results(
                            (op.name, f"{name}: {state}" if state else name, op.location), low, high
                        )

    def _number_of(self, parameter: Tensor) -> str:
        """Returns a parameter's name in the optimizer, or its position."""
        for number, group in enumerate(self._groups):
            for position, each in enumerate(group["params"]):
                if each is parameter:
                    names = group.get("param_names")
                    return str(names[position]) if names else f"{position} of group {number}"
        return ""

    def _gradients(self) -> dict[int, Tensor]:
        parameters = [each for group in self._groups for each in group["params"]]
        return {id(p): p.grad.detach().clone() for p in parameters if p.grad is not None}

    def add_closure(self, result: Any) -> None:
        """Notes a closure's result and gradients."""
        loss = result.detach().clone() if isinstance(result, Tensor) else result
        self._closures.append((loss, self._gradients()))

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        only: Tensor | None = None,
        eps: float | None = None,
        *,
        upcast: bool = False,
    ) -> _Repeat | None:
        """Runs the step on copies: of one parameter, in float32, with another eps; None if that fails."""

        def copied(tensor: Tensor) -> Tensor:
            return _in_fp32(tensor.detach()) if upcast else tensor.detach().clone()

        def put(gradients: Mapping[int, Tensor]) -> None:
            for each in parameters:
                given = gradients.get(id(each))
                copies[id(each)].grad = None if given is None else copied(given)

        def closure() -> Any:
            result, gradients = next(outcomes, (None, {}))
            put(gradients)
            return result

        parameters = [each for group in self._groups for each in group["params"]]
        outcomes = iter(self._closures)
        copies: dict[int, Any] = {}
        with aside([]), passing_over(Exception):  # also the program's
            for each in (
                *parameters,
                *tensors_in([list(s.values()) for s in self._state.values()]),
            ):
                before = self._before.get(id(each))
                if before is None:
                    before = each.detach().nan_to_num() if is_floating(each) else each
                copies[id(each)] = copied(before).requires_grad_(each.requires_grad)
            originals = {id(copies[id(each)]): id(each) for each in parameters}
            put({} if self._closures else self._gradients())
            ops = _Ops({_memory(each): _OUTSIDE for each in copies.values() if _is_bad(each)})
            twin = self._twin(copies)
            for group in twin.param_groups:
                group.update(dict.fromkeys(group.keys() & _ON_LISTS, False))
                if only is not None:
                    group["params"] = [p for p in group["params"] if p is copies[id(only)]]
                if eps is not None and isinstance(group.get("eps"), float):
                    group["eps"] = eps
            step = type(twin).step
            while getattr(step, "hooked", False):  # without torch's wrapper, which calls hooks
                step = step.__wrapped__
            with ops:
                step(
                    twin,
                    *[closure if is_closure(each) else each for each in args[1:]],
                    **{n: closure if is_closure(each) else each for n, each in kwargs.items()},
                )
            makers: dict[_Key, int] = {}
            names: dict[int, _Key] = {}
            for parameter, state, tensor in _values(twin):
                key = names[_memory(tensor)] = originals[id(parameter)], state
                if (maker := ops.makers.get(_memory(tensor))) is not None:
                    makers[key] = min(maker, makers.get(key, maker))
            return _Repeat(ops.ops, makers, names)
        return None

    def _twin(self, copies: dict[int, Any]) -> Any:
        """Returns a copy of the optimizer with these tensors, by the originals' ids, and without hooks."""
        twin: Any = object.__new__(type(self.optimizer))
        given = vars(self.optimizer)
        own = {name: each for name, each in given.items() if name not in _OF_USERS}
        hooks = {name: type(each)() for name, each in own.items() if name.startswith("_optimizer_")}
        own = copy.deepcopy({name: own[name] for name in own.keys() - hooks.keys()}, copies)
        vars(twin).update(own, **hooks, param_groups=copy.deepcopy(self._groups, copies))
        twin.state = collections.defaultdict(dict, copy.deepcopy(self._state, copies))
        return twin

    # --- the fault -------------------------------------------------------------------------------

    def offence(
        self, value: _Value, name_of: Callable[[Tensor], str], location: str, remedy: str
    ) -> Offence:
        """Describes a value that is not finite after the step."""
        cls = type(self.optimizer)
        name = name_of(value.parameter) or self._number_of(value.parameter)
        return Offence(
            op=cls.__name__,
            module=name.rpartition(".")[0],
            site=f"{cls.__module__}.{cls.__qualname__}.step",
            location=location,
            kind="nan" if bits_of(exact(value.tensor)) & NAN else "inf",
            phase="optimizer",
            step=self._number,
            remedy=remedy,
            parameter=name,
            state=value.state,
        )

    def fault(
        self,
        values: Sequence[_Value],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name_of: Callable[[Tensor], str],
        location: str,
    ) -> Offence | None:
        """Returns the cause of values that are not finite; None if they were not so before it."""
        value, number = values[0], None
        only: Tensor | None = value.parameter
        for only in (value.parameter, None):  # less memory first
            run = self.run(args, kwargs, only)
            found = [] if run is None else [each for each in values if each.key in run.makers]
            if run is not None and found:
                # What the step has made goes before what it found.
                value = min(
                    found, key=lambda each: (run.makers[each.key] == _OUTSIDE, run.makers[each.key])
                )
                number = run.makers[value.key]
                break
        if number == _OUTSIDE:
            return None
        unknown = "unknown: the step could not be repeated"
        offence = self.offence(value, name_of, location, unknown)
        if run is None or number is None:
            return offence

        def helped(eps: float | None = None, *, upcast: bool = False) -> _Repeat | None:
            trial = self.run(args, kwargs, only, eps, upcast=upcast)
            return trial if trial is not None and value.key not in trial.makers else None

        op = run.ops[number]
        dtypes = [each.dtype for each in (*op.inputs, *op.results)]
        low = next((each for each in dtypes if each in LOW_DTYPES), None)
        in_fp32 = helped(upcast=True) if low else None
        cause = self._cause(run.ops[:number], op) if in_fp32 else None
        tried = [f"{offence.parameter} and its state in float32"] if in_fp32 else []
        least = torch.finfo(low or dtypes[0]).smallest_normal
        eps = max(_EPS, least)
        if any(
            type(e := group.get("eps")) is float and e < eps for group in self._groups
        ) and helped(eps):
            tried.append(f"eps={eps:.4g}")
        seen: Kind = "nan" if any(bits_of(exact(each)) & NAN for each in op.results) else "inf"
        if in_fp32 is not None:
            seen = "underflow" if cause else "overflow" if seen == "inf" else seen
        settings = [(key, each) for group in self._groups for key, each in group.items()]
        wrong = next(
            (f"{k} is {v}" for k, v in settings if type(v) is float and not math.isfinite(v)), ""
        )
        if wrong:
            remedy = f"none: {wrong}"
        elif tried:
            remedy = f"none in op lists, which optimizers don't read; tried: {', or '.join(tried)}"
        else:
            remedy = (
                f"none: {op.name} is not finite in float32, too{_where(op)}"
                if low
                else f"none: {op.name} ran in float32 already{_where(op)}; its inputs have to change"
            )
        inputs = [(f"input {n}", exact(each)) for n, each in enumerate(op.inputs)]
        results = [
            ("result", kept) for each in op.results if (kept := exact_finite(each, each._version))
        ]
        return dataclasses.replace(
            offence,
            op=op.name,
            location=op.location,
            through="" if op.location == location else location,
            kind=seen,
            context=tuple([each.call() for each in run.ops[max(0, number - _CONTEXT) : number]]),
            ranges=tuple([Range(name, *each) for name, each in (*inputs, *results)]),
            remedy=remedy,
            cause=None if cause is None else cause.call(),
        )

    @staticmethod
    def _cause(ops: Sequence[_StepOp], failed: _StepOp) -> _StepOp | None:
        """Returns the last op whose rounding made zeros where the failed one is not finite."""
        with aside([]):
            bad = ~_isfinite(next(filter(_is_bad, failed.results)))
            return next((each for each in reversed(ops) if each.is_lossy(bad)), None)
        return None


class _Ops(DispatchMode):
    """Records the ops of a step, and memory that is not finite -> the op that made it so."""

    def __init__(self, makers: dict[int, int]) -> None:
        super().__init__()
        self.makers = makers
        self.ops: list[_StepOp] = []
        self._kept: list[Any] = []  # so that no memory is used again
        self._number: int | None = None  # the op that made a Python number non-finite

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().rpartition("::")[2].partition(".")[0]
        values = [*args, *kwargs.values()]
        copies = map_tensors(args, Tensor.clone), _mapped(kwargs, Tensor.clone)
        maker = self._maker_of(values)
        returned = func(*args, **kwargs)
        self._kept.append((args, kwargs, returned))
        results = _results(name, args, kwargs, returned)
        is_bad = list(map(_is_bad, results))
        if any(is_bad) and maker is None:
            maker = len(self.ops)
            if any(type(each) is float and not math.isfinite(each) for each in leaves(values)):
                maker = self._number if self._number is not None else maker
                maker = _OUTSIDE if name.strip("_") in _WRITING else maker
        if name.strip("_") == "local_scalar_dense" and maker is not None:
            self._number = maker
        for each, bad in zip(results, is_bad, strict=True):
            if bad and maker is not None:
                self.makers[_memory(each)] = maker
            else:
                self.makers.pop(_memory(each), None)
        kept, memory = [each.clone() for each in results], list(map(_memory, results))
        self.ops.append(_StepOp(name, func, *copies, kept, memory, own_line(user_location())))
        return returned

    def _maker_of(self, values: Sequence[Any]) -> int | None:
        """Returns the op that made an input non-finite; None if all are finite."""
        bad = [each for each in _measurable(values) if _is_bad(each)]
        return self.makers.get(_memory(bad[0]), _OUTSIDE) if bad else None


def _results(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any
) -> list[Tensor]:
    """Returns the tensors that an op has written or made."""
    written = args[0] if name.endswith("_") else None
    found = {id(each): each for each in _measurable([written, kwargs.get("out"), returned])}
    return list(found.values())


def _measurable(values: Sequence[Any]) -> list[Tensor]:
    return list(filter(is_measurable, tensors_in(values)))


def _mapped(kwargs: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: map_tensors(value, function) for name, value in kwargs.items()}


def _in_fp32(tensor: Tensor) -> Tensor:
    return CAST[torch.float32](tensor) if tensor.dtype in LOW_DTYPES else tensor.clone()


def _memory(tensor: Tensor) -> int:
    return storage_of(tensor)._cdata if is_measurable(tensor) else 0


def _is_bad(tensor: Tensor) -> bool:
    return is_measurable(tensor) and bool(bits_of(exact(tensor)))


def _where(op: _StepOp) -> str:
    """Returns the inputs at the first element that is not finite, as text; ``""`` if these are not elementwise."""
    bad = next(filter(_is_bad, op.results))
    position = int((~_isfinite(bad)).flatten().nonzero()[0])
    with passing_over(RuntimeError):
        return (
            f", where {text_of([e.expand_as(bad).flatten()[position].item() for e in op.inputs])}"
        )
    return ""
