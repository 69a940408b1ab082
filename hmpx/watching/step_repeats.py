"""Runs a copy of an optimizer's step again, op by op, from the state before it."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import passing_over
from ..observers import user_location
from ..places import own_line
from ..tensors import CAST, LOW_DTYPES, is_floating, leaves, map_tensors, tensors_in
from ..torch_internals import DispatchMode
from .effects import stays_within
from .offences import EarlierCall
from .records import bits_of, is_measurable, storage_of
from .slots import exact
from .trials import aside

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

#: Attributes of an optimizer that are not copied as they are.
_OF_USERS: Final = ("param_groups", "state", "step", "zero_grad")

#: Settings by which an optimizer of torch's computes on lists of tensors, to about the same values.
_ON_LISTS: Final = ("foreach", "fused")

#: In place of the position of an op: the values were not finite before the step.
_OUTSIDE: Final = -1

#: A parameter's id, and the name of its state, ``""`` for itself.
Key = tuple[int, str]


class StepValue(NamedTuple):
    """A tensor of an optimizer."""

    parameter: Tensor
    state: str
    tensor: Tensor

    @property
    def key(self) -> Key:
        """Identifies it, also among copies."""
        return id(self.parameter), self.state


def step_values(optimizer: Optimizer) -> list[StepValue]:
    """Returns the parameters and the floating tensors of their state."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(StepValue(parameter, "", parameter))
            own = optimizer.state.get(parameter, {})
            for state, value in own.items() if isinstance(own, dict) else ():
                found += [StepValue(parameter, state, each) for each in tensors_in([value])]
    return [each for each in found if is_measurable(each.tensor)]


def is_closure(value: Any) -> bool:
    """Whether an argument of a step is the program's forward and backward."""
    return callable(value) and not isinstance(value, (nn.Module, Optimizer))


class StepOp(NamedTuple):
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


class StepRepeat(NamedTuple):
    """The ops of a step, and values that were not finite after it -> the first op that made them so."""

    ops: list[StepOp]
    makers: dict[Key, int]
    names: dict[int, StepValue]  # memory -> the value in it, of the original parameter


class StepStart:
    """The state before a step, from which it can run again."""

    def __init__(
        self, optimizer: Optimizer, number: int, before: Mapping[int, Tensor], is_small: bool
    ) -> None:
        """Keeps gradients, too, unless a step of torch's, which doesn't write to them, follows."""
        self.optimizer, self.is_small = optimizer, is_small
        self.number, self._before = number, before
        self.args: Sequence[Any] = ()
        self.kwargs: Mapping[str, Any] = {}
        self.has_effects = False  # a step may change more than its optimizer, as far as known
        self.groups = [dict(group) for group in optimizer.param_groups]
        self._state = {
            each: {k: copy.copy(v) if type(v) in (list, dict) else v for k, v in state.items()}
            for each, state in optimizer.state.items()
            if isinstance(state, dict)
        }
        self._closures: list[tuple[Any, dict[int, Tensor]]] = []
        self._given = self._gradients() if is_small and not self.is_torchs else {}

    @property
    def is_torchs(self) -> bool:
        """Whether torch wrote the step."""
        return type(self.optimizer).__module__.startswith("torch.")

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Returns a parameter's gradient before the step, or of its last closure."""
        return (
            self._given.get(id(parameter)) if self._given and not self._closures else parameter.grad
        )

    def name_of(self, parameter: Tensor) -> str:
        """Returns a parameter's name in the optimizer, or its position."""
        for number, group in enumerate(self.groups):
            for position, each in enumerate(group["params"]):
                if each is parameter:
                    names = group.get("param_names")
                    return str(names[position]) if names else f"{position} of group {number}"
        return ""

    def _gradients(self) -> dict[int, Tensor]:
        parameters = [each for group in self.groups for each in group["params"]]
        return {id(p): p.grad.detach().clone() for p in parameters if p.grad is not None}

    def add_closure(self, result: Any) -> None:
        """Notes a closure's result and gradients."""
        loss = result.detach().clone() if isinstance(result, Tensor) else result
        self._closures.append((loss, self._gradients()))

    def run(
        self, only: Tensor | None = None, eps: float | None = None, *, upcast: bool = False
    ) -> StepRepeat | None:
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

        parameters = [each for group in self.groups for each in group["params"]]
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
            originals = {id(copies[id(each)]): each for each in parameters}
            put({} if self._closures else self._given or self._gradients())
            ops = _Ops({_memory(each): _OUTSIDE for each in copies.values() if is_bad(each)})
            twin = self._twin(copies)
            own = [each for name, each in vars(twin).items() if not name.startswith("_optimizer_")]
            self.has_effects = not stays_within(self.optimizer, own)
            if self.has_effects:
                return None
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
                    *[closure if is_closure(each) else each for each in self.args[1:]],
                    **{n: closure if is_closure(each) else each for n, each in self.kwargs.items()},
                )
            makers: dict[Key, int] = {}
            names: dict[int, StepValue] = {}
            for parameter, state, tensor in step_values(twin):
                value = StepValue(originals[id(parameter)], state, tensor)
                names[_memory(tensor)] = value
                if (maker := ops.makers.get(_memory(tensor))) is not None:
                    makers[value.key] = min(maker, makers.get(value.key, maker))
            return StepRepeat(ops.ops, makers, names)
        return None

    def _twin(self, copies: dict[int, Any]) -> Any:
        """Returns a copy of the optimizer with these tensors, by the originals' ids, and without hooks."""
        twin: Any = object.__new__(type(self.optimizer))
        given = vars(self.optimizer)
        own = {name: each for name, each in given.items() if name not in _OF_USERS}
        hooks = {name: type(each)() for name, each in own.items() if name.startswith("_optimizer_")}
        own = copy.deepcopy({name: own[name] for name in own.keys() - hooks.keys()}, copies)
        vars(twin).update(own, **hooks, param_groups=copy.deepcopy(self.groups, copies))
        twin.state = collections.defaultdict(dict, copy.deepcopy(self._state, copies))
        return twin


def stepped_in_fp32(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """Returns a parameter after the step that is about to run, all in float32; None if that can't be known."""
    alone: Any = object.__new__(type(optimizer))
    mine = [each for each in optimizer.param_groups if any(p is parameter for p in each["params"])]
    groups = [{**each, "params": [parameter]} for each in mine]
    state = {each: own for each, own in optimizer.state.items() if each is parameter}
    vars(alone).update(vars(optimizer), param_groups=groups, state=state)
    repeat = StepStart(alone, 0, {}, is_small=True).run(upcast=True)
    found = [each for each in repeat.names.values() if not each.state] if repeat else []
    return found[0].tensor if found else None


class _Ops(DispatchMode):
    """Records the ops of a step, and memory that is not finite -> the op that made it so."""

    def __init__(self, makers: dict[int, int]) -> None:
        super().__init__()
        self.makers = makers
        self.ops: list[StepOp] = []
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
        bad_ones = list(map(is_bad, results))
        if any(bad_ones) and maker is None:
            maker = len(self.ops)
            if any(type(each) is float and not math.isfinite(each) for each in leaves(values)):
                maker = self._number if self._number is not None else maker
                maker = _OUTSIDE if name.strip("_") in _WRITING else maker
        if name.strip("_") == "local_scalar_dense" and maker is not None:
            self._number = maker
        for each, bad in zip(results, bad_ones, strict=True):
            if bad and maker is not None:
                self.makers[_memory(each)] = maker
            else:
                self.makers.pop(_memory(each), None)
        kept, memory = [each.clone() for each in results], list(map(_memory, results))
        self.ops.append(StepOp(name, func, *copies, kept, memory, own_line(user_location())))
        return returned

    def _maker_of(self, values: Sequence[Any]) -> int | None:
        """Returns the op that made an input non-finite; None if all are finite."""
        bad = [each for each in _measurable(values) if is_bad(each)]
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


def is_bad(tensor: Tensor) -> bool:
    """Whether any value is not finite; waits for its device."""
    return is_measurable(tensor) and bool(bits_of(exact(tensor)))
