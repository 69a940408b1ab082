"""The rules about single kernels: whole numbers that a low type does not hold, and sums in a low type.

Kernels show what isn't a call of an op: gradients that add up, copies, casts of integers, ranges.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comparing import Origins, is_readable, may_read
from ..errors import raised_here
from ..observers import Kernels, OpCall, user_location
from ..tensors import LOW_DTYPES, floating_in, leaves, map_tensors, short_name, tensors_in
from ..torch_internals import call_in, current_graph_task, dispatch_modes, unseen
from ..torch_state import spot
from .findings import Finding
from .lint_trace import CONVERTING, COPIES, DIFFERENCES, LintedCall, Trace, memory

#: Values read where reading all would be slow, and to see whether it is worth while.
_SAMPLE: Final = 1 << 16
_FEW: Final = 64

#: Values of a sum that are followed, and the fewest terms that show a loss, or that the sum stalls.
_FOLLOWED: Final = 1 << 14
_FEWEST_TERMS: Final = 16
_FEWEST_STALLED: Final = 3

#: Values kept from before a write: of a few targets, as a call has them.
_MOST_WRITTEN: Final = 8

#: No position or counter is greater; masks are.
_MOST_COUNTED: Final = 2.0**40

#: Ops that compute with integers and low tensors; others take integers as indices.
_ARITHMETIC: Final = CONVERTING | DIFFERENCES | {"mul", "rmul", "imul", "truediv", "div", "pow"}

#: Kernels that make ranges; those that add up; those that make whole numbers of whole numbers; casts.
_RANGES: Final = frozenset({"arange", "linspace"})
_SUMS: Final = frozenset({"add", "sub", "rsub", "lerp"})
_COUNTS: Final = _SUMS | {"mul", "cumsum", "sum"}
_SCALES: Final = frozenset({"mul", "div"})
_CASTS: Final = frozenset({"_to_copy", "copy_"})

_KEEP: Final = "keep them in float32"
_KEEP_SUM: Final = "keep the sum in float32"


def rounded_integers(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP102: integers that a cast to a low type changes."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), seen.low)
    if low is None:
        return
    for each in leaves([*seen.args, *seen.kwargs.values()]):
        if (
            not isinstance(each, Tensor)
            or each.dtype in (*LOW_DTYPES, torch.bool)
            or not each.dim()
        ):
            continue
        is_index = not each.is_floating_point() and seen.call.op not in _ARITHMETIC
        if each.is_complex() or is_index:
            continue
        remedy = _KEEP if seen.moves else f"{seen.line()} in the fp32 list"
        if found := _rounded(each, low):
            yield Finding("HP102", *seen.place, *found, remedy)
            return


def _rounded(
    exact: Tensor, low: torch.dtype, found: Tensor | None = None
) -> tuple[str, float, float] | None:
    """Returns the evidence and the effects if the values are whole numbers, and ``low``, or ``found``, has others."""
    values = whole_numbers(exact)
    if values is None or not values.numel():
        return None
    given = values.to(low) if found is None else found.reshape(-1)[:_SAMPLE]
    changed, remedied = (
        (each.double() != values).double().mean().item() for each in (given, values.float())
    )
    if not changed:
        return None
    evidence = (
        f"{changed:.0%} of the whole numbers up to {values.abs().max().item():,.0f} change in "
        f"{short_name(low)}, which counts to {_most(low):,}"
    )
    return evidence, changed, remedied


def _merged(exact: Tensor, found: Tensor) -> tuple[str, float, float] | None:
    """Likewise if different numbers are equal in a low type."""
    count, low, wide = (len(torch.unique(each)) for each in (exact, found, exact.float()))
    evidence = f"{count:,} numbers are {low:,} different ones in {short_name(found.dtype)}"
    return (evidence, 1 - low / count, 1 - wide / count) if low < count else None


def whole_numbers(tensor: Tensor) -> Tensor | None:
    """Returns the values in float64, without masks; None unless all are whole numbers."""
    values = tensor.detach().reshape(-1)
    few = values[:_FEW].double().tolist()  # they tell most tensors
    if any(each % 1 for each in few if abs(each) < _MOST_COUNTED):
        return None
    sample = values[:_SAMPLE].double()
    sample = sample[sample.abs() < _MOST_COUNTED]
    return sample if (sample == sample.round()).all() else None


def _most(low: torch.dtype) -> int:
    """Returns the number to which a dtype counts."""
    return round(2 / torch.finfo(low).eps)


class _KernelTraits(NamedTuple):
    """What is known about a kernel."""

    name: str
    writes: bool = False  # to its first argument, and no other
    is_random: bool = False
    is_checked: bool = False
    adds: bool = False  # perhaps


@functools.cache
def _traits(func: Any) -> _KernelTraits:
    schema, name = getattr(func, "_schema", None), getattr(func, "overloadpacket", func).__name__
    if schema is None:
        return _KernelTraits(name)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    written = [n for n, e in enumerate(schema.arguments) if e.alias_info and e.alias_info.is_write]
    writes = torch.Tag.inplace in func.tags and written == [0] and not is_random
    adds = torch.Tag.pointwise in func.tags or "add" in name or name.startswith("_foreach")
    is_named = name in _RANGES | _CASTS | _COUNTS | _SCALES | COPIES
    is_checked = writes or (is_named and not written)  # to run it again would write to an `out=`
    return _KernelTraits(name, writes, is_random, is_checked, adds)


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
        has_drawn: Whether the step has drawn random numbers.
        stepped_on: Memory that the step has written to.
    """

    def __init__(
        self, add: Callable[[Iterable[Finding]], None], trace: Callable[[], Trace]
    ) -> None:
        """Takes the function that gets the findings, and one that returns the last calls."""
        super().__init__()
        self._add, self._trace = add, trace
        self._depth = self._thread = 0
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.stepped: frozenset[int] | None = None
        self.has_drawn = False
        self.stepped_on = set[int]()
        self._adding = set[Any]()  # kernels known to add a term to what they write to
        self._sums: MutableMapping[Tensor, _Sum] = WeakTensorKeyDictionary()

    def __enter__(self) -> LintedKernels:
        self._depth, self._thread = dispatch_modes(), threading.get_ident()
        super().__enter__()
        return self

    def forget(self) -> None:
        """Drops what it knows of tensors."""
        self.written.clear()
        self._sums.clear()

    def pause(self) -> None:
        """Leaves the mode, unless it is paused, belongs to another thread, or is below one of the program."""
        if self._is_at(self._depth + 1):
            self.__exit__(None, None, None)

    def resume(self) -> None:
        """Enters the mode again where it was."""
        if self._is_at(self._depth):
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
        kwargs, traits = kwargs or {}, _traits(func)
        self.note(func, args, kwargs)
        if self.stepped is not None:
            self.has_drawn |= traits.is_random
            self.stepped_on |= (
                {memory(each) for each in tensors_in(args[:1])} if traits.writes else set()
            )
        if not traits.is_checked or (traits.writes and not may_read()):
            return call_in(self, func, args, kwargs)
        before = self._before(args) if traits.writes else []
        result = call_in(self, func, args, kwargs)
        results = tensors_in(args[:1] if traits.writes else [result])
        checked = [
            (number, each)
            for number, each in enumerate(results)
            if each.dtype in LOW_DTYPES or traits.name in COPIES
        ]
        if checked and may_read() and all(map(is_readable, results)):
            for number, each in checked:
                own: Any = args
                if traits.writes and isinstance(args[0], (list, tuple)):
                    own = [[of[number]] if isinstance(of, (list, tuple)) else of for of in args]
                self._check(func, own, kwargs, each, before[number] if before else None)
        return result

    def _report(
        self, code: str, func: Any, found: tuple[str, float, float] | None, remedy: str = _KEEP
    ) -> bool:
        if found is not None:
            name, module = _traits(func).name.strip("_"), spot()[1]
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
            return []
        if not is_known and self.stepped is not None:  # an optimizer's state: a look is enough
            return [_part(each).clone() for each in targets]
        for each in targets:
            for of in (each, each._base if is_known else None):  # items are written to as views
                if of is not None and (of is each or of.numel() <= _SAMPLE):
                    self.written[id(of)] = of, trace.before_write(of)
        found = [self.written[id(each)][1] for each in targets]
        while len(self.written) > _MOST_WRITTEN:  # gradients, which no call will take
            del self.written[next(iter(self.written))]
        return found

    def take_written(self) -> dict[int, Tensor]:
        """Returns the values before the last writes, and forgets them."""
        found = {key: copy for key, (_, copy) in self.written.items()}
        self.written.clear()
        return found

    def _note_copy(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        trace, inputs = self._trace(), floating_in(args)
        if not all(map(is_readable, inputs)) or not any(map(trace.producer, inputs)):
            return
        written = {key: copy for key, (_, copy) in self.written.items() if key == id(result)}
        place = _traits(func).name, str(func), func, "PASS", "", None, (), (), ()
        call = OpCall(*place, result.device.type, 0, spot()[1], user_location())
        trace.add(LintedCall(call, inputs, args, kwargs, result, written))

    # --- the rules -----------------------------------------------------------------------------------

    @unseen
    def _check(
        self, func: Any, args: Any, kwargs: Any, result: Tensor, before: Tensor | None
    ) -> None:
        """Checks a kernel, or a part of one for a list of tensors; ``before`` are the values before a write."""
        name, writes, *_ = _traits(func)
        if name in COPIES:
            self._note_copy(func, args, kwargs, result)
        if result.dtype not in LOW_DTYPES or not result.numel():
            return
        if name in _RANGES:
            exact = func(*args, **{**kwargs, "dtype": torch.float64})
            found = _rounded(exact, result.dtype) or _merged(exact, result)
            self._report("HP102", func, found)
        elif name in _CASTS:
            source = args[1 if writes else 0]
            if not source.is_floating_point() and result.dim():
                self._report("HP102", func, _rounded(source.expand(result.shape), result.dtype))
        else:
            self._check_sum(func, args, kwargs, result, before)

    def _check_sum(
        self, func: Any, args: Any, kwargs: Any, result: Tensor, before: Tensor | None
    ) -> None:
        total: tuple[int, Tensor] | None = None
        if before is not None and self.stepped is not None:
            stays = torch.Tag.pointwise in func.tags and before == _part(result)
            if stays is False or stays.double().mean() <= 0.5:
                return
        if before is not None and _traits(func).adds:
            args = [[before] if isinstance(args[0], list) else before, *args[1:]]
            total = 0, result
        elif before is None and _traits(func).name in _SUMS:
            terms = [n for n, each in enumerate(args[:2]) if isinstance(each, Tensor)]
            totals = [n for n in terms if args[n].shape == result.shape]
            if len(terms) > 1 and totals:  # the larger term is the total, unless one is known
                at = max(totals, key=lambda n: (args[n] in self._sums, args[n].abs().max()))
                total = at, args[at]
        elif (
            before is None and _traits(func).name in _SCALES and args[0] in self._sums
        ):  # as averages do
            total = 0, args[0]

        def counts() -> bool:
            return self._check_count(func, args, kwargs, result)

        if len(tensors_in(args)) == 1 and counts():
            return
        try:
            is_found = total is not None and self._check_total(func, args, kwargs, total, result)
        except raised_here(RuntimeError):  # no such kernel
            return
        if not is_found:
            counts()

    def _check_count(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> bool:
        """HP102: whole numbers that are added up; whether some change."""
        name, most = _traits(func).name.strip("_"), _most(result.dtype)
        found = whole_numbers(result) if name in _COUNTS else None
        if found is None or not found.numel() or found.abs().max() < most:
            return False
        values = [whole_numbers(each) for each in tensors_in(args)]
        if name == "mul" and len(values) > 1:
            return False  # squares of large values are whole
        numbers = [] if name in {"sum", "cumsum"} else args[1:2]
        values += [torch.tensor([each]) for each in numbers if isinstance(each, (int, float))]
        sizes = [
            each.abs().max().item()
            if each is not None and each.numel() and whole_numbers(each) is not None
            else math.inf
            for each in values
        ]
        if min(sizes) > (1 if name == "sum" else most) or max(sizes) == math.inf:
            return False  # larger numbers of a low type are all whole
        kwargs = {**kwargs, "dtype": torch.float64} if "dtype" in kwargs else kwargs
        exact = tensors_in([func(*map_tensors(tuple(args), Tensor.double), **kwargs)])[0]
        return self._report("HP102", func, _rounded(exact, result.dtype, result))

    def _check_total(
        self, func: Any, args: Any, kwargs: Any, total: tuple[int, Tensor], result: Tensor
    ) -> bool:
        """HP104: whether a total loses most of its terms, or many roundings have changed it.

        ``total`` is its place in ``args``, and the tensor that has or had the values there.
        """
        at, name = total[0], _traits(func).name
        sizes, now = {each.numel() for each in tensors_in(args)}, result
        if torch.Tag.pointwise in func.tags and sizes <= {result.numel(), len(_part(result)), 1}:
            args, now = map_tensors(tuple(args), _part), _part(result)
        before, place = tensors_in([args[at]])[0], user_location()
        known = self._sums.get(total[1])
        if (
            known is None
            or (name in _SUMS and known.place != place)  # layers that add to a stream, not a loop
            or not torch.equal(known.rounded, before)
        ):
            known = _Sum(before, before.double(), before.float(), 0, place)
        place = known.place if name in _SCALES else place

        def after(start: Tensor) -> Tensor:
            def in_its_type(each: Tensor) -> Tensor:
                return each.detach().to(start.dtype) if each.is_floating_point() else each

            given = [*map_tensors(tuple(args), in_its_type)]
            given[at] = [start.clone()] if isinstance(given[at], list) else start.clone()
            return tensors_in([func(*given, **kwargs), given[at]])[0]

        was, step = before.double(), after(before.double())
        moves = step != was
        lost = ((now.double() == was) & moves).sum().item() / max(1, moves.sum().item())
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
        if not adds:
            return False
        low = short_name(result.dtype)
        if lost > 0.5 and terms >= _FEWEST_STALLED and len(tensors_in(args)) > 1:
            kept = after(before.float()) == before.float()
            remedied = (kept & moves).sum().item() / moves.sum().item()
            evidence = f"{lost:.0%} of the terms are at most half an ulp of the {low} sum"
            is_trained = isinstance(result, nn.Parameter) and result.grad is not None
            code = "HP107" if is_trained else "HP104"
            return self._report(code, func, (evidence, lost, remedied), _KEEP_SUM)
        if terms >= _FEWEST_TERMS and exact.norm():
            error, remedied = (
                ((each.double() - exact).norm() / exact.norm()).item() for each in (now, wide)
            )
            if error > torch.finfo(result.dtype).eps:
                evidence = f"{terms:,} terms were added up in {low}"
                return self._report("HP104", func, (evidence, error, remedied), _KEEP_SUM)
        return False


def _part(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:_FOLLOWED]
