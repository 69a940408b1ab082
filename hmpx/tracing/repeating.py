"""`invariance`: runs a model on a batch and on one row of it, and repeats each call."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import arguments
from ..errors import OptionError, noted, raised_here, said_by
from ..inputs import Steps
from ..observers import Attached, CallTensors, OpCall
from ..patching import Patch, apply, undo
from ..renames import renamed
from ..session import about_run, is_converted, observable, restoring
from ..tensors import CAST, LOW_DTYPES, copied, map_all, tensors_in, tensors_of
from ..torch_internals import BATCH_CHECK, uncompiled
from ..torch_state import state_of_random_numbers, unchanged
from .batches import Arguments, BatchedCall, OneRow, Rows, UnknownRowsError, as_values, rows_of
from .variations import BY_ROW, Difference, Invariance, Variation, difference

_Site: TypeAlias = tuple[str, str, str]
_Run: TypeAlias = Callable[[Arguments], list[Tensor]]

#: Line options tried as remedies -> the dtype that the call computes in.
_LINES: Final = {"fp32": torch.float32, "accumulate=float64": torch.float64}

_RANDOM: Final = "by definition: draws random numbers for the whole batch"

#: How often a call is timed.
_TIMED: Final = 5


@restoring
@renamed()
def invariance(
    model: Callable[..., Any], inputs: Any, *, rows: int = 8, threads: Sequence[int] | None = None
) -> Invariance:
    """Finds the calls of a model whose bits depend on the batch, on the number of threads, or on the run.

    The model runs on one row of the batch and on all rows, without gradients. Each call of the
    second run is repeated on its own inputs in several ways. The model, the RNG state and the
    number of threads are unchanged. Works with and without a conversion, and under torch.autocast.

    Args:
        model: The model, or any function. A compiled one runs uncompiled.
        inputs: Its arguments ([inputs](#inputs)): tensors whose first dimension is the batch, at least two rows. Tensors with
            another first dimension are the same for each batch.
        rows: How many rows are repeated alone, at most, in each call.
        threads: Numbers of threads to try on the CPU. Default: 1, 2 and all.

    Raises:
        OptionError: No tensor has two rows, ``rows`` or ``threads`` is not a positive whole number,
            or the model returns a generator or a coroutine.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).double()
        >>> found = hmpx.invariance(model, torch.randn(4, 8, dtype=torch.float64))
        >>> found.calls, found.by_definition
        (2, ())
    """
    steps = Steps("invariance", model)
    rows = arguments.whole("rows", rows, 1)
    tried = [arguments.whole("threads", each, 1) for each in threads or (1, 2, os.cpu_count() or 1)]
    size = next((each.shape[0] for each in tensors_of(inputs) if each.dim()), 0)
    if size < 2:
        raise OptionError("invariance takes a batch of at least two rows, its first dimension")

    def one_row(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and tensor.shape[0] == size
        return tensor[-1:] if has_rows else tensor

    small = _OneRowRun()
    large = _Repeats(small.calls, size, rows, sorted(set(tried)))
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(unchanged(model, inputs))
        for context in (observable(), uncompiled(), torch.no_grad()):
            stack.enter_context(context)
        # Batch norms in training must run on one row, too.
        stack.callback(undo, apply([Patch(F, BATCH_CHECK, lambda size: None)]))
        try:
            _run(steps, map_all(inputs, one_row), small.observe)
        except Exception as error:
            raise noted(error, "Raised by the run on one row of the batch") from None
        state.restore()
        _run(steps, inputs, large.observe)
    return large.report()


def _run(steps: Steps, inputs: Any, observer: Callable[..., None]) -> None:
    given = copied(inputs)
    with Attached(observer, tensors=True, every_op=True):
        steps.forward(given)


class _OneRowRun:
    """The observer of the run on one row: keeps its calls by their sites."""

    def __init__(self) -> None:
        self.calls: dict[_Site, list[OneRow]] = defaultdict(list)

    def observe(self, call: OpCall, tensors: CallTensors | None) -> None:
        if tensors is not None:
            self.calls[_site(call)].append(OneRow.of(tensors))


def _site(call: OpCall) -> _Site:
    return call.site, call.module, call.location


@dataclass(frozen=True)
class _Way:
    """A way to repeat a call.

    Attributes:
        kind: A key of `Variation.found`.
        says: The beginning of the sentence.
        arguments: The arguments of the repeated call.
        index: The rows of the batch to compare; empty for whole results.
        threads: The number of threads; 0 for the current number.
    """

    kind: str
    says: str
    arguments: Arguments
    index: Sequence[int] = ()
    threads: int = 0


class _Repeated:
    """A call on the whole batch, to be run again in other ways.

    Attributes:
        call: The call.
        given: Its arguments.
        results: Its results.
        batched: The call with its rows; None if they are unknown, or it has none.
    """

    def __init__(self, call: OpCall, tensors: CallTensors) -> None:
        self.call, self._tensors = call, tensors
        self.given: Arguments = tensors.given, tensors.given_kwargs
        self.results = tensors_in([tensors.result])
        self.batched: BatchedCall | None = None
        self._low = call.dtype if call.dtype in LOW_DTYPES else None
        self._rows: list[Rows | None] = []  # of each result

    def find_rows(self, one: OneRow, size: int) -> None:
        """Finds the rows by the same call on one row; raises `UnknownRowsError`."""
        batched, ones = BatchedCall(self.given, one.arguments, size), tensors_in([one.result])
        if len(self.results) != len(ones):
            raise UnknownRowsError("the number of its results follows the batch")
        self._rows = [rows_of(a, b, size) for a, b in zip(self.results, ones, strict=True)]
        self.batched = batched if batched.has_rows else None

    def run(self, given: Arguments) -> list[Tensor]:
        """Returns the results on other arguments, as the program computes them."""
        call, tensors = self.call, self._tensors
        args, kwargs = as_values(given, Tensor.clone) if tensors.writes else given
        if call.cast_policy == "PASS" and isinstance(call.dtype, torch.dtype):
            with torch.autocast(call.device_type or "cpu", self._low):
                return tensors_in([call.function(*args, **kwargs)])
        function = tensors.run if call.cast_policy == "PASS" else tensors.run_cast
        return tensors_in([function(*args, **kwargs)])

    def differs(
        self, way: _Way, run: _Run | None = None, expected: list[Tensor] | None = None
    ) -> Difference | None:
        """Returns how the results differ from those on the whole batch; ``expected`` if ``run`` computes them."""
        run, expected = run or self.run, expected or self.results
        now = torch.get_num_threads()
        try:
            if way.threads:
                torch.set_num_threads(way.threads)
            found = run(way.arguments)
        finally:
            if way.threads:
                torch.set_num_threads(now)
        if way.index:
            same = [*range(len(way.index))]
            pairs = [*zip(expected, found, self._rows, strict=True)]
            expected = [rows.of(each, way.index) if rows else each for each, _, rows in pairs]
            found = [rows.of(each, same) if rows else each for _, each, rows in pairs]
        return difference(expected, found)

    def by_definition(self, row: int, size: int) -> str:
        """Returns why another batch gives another result, whatever the arithmetic; ``""`` if it does not."""
        if None in self._rows or self.batched is None:
            return "by definition: its result combines the rows"
        if self.draws():
            return _RANDOM
        # The same shapes, with the row in all places
        index = [row] * size
        found = self.run(self.batched.with_rows(index))
        pairs = [*zip(self.results, found, self._rows, strict=True)]
        differs = difference(
            *([rows.of(each[side], index) for *each, rows in pairs if rows] for side in (0, 1))
        )
        return "by definition: uses the values of other rows" if differs else ""

    def draws(self) -> bool:
        """Whether the call draws random numbers; the caller restores the RNG state."""
        args, kwargs = as_values(self.given, Tensor.clone) if self._tensors.writes else self.given
        values = [*args, *kwargs.values()]
        before = state_of_random_numbers(values)
        self.call.function(*args, **kwargs)
        after = state_of_random_numbers(values)
        pairs = zip(before.states, after.states, strict=True)
        return any(not torch.equal(a[0], b[0]) for (_, a), (_, b) in pairs)

    # --- remedies ------------------------------------------------------------------------------

    def remedies(self, failed: Sequence[_Way], size: int) -> dict[str, float]:
        """Returns the time of the call with each remedy, in multiples of its own; NaN if it still differs."""
        own = _seconds(lambda: self.run(self.given))
        found = {}
        for line, dtype in _LINES.items():
            if line == "fp32" and self._low is None:
                continue
            run = self._in_dtype(dtype, self._low if line != "fp32" else None)
            try:
                expected = run(self.given)
                differ = any(self.differs(each, run, expected) for each in failed)
            except raised_here(RuntimeError, TypeError, ValueError):  # no such kernel
                continue
            found[line] = math.nan if differ else _seconds(lambda: run(self.given)) / own  # noqa: B023
        if self.batched is not None and not {"threads", "repeated"} & {
            each.kind for each in failed
        }:
            alone = [self.batched.with_rows([row]) for row in range(size)]
            found[BY_ROW] = _seconds(lambda: [self.run(each) for each in alone]) / own
        return found

    def _in_dtype(self, dtype: torch.dtype, low: torch.dtype | None) -> _Run:
        """Returns the call computed in a dtype, with inputs and results rounded as before unless it is fp32."""
        tensors, outputs = self._tensors, [each.dtype for each in self.results]

        def cast(tensor: Tensor) -> Tensor:
            if tensor.dtype not in CAST:
                return tensor.clone() if tensors.writes else tensor
            return (tensor if low is None else tensor.to(low)).to(dtype, copy=tensors.writes)

        def run(given: Arguments) -> list[Tensor]:
            args, kwargs = as_values(given, cast)
            found = tensors_in([tensors.run(*args, **kwargs)])
            if dtype is torch.float32:
                return found
            # Lines leave complex results as they are.
            pairs = zip(found, outputs, strict=True)
            return [each.to(own) if own.is_floating_point else each for each, own in pairs]

        return run


class _Repeats:
    """The observer of the run on all rows: repeats each call."""

    def __init__(
        self, calls: dict[_Site, list[OneRow]], batch: int, rows: int, threads: Sequence[int]
    ) -> None:
        self._calls, self._batch, self._threads = calls, batch, threads
        self._next: Counter[_Site] = Counter()
        last, count = batch - 1, min(rows, batch)
        self._alone = [last - last * each // max(count - 1, 1) for each in range(count)][::-1]
        self._found: dict[tuple[str, str, str, bool], Variation] = {}
        self._skipped: Counter[str] = Counter()
        self._count = 0

    def report(self) -> Invariance:
        """Returns the places found."""
        every = self._found.values()
        return Invariance(
            tuple(each for each in every if not each.by_definition),
            tuple(each for each in every if each.by_definition),
            dict(self._skipped),
            self._count,
            is_converted(),
            about_run(),
        )

    def observe(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Repeats one call, and restores the RNG state."""
        if tensors is None or not tensors_in([tensors.result]):
            return
        self._count += 1
        state = state_of_random_numbers([*tensors.given, *tensors.given_kwargs.values()])
        try:
            found = self._repeated(call, tensors)
        except raised_here(Exception) as error:  # the program must go on
            found = None
            self._skipped[f"an error in the repeated call: {said_by(error)}"] += 1
        finally:
            state.restore()
        if found is not None:
            key = call.op, call.module, call.location, bool(found.by_definition)
            known = self._found.get(key)
            self._found[key] = replace(known, calls=known.calls + 1) if known else found

    def _repeated(self, call: OpCall, tensors: CallTensors) -> Variation | None:
        place, repeated = (call.op, call.module, call.location), _Repeated(call, tensors)
        again = difference(repeated.results, repeated.run(repeated.given))
        if again is not None:
            why = _RANDOM if repeated.draws() else ""
            return Variation(*place, {"repeated": f"differs when repeated: {again}"}, why)
        ways = [*self._batch_ways(repeated), *self._thread_ways(repeated)]
        found: dict[str, str] = {}
        for way in ways:
            if way.kind in found or (differing := repeated.differs(way)) is None:
                continue
            found[way.kind] = f"{way.says}: {differing}"
            if way.kind == "alone" and (why := repeated.by_definition(way.index[0], self._batch)):
                return Variation(*place, found, why)
        if not found:
            return None
        remedies = None
        if (*place, False) not in self._found:
            failed = [way for way in ways if way.kind in found]
            remedies = repeated.remedies(failed, self._batch)
        return Variation(*place, found, "", remedies, call.dtype in LOW_DTYPES)

    # --- ways to repeat a call -----------------------------------------------------------------

    def _thread_ways(self, repeated: _Repeated) -> Iterator[_Way]:
        now = torch.get_num_threads()
        for each in self._threads if repeated.call.device_type == "cpu" else ():
            if each != now:
                says = f"differs with threads={each} instead of {now}"
                yield _Way("threads", says, repeated.given, threads=each)

    def _batch_ways(self, repeated: _Repeated) -> Iterator[_Way]:
        """Yields ways with other rows, if it is known where they are."""
        size, site = self._batch, _site(repeated.call)
        index = self._next[site]
        self._next[site] += 1
        try:
            if index >= len(self._calls[site]):
                raise UnknownRowsError("the run on one row has no such call")
            repeated.find_rows(self._calls[site][index], size)
        except UnknownRowsError as error:
            self._skipped[str(error)] += 1
        batched = repeated.batched
        if batched is None:
            return
        for row in self._alone:
            yield _Way("alone", f"row {row} differs when alone", batched.with_rows([row]), [row])
        back = [*range(size)][::-1]
        yield _Way("permuted", "rows differ when permuted", batched.with_rows(back), back)
        if not batched.has_fixed_size:
            more = 1 << size.bit_length()
            padded = batched.with_rows([*range(size), *[0] * (more - size)])
            yield _Way("padded", f"rows differ when padded to {more}", padded, range(size))


def _seconds(function: Callable[[], object]) -> float:
    """Returns the shortest duration of a few calls."""
    found = []
    for _ in range(_TIMED):
        start = time.perf_counter()
        function()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)
