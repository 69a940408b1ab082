"""The rules about single kernels: sums, updates, scales and casts in a low type.

Kernels show what isn't a call of an op: gradients that add up, copies, casts of integers, ranges.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comparing import is_readable, may_read
from ..errors import passing_over, raised_here
from ..observers import Kernels, OpCall, spared, user_location
from ..patches import SCALERS
from ..places import with_callers
from ..tensors import LOW_DTYPES, floating_in, map_tensors, short_name, tensors_in
from ..torch_internals import (
    call_in,
    current_graph_task,
    dispatch_modes,
    in_compiled_call,
    unseen,
)
from ..torch_state import spot
from .findings import LEAST, TIMES, Finding
from .kernel_traits import CASTS, COUNTS, RANGES, SCALES, SUMS, UNDOING, traits_of
from .lint_integers import KEEP, Found, merged, most_counted, rounded, whole_numbers
from .lint_trace import SAMPLE, LintedCall, Trace, memory

#: Values read to see whether it is worth while to read more.
_FEW: Final = 64

#: Values of a sum that are followed, and the fewest terms that show a loss, or that the sum stalls.
_FOLLOWED: Final = 1 << 14
_FEWEST_TERMS: Final = 16
_FEWEST_STALLED: Final = 3

#: Values kept from before a write: of a few targets, as a call has them.
_MOST_WRITTEN: Final = 8

#: Decays are greater, and lose so much.
_LEAST_DECAY: Final = 0.9
_FEWEST_DECAYS: Final = 3
_LEAST_LOST: Final = 0.1

#: Kernels that scale gradients, perhaps by hand, and torch's functions that limit them.
_SCALING: Final = frozenset(
    {"amp_foreach_non_finite_check_and_unscale", "mul", "div", "foreach_mul", "foreach_div"}
)
_CLIPPING: Final = "torch.nn.utils.clip_grad"


def _computed(func: Any, args: Any, kwargs: Any, dtype: torch.dtype, at: int = -1) -> Tensor:
    """Returns the result of a kernel, or the values that it wrote, perhaps ``at`` a place, in another dtype."""

    def given(each: Tensor) -> Tensor:
        return each.detach().to(dtype, copy=True) if each.is_floating_point() else each

    copies = map_tensors(tuple(args), given)
    kwargs = {**kwargs, "dtype": dtype} if kwargs.get("dtype") else kwargs
    results = tensors_in([func(*copies, **kwargs), copies[0]])
    return results[0] if at < 0 else tensors_in([copies[at]])[0]


def _may_switch() -> bool:
    return current_graph_task() < 0 and not in_compiled_call()


class _Sum(NamedTuple):
    """A total that terms were added to, and what it would be: in float64 and float32. Part of its values."""

    rounded: Tensor
    exact: Tensor
    wide: Tensor
    terms: int = 0
    place: str = ""
    task: int = -1  # the backward that added to it last


class LintedKernels(Kernels):
    """Checks kernels; notes copies, and values before they are written to, for the rules about calls.

    Attributes:
        written: ``id`` of a tensor -> the tensor, and its values before the last write.
        stepped: Memory of the parameters of an optimizer whose step runs, or None.
        trained: Memory of parameters that a step has begun to update.
        has_drawn: Whether the step has drawn random numbers.
        has_underflown: Whether gradients in float16 became zero.
        stepped_on: Memory that the step has written to.
        low: Memory of low parameters -> these, and
        before: their values before the step.
        flops: Operations of the call that runs; in a backward, of its last kernel.
    """

    def __init__(
        self,
        add: Callable[[Iterable[Finding]], None],
        trace: Callable[[], Trace],
        parameters: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Takes functions: one gets the findings, the others return the last calls and the parameters."""
        super().__init__()
        self._add, self._trace, self._parameters = add, trace, parameters
        self._depth = self._thread = 0
        self._is_on = False
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.stepped: frozenset[int] | None = None
        self.has_drawn = self.has_underflown = False
        self.flops, self._flops_task = 0, -1
        self.stepped_on, self.trained = set[int](), set[int]()
        self.low: dict[int, Tensor] = {}
        self.before: dict[int, Tensor] = {}
        self._undone: dict[int, Tensor] = {}  # what was subtracted from these, or these from it
        self._stuck: dict[int, str] = {}  # memory -> line of an update
        self._overwritten: dict[int, tuple[Tensor, Finding]] = {}  # memory -> values before
        self._adding = set[Any]()  # kernels known to add a term to what they write to
        self._scaled = set[int]()  # backwards of scaled losses
        self._is_scaled = False  # gradients are, now, but for those
        self._unscaled = set[int]()  # in this memory
        self._sums: MutableMapping[Tensor, _Sum] = WeakTensorKeyDictionary()

    def __enter__(self) -> LintedKernels:
        self._depth, self._thread = dispatch_modes(), threading.get_ident()
        self._is_on = True
        super().__enter__()
        return self

    def forget(self) -> None:
        """Drops what it knows of tensors."""
        self.written.clear()
        self._sums.clear()

    def pause(self, *, at_end: bool = False) -> None:
        """Leaves the mode, unless it is paused, belongs to another thread, or is below one of the program.

        Nor in a backward or a compiled function, at whose end torch has its dispatch keys back, without the mode.
        """
        if self._is_on and self._is_at(self._depth + 1) and (at_end or _may_switch()):
            self._is_on = False
            self.__exit__(None, None, None)

    def resume(self) -> None:
        """Enters the mode again where it was."""
        if not self._is_on and self._is_at(self._depth) and _may_switch():
            self.__enter__()

    def _is_at(self, depth: int) -> bool:
        return threading.get_ident() == self._thread and dispatch_modes() == depth

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = self._begin_kernel(func, args, kwargs)
        result = call_in(self, func, args, kwargs)
        if (flops := traits_of(func).flops) is not None:
            self._count(flops, args, kwargs, result)
        if before is not None:
            self._end_kernel(func, args, kwargs, result, *before)
        return result

    @spared
    def _count(
        self, flops: Callable[..., int], args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        known, task = self.flops, current_graph_task()
        is_of_call = task == self._flops_task < 0  # those of a backward have calls only in part
        self.flops = (known if is_of_call else 0) + flops(*args, **kwargs, out_val=result)
        self._flops_task = task

    @spared
    def _begin_kernel(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Tensor], list[Tensor]] | None:
        """Returns copies of the tensors that a kernel will write to: averages by place, others; None if it is not checked."""
        traits = traits_of(func)
        self.note(func, args, kwargs)
        if self.stepped is not None:
            self.has_drawn |= traits.is_random
            written = tensors_in(args[:1]) if traits.writes else []
            self.stepped_on.update(map(memory, written))
            if traits.name.strip("_") in UNDOING:
                self._note_undone(args)
        if SCALERS and traits.name == "mul" and (task := current_graph_task()) >= 0:
            scales = {each.get_scale() for each in list(SCALERS)}
            given = tensors_in(args[1:2]) if may_read() else []
            factors = [each for each in given if not each.dim() and is_readable(each)]
            self._scaled |= {task for each in factors if each.item() in scales}
            self._is_scaled |= task in self._scaled
        elif self._is_scaled and args and traits.name[-1] == "_" and current_graph_task() < 0:
            self._check_limited(func, args)
        given_places = [n for n in traits.statistics if n < len(args)]  # defaults are left out
        places = [n for n in given_places if getattr(args[n], "dtype", None) in LOW_DTYPES]
        if places and may_read() and all(is_readable(args[n]) for n in places):
            return {n: args[n].clone() for n in places}, []
        if not traits.is_checked or (traits.writes and not may_read()):
            return None
        return {}, self._before(args) if traits.writes else []

    @spared
    def _end_kernel(  # noqa: PLR0917  # all there is to one kernel
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        averages: dict[int, Tensor],
        before: list[Tensor],
    ) -> None:
        if averages:
            with passing_over(RuntimeError):  # it may have no kernel for float64
                self._check_averages(func, args, kwargs, averages)
            return
        traits = traits_of(func)
        results = tensors_in(args[:1] if traits.writes else [result])
        low = [n for n, each in enumerate(results) if each.dtype in LOW_DTYPES or traits.is_noted]
        if low and may_read() and all(map(is_readable, results)):
            for number in low:
                own: Any = args
                if traits.writes and isinstance(args[0], (list, tuple)):
                    own = [[of[number]] if isinstance(of, (list, tuple)) else of for of in args]
                self._check(func, own, kwargs, results[number], before[number] if before else None)

    def _report(self, code: str, func: Any, found: Found | None, remedy: str = KEEP) -> bool:
        if found is not None:
            name, module = traits_of(func).name.strip("_"), spot()[1]
            self._add([Finding(code, name, module, user_location(), *found, remedy)])
        return found is not None

    # --- for the rules about calls -------------------------------------------------------------------

    @unseen
    def _before(self, args: tuple[Any, ...]) -> list[Tensor]:
        """Returns copies of the tensors that a kernel will write to; [] if none are needed."""
        targets = tensors_in(args[:1])
        if not all(map(is_readable, targets)) or any(
            memory(each) in (self.stepped or ()) for each in targets
        ):
            return []
        trace = self._trace()
        is_known = any(trace.producer(each) for each in floating_in(args) if is_readable(each))
        if not is_known and all(each.dtype not in LOW_DTYPES for each in targets):
            is_low = any(each.dtype in LOW_DTYPES for each in floating_in(args[1:2]))
            is_back = any(memory(each) in self._overwritten for each in targets)
            return [each.clone() for each in targets] if is_low or is_back else []  # masters
        if not is_known and self.stepped is not None:  # an optimizer's state: a look is enough
            return [_part(each).clone() for each in targets]
        for each in targets:
            for of in (each, each._base if is_known else None):  # items are written to as views
                if of is not None and (of is each or of.numel() <= SAMPLE):
                    self.written[id(of)] = of, trace.before_write(of)
        found = [self.written[id(each)][1] for each in targets]
        while len(self.written) > _MOST_WRITTEN:  # gradients, which no call will take
            del self.written[next(iter(self.written))]
        return found

    def take_written(self) -> dict[int, Tensor]:
        """Returns the values before the last writes, and forgets them."""
        found, self.written = self.written, {}
        return {key: copy for key, (_, copy) in found.items()}

    def _note_copy(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        trace, inputs = self._trace(), floating_in(args)
        is_known = traits_of(func).is_random or any(map(trace.producer, inputs))
        if not all(map(is_readable, inputs)) or not is_known:
            return
        written = {key: copy for key, (_, copy) in self.written.items() if key == id(result)}
        op = traits_of(func).name
        # Torch would copy a new tensor that is held, and the program's modes would see that.
        if traits_of(func).is_random:
            op, result = "random", result.detach()
        place = op, str(func), func, "PASS", "", None, (), (), ()
        call = OpCall(*place, result.device.type, 0, spot()[1], user_location())
        trace.add(LintedCall(call, inputs, args, kwargs, result, written))

    @unseen
    def _note_undone(self, args: tuple[Any, ...]) -> None:
        """Notes differences from the values that a parameter had before the step, or has now and was rounded to."""
        for pair in zip(*[tensors_in([each]) for each in args[:2]], strict=False):
            for place, before in self.before.items():
                now = self.low[place].detach()
                for each, other in (pair, pair[::-1]):
                    if _is_same(each, before):
                        self._undone[place] = other.detach().clone()
                    elif _is_rounded_to(now, other) and _is_same(each, now.float()):
                        self._undone[place] = now.clone()

    def undone(self, parameter: Tensor) -> str | None:
        """Returns the line that updated a parameter if the step took the old values from the new, to learn what was lost."""
        place = memory(parameter)
        known = self._undone.get(place)
        is_undone = known is not None and _is_same(known, parameter)
        return self._stuck.get(place, "") if is_undone else None

    def end_step(self) -> None:
        """Forgets what an optimizer's step has done."""
        self.stepped, self.has_drawn, self.stepped_on = None, False, set()
        self.low, self.before, self._undone, self._stuck = {}, {}, {}, {}
        self._is_scaled, self._unscaled = False, set()

    # --- the rules -----------------------------------------------------------------------------------

    @unseen
    def _check(
        self, func: Any, args: Any, kwargs: Any, result: Tensor, before: Tensor | None
    ) -> None:
        """Checks a kernel, or a part of one for a list of tensors; ``before`` are the values before a write."""
        name, writes, *_ = traits_of(func)
        if traits_of(func).is_noted:
            self._note_copy(func, args, kwargs, result)
        if name == "copy_" and result.dtype in LOW_DTYPES and args[1].dtype is torch.float32:
            self.trained.add(memory(args[1]))  # a master
        if name == "copy_" and before is not None:
            self._check_truncated(func, args[1], before, result)
        if result.dtype not in LOW_DTYPES or not result.numel():
            return
        if result.dtype is torch.float16 and current_graph_task() >= 0 and not result.any():
            self.has_underflown |= bool(_computed(func, args, kwargs, torch.float64).any())
        if name in RANGES:
            exact = _computed(func, args, kwargs, torch.float64)
            found = rounded(exact, result.dtype) or merged(exact, result)
            self._report("HP102", func, found)
        elif name in CASTS:
            source = args[1 if writes else 0]
            if before is not None and source.is_floating_point():
                self._check_copied(func, source, result, before)
            elif not source.is_floating_point() and result.dim():
                self._report("HP102", func, rounded(source.expand(result.shape), result.dtype))
            elif result.dtype is torch.float16 and (task := current_graph_task()) >= 0:
                self._check_unscaled(func, source, task)
            elif not writes:
                self._check_decays(func, source, result)
        else:
            if before is not None:
                args = [[before] if isinstance(args[0], list) else before, *args[1:]]
                if self.stepped is not None and not (
                    torch.Tag.pointwise in func.tags
                    and (_part(before) == _part(result)).double().mean() > 0.5
                ):
                    return  # a state that moves
            self._check_sum(func, args, kwargs, result, before is not None)

    def _check_unscaled(self, func: Any, gradient: Tensor, task: int) -> None:
        """HP110: a backward without the scaler that other losses have."""
        if task in self._scaled or not any(each.is_enabled() for each in list(SCALERS)):
            return
        sizes = gradient[gradient != 0].abs()
        if (share := (sizes < torch.finfo(torch.float16).tiny).double().mean().item()) > LEAST:
            evidence = f"{share:.0%} of the gradients are subnormal in fp16: the scaler has not scaled this loss"
            self._report("HP110", func, (evidence, share, None), "scale it, too")

    @unseen
    def _check_limited(self, func: Any, args: Any) -> None:
        """HP110: gradients that are clipped before they are unscaled."""
        name = traits_of(func).name.strip("_")
        places = {memory(each.grad) for each in self._parameters() if each.grad is not None}
        targets = {memory(each) for each in tensors_in(args[:1]) if is_readable(each)} & places
        if not targets:
            return
        if all(of.f_globals.get("__name__") != _CLIPPING for of in with_callers(sys._getframe(1))):
            self._unscaled |= targets if name in _SCALING else set()
            return
        factors = [each for each in tensors_in(args[1:]) if may_read() and is_readable(each)]
        is_limited = "clamp" in name or any(bool((each < 1).any()) for each in factors)
        scale = next((each.get_scale() for each in list(SCALERS) if each.is_enabled()), 1.0)
        if is_limited and scale != 1 and not targets <= self._unscaled:
            evidence = f"gradients are clipped while they are scaled by {scale:,.0f}"
            remedy = "call scaler.unscale_(optimizer) before"
            self._report("HP110", func, (evidence, 1.0, None), remedy)

    def _check_truncated(self, func: Any, source: Tensor, before: Tensor, target: Tensor) -> None:
        """HP107: trained float32 values that a copy of them in a low type overwrites, and that don't come back."""
        place, low = memory(target), source.dtype
        if place in self._overwritten and _is_same(target, self._overwritten[place][0]):
            del self._overwritten[place]
        is_trained = before.dtype is torch.float32 and place in self.trained
        if low not in LOW_DTYPES or not is_trained or not _is_rounded_to(source, before):
            return
        lost = (before != source).double().mean().item()
        if lost > 0.5:
            evidence = f"{lost:.0%} of the float32 values are overwritten by those rounded to {short_name(low)}: updates are lost"
            remedy, name = (
                "keep the float32 values from step to step",
                traits_of(func).name.strip("_"),
            )
            found = "HP107", name, spot()[1], user_location(), evidence, lost, None, remedy
            self._overwritten[place] = before, Finding(*found)

    def report_overwritten(self) -> None:
        """Reports float32 values that were not restored until now."""
        self._add(found for _, found in self._overwritten.values())
        self._overwritten = {}

    def _check_decays(self, func: Any, source: Tensor, result: Tensor) -> None:
        """HP111: numbers close to 1 whose distance from 1 a cast changes, as of a decay."""
        values = source.detach().reshape(-1)[:SAMPLE]
        few = values[:_FEW] if source.dtype is torch.float32 else values[:0]
        if len(few) < _FEWEST_DECAYS or not all(_LEAST_DECAY < each < 1 for each in few.tolist()):
            return
        values = values.double()
        if (values.diff() > 0).all() or (values.diff() < 0).all():  # as tables do
            exact, found = 1 - values, 1 - result.detach().reshape(-1)[:SAMPLE].double()
            error = ((found - exact).norm() / exact.norm()).item()
            evidence = f"numbers from {values.min():.5g} to {values.max():.5g}: their distances from 1 change in {short_name(result.dtype)}"
            self._report("HP111", func, (evidence, error, 0.0) if error > _LEAST_LOST else None)

    @unseen
    def _check_averages(self, func: Any, args: Any, kwargs: Any, olds: dict[int, Tensor]) -> None:
        """HP104: running averages whose roundings add up."""
        for at, old in olds.items():
            new, known = args[at].detach(), self._sums.get(args[at])
            if known is None or not torch.equal(known.rounded, old):
                known = _Sum(old, old.double(), old.float())
            exact, wide = (
                _computed(func, [*args[:at], start, *args[at + 1 :]], kwargs, start.dtype, at)
                for start in (known.exact, known.wide)
            )
            self._sums[args[at]] = _Sum(new.clone(), exact, wide, known.terms + 1)
            if self._report_sum(func, known.terms + 1, new, exact, wide):
                return

    def _check_scattered(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> bool:
        """HP104: whether a low type lost terms that one call adds to few elements."""
        has_switch = any(each.name == "accumulate" for each in func._schema.arguments)
        is_off = has_switch and not any(each is True for each in (*args, *kwargs.values()))
        if not traits_of(func).scatters or is_off:
            return False
        exact, wide = (
            _computed(func, args, kwargs, each) for each in (torch.float64, torch.float32)
        )
        terms = max(each.numel() for each in floating_in(args))
        return self._report_sum(func, terms, result, exact, wide)

    def _check_copied(self, func: Any, source: Tensor, result: Tensor, before: Tensor) -> None:
        """HP107: a parameter that is computed from itself, and copied."""
        if self._trace().updates(source, result, user_location()):
            found = self._trace().values(source, "deep")
            exact = (source if found is None else found).detach().double().expand(result.shape)
            self._report_stalled(func, (before, exact, result), 0, result)

    def _check_sum(
        self, func: Any, args: Any, kwargs: Any, result: Tensor, is_written: bool
    ) -> None:
        """Finds the total to which a kernel adds, if it does; ``args`` are those before a write."""
        traits, at = traits_of(func), 0 if is_written and traits_of(func).adds else None
        if not is_written and traits.name in SUMS:
            terms = [n for n, each in enumerate(args[:2]) if isinstance(each, Tensor)]
            totals = [n for n in terms if args[n].shape == result.shape and len(terms) > 1]
            # the larger term is the total, unless one is known
            at = max(
                totals, key=lambda n: (args[n] in self._sums, args[n].abs().max()), default=None
            )
        elif not is_written and traits.name in SCALES and args[0] in self._sums:  # as averages do
            at = 0
        given = func, args, kwargs, result
        if len(tensors_in(args)) == 1 and self._check_count(*given):
            return
        try:
            total = None if at is None else (at, result if is_written else args[at])
            is_found = self._check_scattered(*given) or (
                total is not None and self._check_total(func, args, kwargs, total, result)
            )
        except raised_here(RuntimeError):  # no such kernel
            return
        if not is_found:
            self._check_count(*given)

    def _check_count(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> bool:
        """HP102: whole numbers that are added up; whether some change."""
        name, most = traits_of(func).name.strip("_"), most_counted(result.dtype)
        found = whole_numbers(result) if name in COUNTS else None
        if found is None or not found.numel() or found.abs().max() < most:
            return False
        given = tensors_in(args)
        if name == "mul" and len(given) > 1:
            return False  # squares of large values are whole
        numbers = [] if name in {"sum", "cumsum"} else args[1:2]
        given += [torch.tensor(each) for each in numbers if isinstance(each, (int, float))]
        values = [whole_numbers(each) for each in given]
        sizes = [
            math.inf if each is None or not each.numel() else each.abs().max().item()
            for each in values
        ]
        if min(sizes) > (1 if name == "sum" else most) or max(sizes) == math.inf:
            return False  # larger numbers of a low type are all whole
        exact = _computed(func, args, kwargs, torch.float64)
        return self._report("HP102", func, rounded(exact, result.dtype, result))

    def _check_total(
        self, func: Any, args: Any, kwargs: Any, total: tuple[int, Tensor], result: Tensor
    ) -> bool:
        """HP104: whether a total loses most of its terms, or many roundings have changed it.

        ``total`` is its place in ``args``, and the tensor that has or had the values there.
        """
        at, name = total[0], traits_of(func).name
        sizes, now = {each.numel() for each in tensors_in(args)}, result
        if torch.Tag.pointwise in func.tags and sizes <= {result.numel(), len(_part(result)), 1}:
            args, now = map_tensors(tuple(args), _part), _part(result)
        before, place = tensors_in([args[at]])[0], user_location()
        known = self._sums.get(total[1])
        if (
            known is None
            or (name in SUMS and known.place != place)  # layers that add to a stream, not a loop
            or not torch.equal(known.rounded, before)
        ):
            known = _Sum(before, before.double(), before.float(), 0, place)
        place = known.place if name in SCALES else place

        def after(start: Tensor) -> Tensor:
            given = [*args]
            given[at] = [start] if isinstance(args[at], list) else start
            return _computed(func, given, kwargs, start.dtype)

        was, step = before.double(), after(before.double())
        adds = func in self._adding
        if not adds:
            alone = after(torch.zeros_like(was))
            adds = bool(alone.any()) and not torch.equal(alone, step)  # unlike `mul_` and `fill_`
            self._adding |= {func} if adds else set()
        exact = after(known.exact) if known.terms else step
        wide, task = after(known.wide), current_graph_task()
        terms = known.terms + (adds and (task < 0 or task != known.task))  # `.grad`, not a fan-out
        if terms:
            self._sums[result] = _Sum(now.detach().clone(), exact, wide, terms, place, task)
        is_scaled = not adds and total[1] is result  # as by a decay
        stalled = (before, step, now), terms * adds, total[1]
        if (is_scaled or len(tensors_in(args)) > 1) and self._report_stalled(func, *stalled):
            return True
        return adds and terms >= _FEWEST_TERMS and self._report_sum(func, terms, now, exact, wide)

    def _report_stalled(
        self, func: Any, values: tuple[Tensor, Tensor, Tensor], terms: int, total: Tensor
    ) -> bool:
        """HP107 for a parameter, HP104 for other totals, of which most terms are lost.

        ``values`` are those before, those in float64, and those now.
        """
        before, exact, now = values
        moves = exact != before
        lost, remedied = (
            (moves & (each == before)).sum().item() / max(1, moves.sum().item())
            for each in (now, exact.float())
        )
        if lost <= 0.5:
            return False
        place, known = memory(total), filter(is_readable, self._parameters())
        is_trained = isinstance(total, nn.Parameter) or place in map(memory, known)
        if not is_trained and terms < _FEWEST_STALLED:
            return False
        terms_, what = ("updates", "weights") if is_trained else ("terms", "sum")
        low = short_name(total.dtype)
        evidence = f"{lost:.0%} of the {terms_} are at most half an ulp of the {low} {what}"
        effects, code = (evidence, lost, remedied), "HP107" if is_trained else "HP104"
        if is_trained:
            self._stuck[place] = user_location()
        return self._report(code, func, effects, f"keep the {what} in float32")

    def _report_sum(
        self, func: Any, terms: int, found: Tensor, exact: Tensor, wide: Tensor
    ) -> bool:
        """HP104 if the error is more than one rounding's, and float32's far smaller."""
        error, remedied = (
            ((each.double() - exact).norm() / exact.norm()).item() for each in (found, wide)
        )
        if not max(LEAST, TIMES * remedied) < error < math.inf:
            return False
        evidence = f"{terms:,} terms were added up in {short_name(found.dtype)}"
        return self._report("HP104", func, (evidence, error, remedied), "keep the sum in float32")


def _part(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:_FOLLOWED]


def _is_rounded_to(low: Tensor, wide: Tensor) -> bool:
    """Whether ``low`` has the rounded values of ``wide``, which differ."""
    is_alike = wide.dtype is torch.float32 and wide.shape == low.shape and is_readable(wide)
    return is_alike and _is_same(wide.to(low.dtype), low) and not torch.equal(wide, low.float())


def _is_same(one: Tensor, other: Tensor) -> bool:
    is_alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return is_alike and is_readable(one) and torch.equal(one, other)
