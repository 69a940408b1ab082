"""Wrappers with a layer that notifies observers.

Calls run in the wrapper from `making`, with any observers. Their descriptions come from the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.overrides import has_torch_function

from ..compute import COMPUTED
from ..observers import (
    PAUSED,
    Attached,
    CallTensors,
    OpCall,
    is_put_in_graph,
    number_in_graphs,
    put_in_graph,
    reading_kernels,
    user_line,
)
from ..ops import carrying, draws, facts
from ..policy import CastPolicy
from ..tensors import PLAIN_TENSORS, Args, Function, Kwargs, map_tensors, tensors_in
from ..torch_internals import (
    has_fake_tensors,
    is_any_autocast_enabled,
    is_graph_made,
    is_jit_tracing,
    run_when_traced,
    tracing_context,
    unseen,
)
from ..torch_state import (
    Phase,
    apart,
    is_below_dispatcher,
    is_off,
    is_off_by_program,
    open_regions,
    phase,
    place,
    state_of_random_numbers,
    unobserved_by,
    unobserved_casts,
    without_casts,
)
from .descriptions import Alike, Description, Descriptions, decoded, describe
from .inputs import cast_args, floating_inputs, written
from .making import cast_where_on, completed, is_overridden, make_wrapper, narrower, override
from .plan import CallPlan
from .retiring import Control, named_after

_DESCRIBED: Final = [field.name for field in dataclasses.fields(Description)]
_described: Final = operator.attrgetter(*_DESCRIBED)

#: The most distinct calls cached per site and kind of arguments.
_MOST_CALLS: Final = 1 << 14


def make_observed_wrapper(
    original: Function, plan: CallPlan, attached: tuple[Attached, ...]
) -> Function:
    """Returns a wrapper that runs calls like `make_wrapper`'s, and reports each call to observers."""
    made, paused = list[Function](), list[Function]()
    observers, in_graphs = frozenset(attached), any(each.graphs for each in attached)

    @run_when_traced
    def make() -> None:  # few of torch's functions are called while it is observed
        if not made:
            made.append(_ObservedCalls(original, plan, attached).run)

    @run_when_traced
    def make_paused() -> None:
        if not paused:
            paused.append(make_wrapper(original, plan) or original)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if control.forward is not None:
            return control.forward(*args, **kwargs)
        if PAUSED and not in_graphs and observers <= PAUSED:
            if not paused:
                make_paused()
            return paused[0](*args, **kwargs)
        if not made or is_dynamo_compiling():  # read once while it is traced, after it is made
            make()
        return made[0](*args, **kwargs)

    control = Control()
    return named_after(original, wrapper, plan.site.name, control)


class _ObservedCalls:
    """Makes the calls of an observed wrapper, and reports them."""

    def __init__(self, original: Function, plan: CallPlan, attached: tuple[Attached, ...]) -> None:
        self._original, self._plan, self._attached = original, plan, attached
        self._observers = frozenset(attached)
        carries = plan.site.op in carrying()
        self._of_every_op = tuple(
            [each for each in attached if each.every_op and (each.carries or not carries)]
        )
        is_listed = plan.decision.cast_policy is not CastPolicy.PASS
        self._told = attached if is_listed else self._of_every_op
        self._may_be_nested = "A" in plan.site.parameters.kinds.values()
        self._with_others = any(not each.values for each in attached)
        self._with_tensors = any(each.tensors for each in attached)
        self._with_casts = any(each.tensors and not each.graphs for each in attached)
        self._in_graphs = any(each.graphs for each in attached)
        self._is_timed = any(each.times for each in attached)
        self._reads_kernels = any(each.kernels for each in attached)
        self._is_conversion = plan.site.op in facts("converting")
        self._descriptions = Descriptions(plan)
        self._complete = completed(original, plan)
        # Observers know torch's nodes.
        self._inner = make_wrapper(original, plan, fuses=False) or self._complete
        self._narrowed = narrower(
            original, plan, lambda others: _ObservedCalls(original, others, attached).run
        )
        self._cast = functools.partial(_amid_call, cast_where_on, plan)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Makes any call of the wrapper, and reports it unless it is a part of another one."""
        plan, is_traced, is_on = self._plan, is_dynamo_compiling(), True
        is_paused = PAUSED and self._observers <= PAUSED
        if is_paused and not is_traced and tracing_context() is None:  # graphs keep compiled calls
            return self._inner(*args, **kwargs)
        if is_traced or open_regions:
            if (kind := unobserved_by()) is not None:
                is_uncast = kind is without_casts and not has_torch_function(args)
                return (self._complete if is_uncast else self._inner)(*args, **kwargs)
            is_on = not is_off()
            if not (is_on or is_traced) and _here.is_in_call:
                return self._inner(*args, **kwargs)  # a part of a call that is reported
        if (
            has_torch_function(args)
            or ((kwargs or self._may_be_nested) and is_overridden(args, kwargs))
        ) and plan.site.is_overridable:
            return override(self._original, plan.site.name, self._cast, args, kwargs)
        if is_below_dispatcher() or not (is_on or (self._of_every_op and is_off_by_program())):
            return self._inner(*args, **kwargs)
        narrowed = self._narrowed if open_regions and is_on else None
        if narrowed is not None and (others := narrowed()) is not None:
            return others(*args, **kwargs)
        if is_traced:
            return self._run_traced(args, kwargs, is_on=is_on)
        alike, before = self._descriptions.find(args, kwargs, is_on=is_on)
        # Conversions during a call are hmpx's own, which a mode passes to their names.
        if alike.found is None or (self._is_conversion and _here.is_in_call):
            return self._inner(*args, **kwargs)
        return self._run_eager(alike, alike.found, before, args, kwargs, is_on=is_on)

    def _run_traced(self, args: Args, kwargs: Kwargs, *, is_on: bool) -> Any:
        """Makes a call that torch.compile traces, whose sizes may be symbols."""
        plan = self._plan
        before = floating_inputs(plan, *decoded(plan, args, kwargs))
        if not before:
            return self._inner(*args, **kwargs)  # there is nothing to decide
        found = describe(plan, before, args, kwargs, is_on=is_on)
        given = _given(plan, args, kwargs) if self._in_graphs else None
        result = self._inner(*args, **kwargs)
        types = found.input_dtypes, found.cast_dtypes, found.device_type, found.dtype
        fields = (*types, found.cast_policy, found.reason)  # as constants
        dtypes = [each for tensor in tensors_in([result]) for each in (tensor.dtype, None)]
        number = self._tell_traced(fields, tuple(dtypes), is_on)
        if given:
            put_in_graph(number, *given, result)
        return result

    @run_when_traced
    def _tell_traced(self, fields: tuple[Any, ...], outputs: tuple[Any, ...], is_on: bool) -> int:
        here = (place().path, *user_line(sys._getframe(1)), phase())
        call = self._call({}, Description(*fields), here, outputs)
        self._tell(call, is_on=is_on)
        return number_in_graphs(call, self._attached) if self._in_graphs else -1

    def _run_eager(  # all there is to one call
        self,
        alike: Alike,
        found: Description,
        before: list[torch.Tensor],
        args: Args,
        kwargs: Kwargs,
        *,
        is_on: bool,
    ) -> Any:
        plan, tensors, seconds = self._plan, None, None
        cast_bytes = alike.cast_bytes
        kernels: tuple[torch.dtype, ...] = ()
        if self._with_tensors and not (is_graph_made() or has_fake_tensors()):
            functions = self._complete, self._inner
            tensors = _tensors(plan, *functions, args, kwargs, casts=self._with_casts)
        is_kept = self._in_graphs and tensors is None and is_put_in_graph()
        given = _given(plan, args, kwargs) if is_kept else None
        began = _now(found.device_type) if self._is_timed else 0.0
        was_in_call = _here.is_in_call
        was_legalized, COMPUTED.is_legalized = COMPUTED.is_legalized, False
        COMPUTED.is_on_hardware = False
        try:
            _here.is_in_call = True
            if self._reads_kernels and not (is_graph_made() or is_jit_tracing()):
                with reading_kernels() as read:
                    result = self._inner(*args, **kwargs)
                kernels = tuple(read)
            else:
                result = self._inner(*args, **kwargs)
        finally:
            _here.is_in_call = was_in_call
            is_legalized, COMPUTED.is_legalized = COMPUTED.is_legalized, was_legalized
            is_format = not isinstance(found.dtype, (torch.dtype, type(None)))
            is_legalized = is_legalized or (is_format and not COMPUTED.is_on_hardware)
        if cast_bytes and plan.selects:
            cast_bytes = result.nbytes  # without the table
        if is_on and is_any_autocast_enabled():
            found = self._descriptions.as_run(found, args, kwargs, result)
        here = (place().path, *user_line(sys._getframe(2)), phase())
        outputs = _outputs_of(result)
        if self._is_timed:
            seconds = _now(found.device_type) - began
        rest = cast_bytes, is_legalized, kernels, seconds
        call = self._call(alike.calls, found, here, outputs, *rest)
        if tensors is not None:
            tensors = dataclasses.replace(tensors, result=result)
        values = (before, args, kwargs, result) if self._of_every_op else None
        self._tell(call, tensors, values, is_on=is_on)
        if given:
            call = self._call({}, found, here, outputs)
            put_in_graph(number_in_graphs(call, self._attached), *given, result)
        return result

    def _call(  # noqa: PLR0917  # all there is to one call
        self,
        calls: dict[Any, OpCall],
        found: Description,
        here: _Spot,
        outputs: tuple[Any, ...],
        cast_bytes: int = 0,
        is_legalized: bool = False,
        kernels: tuple[torch.dtype, ...] = (),
        seconds: float | None = None,
    ) -> OpCall:
        """Returns the record of a call, for observers: the same object for each call like it, unless it is timed."""
        key = found, *here, outputs, cast_bytes, is_legalized, kernels
        may_be_known = seconds is None
        try:
            if may_be_known and (known := calls.get(key)) is not None:
                return known
        except TypeError:  # sizes are symbols
            may_be_known = False
        module, path, line, phase_here = here
        call = OpCall(
            op=self._plan.site.op,
            site=self._plan.site.name,
            function=self._original,
            **dict(zip(_DESCRIBED, _described(found), strict=True)),
            output_dtypes=outputs[::2],
            cast_bytes=cast_bytes,
            module=module,
            location=f"{path}:{line}" if path else "",
            phase=phase_here,
            seconds=seconds,
            legalized=is_legalized,
            kernels=kernels,
        )
        if may_be_known:
            if len(calls) >= _MOST_CALLS:
                calls.clear()
            calls[key] = call
        return call

    def _tell(
        self,
        call: OpCall,
        tensors: CallTensors | None = None,
        values: tuple[Any, ...] | None = None,
        *,
        is_on: bool,
    ) -> None:
        present = self._told if is_on else self._of_every_op
        if PAUSED:
            present = tuple([each for each in present if not each.values or each not in PAUSED])
        if values is not None:
            _tell_values(present, call, values)
        if self._with_others:
            with apart():
                for each in present:
                    if not each.values:
                        each.tell(call, tensors if tensors is None else _own(tensors))


@unseen
def _tell_values(present: tuple[Attached, ...], call: OpCall, values: tuple[Any, ...]) -> None:
    for each in present:
        if each.values:
            each.observer(call, *values)


is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _ObservedState(threading.local):
    """The state of a thread."""

    is_in_call = False  # an observed call: conversions during it are not the program's


_here: Final = _ObservedState()


def _amid_call(function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function``, a part of an observed call: its casts are not the program's."""
    if is_dynamo_compiling():
        return function(*args, **kwargs)
    was_in_call = _here.is_in_call
    try:
        _here.is_in_call = True
        return function(*args, **kwargs)
    finally:
        _here.is_in_call = was_in_call


#: The module that makes a call, the file and the line of the program, and the phase.
_Spot = tuple[str, str, int, Phase]


def _outputs_of(result: Any) -> tuple[Any, ...]:
    if type(result) in PLAIN_TENSORS and not result.is_nested:
        return result.dtype, result.shape
    found = list[Any]()
    for each in tensors_in([result]):
        found += (each.dtype, None if each.is_nested else each.shape)
    return tuple(found)


def _now(device_type: str) -> float:
    """Returns a clock's time in seconds after synchronizing the device."""
    if device_type not in ("cpu", "meta"):
        torch.accelerator.synchronize()
    return time.perf_counter()


def _tensors(
    plan: CallPlan, complete: Function, inner: Function, args: Args, kwargs: Kwargs, *, casts: bool
) -> CallTensors:
    """Returns the tensors of a call before it runs, without its result; without ``casts`` those after casts neither."""
    state = (
        state_of_random_numbers([*args, *kwargs.values()])
        if draws(plan.site.op) or plan.emulation is not None
        else None
    )
    with apart():
        args, kwargs, writes = _given(plan, args, kwargs)
        cast, cast_kwargs = cast_args(plan, args, kwargs) if casts else (args, kwargs)
    if state is not None:
        state.restore()  # stochastic rounding may have drawn numbers

    def again(function: Function, *args: Any, **kwargs: Any) -> Any:
        if state is None:
            return function(*args, **kwargs)
        now = state_of_random_numbers([*args, *kwargs.values()])
        state.restore()
        try:
            return function(*args, **kwargs)
        finally:
            now.restore()

    def run(*args: Any, **kwargs: Any) -> Any:
        with apart():
            return again(complete, *args, **kwargs)

    def run_cast(*args: Any, **kwargs: Any) -> Any:
        with apart(), unobserved_casts():
            return again(inner, *args, **kwargs)

    return CallTensors(args, kwargs, cast, cast_kwargs, run, run_cast, writes=writes)


def _given(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, bool]:
    writes = bool(plan.site.writes) or written(plan, args, kwargs) is not None
    return (*(_copied(args, kwargs) if writes else (args, kwargs)), writes)


def _own(tensors: CallTensors) -> CallTensors:
    """Returns tensors for one observer: copies, to which it may write."""
    if not tensors.writes:
        return tensors
    given, given_kwargs = _copied(tensors.given, tensors.given_kwargs)
    return dataclasses.replace(tensors, given=given, given_kwargs=given_kwargs)


def _copied(args: Args, kwargs: Mapping[str, Any]) -> tuple[Args, Kwargs]:
    copied = {name: map_tensors(value, torch.Tensor.clone) for name, value in kwargs.items()}
    return map_tensors(args, torch.Tensor.clone), copied
