"""Recent calls of a program, and their results recomputed in float64."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ..comparing import Origins, is_readable
from ..errors import raised_here
from ..forks import CachedProperty
from ..observers import OpCall
from ..ops import draws, facts, is_foreign, is_view, kind
from ..places import located
from ..tensors import (
    LOW_DTYPES,
    floating_in,
    map_tensors,
    short_name,
    tensors_in,
    version_of,
)
from ..torch_internals import DisableAutocast, is_any_autocast_enabled
from ..torch_state import without_casts

CONVERTING: Final = frozenset(facts("converting"))

#: Ops that add or subtract.
DIFFERENCES: Final = frozenset({"add", "sub", "rsub", "isub", "iadd", "radd"})

#: Kinds of ops that take most of the time.
PRODUCTS: Final = frozenset({"gemm", "convolution", "attention", "rnn"})

#: Values read where reading all would be slow.
SAMPLE: Final = 1 << 16

#: Kernels that copy, and aren't calls of their own.
COPIES: Final = frozenset({"clone", "copy_", "index"})

#: Ops that return the places of elements, along a dimension or of all.
_CHOOSING: Final = frozenset({"argmax", "argmin", "kthvalue", "max", "min", "topk"})

#: Ops whose results jump.
_STEPS: Final = frozenset({"ceil", "floor", "round", "sign", "trunc"})

#: Fewer results that cancel may be so by chance.
_FEW: Final = 8

#: Calls kept with their arguments.
_MOST_CALLS: Final = 64
_MOST_MADE: Final = 16 * _MOST_CALLS

#: Sums between a sum and the difference that shows its rounding: ``c = (t - s) - y``.
_MOST_UNDONE: Final = 2

#: Calls between the rounding of a value and its use, and those that are computed again in float64.
_MOST_STEPS: Final = 12
_MOST_DOUBLE: Final = 4


@dataclass(eq=False)
class LintedCall:
    """A call with its arguments and its result.

    Attributes:
        call: The call.
        inputs: Its floating inputs, before casts.
        args: All positional arguments, and
        kwargs: those given by name.
        result: Its result.
        written: ``id`` of an input that it wrote to -> the values before.
        taken: Numbers of the terms of a sum that later differences took away from it.
        undone: Lines of these differences; of a difference, the line of the sum.
        rounding: The conversion to a low type that it undoes.
    """

    call: OpCall
    inputs: list[Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    written: Mapping[int, Tensor] = field(default_factory=dict)
    is_reported: bool = False
    taken: set[int] = field(init=False, default_factory=set)
    undone: set[str] = field(init=False, default_factory=set)
    rounding: LintedCall | None = field(init=False, default=None)
    outputs: list[Tensor] = field(init=False)
    known: dict[str, list[Tensor] | None] = field(init=False, default_factory=dict)
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Collects the floating results, and puts the values before in place of inputs written to."""
        self.outputs = self.inputs[:1] if self.result is None else floating_in([self.result])
        places = {id(each) for each in self.outputs} & {*self.written}
        self.written = {place: self.written[place] for place in places}
        if self.written:
            self.inputs = [self.written.get(id(each), each) for each in self.inputs]
            self.args = map_tensors(self.args, lambda each: self.written.get(id(each), each))
        self.versions = [*map(version_of, self.inputs)]

    @property
    def low(self) -> torch.dtype | None:
        """The low dtype that the call computed in; None for others."""
        dtypes = (self.call.dtype, *self.call.kernels)
        return next((each for each in dtypes if each in LOW_DTYPES), None)

    @property
    def writes(self) -> bool:
        """Whether the result is one of the inputs."""
        return any(each is given for each in self.outputs for given in self.inputs)

    @CachedProperty
    def rounds(self) -> bool:
        """Whether it computed in a low dtype, or converted to one, and rounded a result; joins and masks don't."""
        is_low = any(each.dtype in LOW_DTYPES for each in self.outputs)
        if not (is_low if self.moves else self.low is not None):
            return False
        exact = self.run(lambda each: each.detach().double())
        if exact is not None and all(
            torch.equal(each.detach().double().nan_to_num(), right.detach().nan_to_num())
            for each, right in zip(self.outputs, exact, strict=False)
        ):
            return False
        self.known["exact"] = exact
        return True

    @property
    def moves(self) -> bool:
        """Whether it is a conversion or a copy."""
        return self.call.op in CONVERTING or self.call.op in COPIES

    def cancels(self, least_bits: int = 3) -> Tensor | None:
        """Returns the places at which a sum or difference is that many bits smaller than both terms, in its first rows.

        None if that's as rare as among random terms, of which one in eight is at least 3 bits smaller still.
        """
        if self.call.op not in DIFFERENCES or len(self.args) < 2 or not self.outputs:
            return None
        result = self.outputs[0]
        terms = [torch.as_tensor(each, device=result.device) for each in self.args[:2]]
        if any(each.dim() > result.dim() for each in terms):  # it has another shape now
            return None
        sizes = [first_rows(each.detach().expand(result.shape)).abs() for each in terms]
        found, least = first_rows(result).abs(), torch.minimum(*sizes)
        is_term = (least > 0) & least.isfinite()
        bits = least_bits, least_bits + 3
        few, many = (is_term & (found * 2.0**each <= least) for each in bits)
        terms_, some, most = (each.sum().item() for each in (is_term, few, many))
        is_usual = some <= terms_ / 2 and (most < _FEW or most <= some / 3)
        return None if is_usual else few

    @property
    def passes_on(self) -> bool:
        """Whether values are followed through it: it rounds nothing, adds up no products, and has no finding."""
        if self.is_reported or not self.inputs:
            return False
        if self.low is not None and self.call.op not in _STEPS:
            return not self.rounds
        is_simple = kind(self.call.op)[0] in {"elementwise", "norm"} and self.call.op not in _STEPS
        return self.moves or is_simple

    @property
    def chosen(self) -> Tensor | None:
        """The places of the inputs' elements that it chose, as `topk` and `argmax` do."""
        found = integers_in([self.result]) if self.call.op in _CHOOSING else []
        return found[0] if len(found) == 1 else None

    @property
    def picks(self) -> bool:
        """Whether its results are elements of its inputs: close ones may change places, which loses nothing."""
        given = torch.cat([each.detach().double().reshape(-1) for each in self.inputs])
        found = self.run(lambda each: each.detach().double())
        return found is not None and all(
            bool(torch.isin(each.detach().reshape(-1)[:SAMPLE], given).all()) for each in found
        )

    @property
    def place(self) -> tuple[str, str, str]:
        """The op, the module and the line of the program."""
        return self.call.op, self.call.module, self.call.location

    def line(self, options: str = "") -> str:
        """Returns a list line for the op, in a section for its module where it has one."""
        line = f"{self.call.op}{options}"
        return f"section module {self.call.module!r}: {line}" if self.call.module else line

    @property
    def kept_line(self) -> str:
        """How to have its results in float32."""
        cast = f"no cast to {short_name(self.outputs[0].dtype)} at {located(self.call.location)}"
        return cast if self.moves else self.line(" output=float32")

    def run(
        self,
        replace: Callable[[Tensor], Tensor],
        results: Callable[[Any], list[Tensor]] = floating_in,
    ) -> list[Tensor] | None:
        """Reruns torch's function on floating inputs replaced by ``replace``.

        Arguments that are low dtypes become float64.

        Returns:
            The floating results, or those that ``results`` takes; None if the call writes to its inputs, draws random numbers, runs a function of the
            program or fails, or if its inputs have changed since, or their memory is gone.
        """
        is_as_then = [*map(version_of, self.inputs)] == self.versions
        is_gone = not all(map(is_readable, self.inputs))
        is_the_programs = is_foreign(self.call.op)  # with effects of its own
        if self.writes or draws(self.call.op) or is_the_programs or not is_as_then or is_gone:
            return None
        if self.call.op in CONVERTING:
            return [replace(self.inputs[0])]

        def apart(each: Tensor) -> Tensor:  # the call may write to it: running statistics
            new = replace(each) if each.is_floating_point() else each
            return new.clone() if new is not each and new.data_ptr() == each.data_ptr() else new

        def given(value: Any) -> Any:
            is_dtype = isinstance(value, torch.dtype) and value.is_floating_point
            return torch.float64 if is_dtype else map_tensors(value, apart)

        kwargs = {name: given(value) for name, value in self.kwargs.items()}
        try:
            is_cast = is_any_autocast_enabled()
            with without_casts(), DisableAutocast() if is_cast else contextlib.nullcontext():
                args = [*map(given, self.args)]
                if self.written:
                    args[0] = args[0].clone()
                return results([self.call.function(*args, **kwargs)]) or floating_in(args[:1])
        except raised_here(RuntimeError, TypeError, ValueError):  # no such kernel
            return None


def integers_in(values: Any) -> list[Tensor]:
    """Returns the tensors of places in ``values``."""
    return [each for each in tensors_in(values) if each.dtype is torch.int64]


def first_rows(tensor: Tensor) -> Tensor:
    """Returns part of the values in float64: all of them, unless they are many."""
    rows = SAMPLE * len(tensor) // max(1, tensor.numel()) + 1 if tensor.dim() else 1
    return (tensor.detach()[:rows] if tensor.dim() else tensor.detach()).double()


class Trace:
    """The last calls."""

    def __init__(self, intended: set[tuple[str, str]]) -> None:
        """Starts empty; ``intended`` gets codes and lines of findings that later calls show to be intended, or not."""
        self._intended = intended
        self.promoted = weakref.WeakSet[LintedCall]()  # that made low values fp32
        self.reported = weakref.WeakSet[LintedCall]()  # casts and islands without effect
        self._calls: deque[LintedCall] = deque(maxlen=_MOST_CALLS)
        # The parts of a join may be many.
        self._copies: deque[LintedCall] = deque(maxlen=_MOST_CALLS)
        # Memory -> the kept call that made it, its result, and that one's version
        self._made: dict[int, tuple[weakref.ref[LintedCall], Tensor, int]] = {}

    def add(self, seen: LintedCall) -> None:
        """Keeps a call, unless it returned an input as it is.

        Torch counts writes after their kernel, as which a copy is seen.
        """
        if seen.writes:
            return
        (self._copies if seen.call.op in COPIES else self._calls).append(seen)
        if len(self._made) > _MOST_MADE:
            self._made = {key: made for key, made in self._made.items() if made[0]() is not None}
        for each in seen.outputs:
            if seen.written and each._base is not None:  # the rest of its memory is of other calls
                self._made.pop(memory(each), None)
            else:
                is_counted = not seen.written or seen.call.op not in COPIES or each.is_inference()
                version = version_of(each) + (not is_counted)
                self._made[memory(each)] = weakref.ref(seen), each, version

    def before_write(self, target: Tensor) -> Tensor:
        """Returns a copy of a tensor that will be written to; its maker has made the copy instead."""
        copy = target.detach().clone()
        found = self._found(target)
        if found is not None and found[1] is target:
            maker = found[0]
            maker.outputs = [copy if each is target else each for each in maker.outputs]
            self._made[memory(copy)] = weakref.ref(maker), copy, version_of(copy)
        return copy

    def producer(self, tensor: Tensor) -> LintedCall | None:
        """Returns the kept call whose result is ``tensor``, or of which it is a view."""
        found = self._found(tensor)
        return None if found is None else found[0]

    def _found(self, tensor: Tensor) -> tuple[LintedCall, Tensor] | None:
        known = self._made.get(memory(tensor))
        seen = None if known is None or version_of(known[1]) != known[2] else known[0]()
        return None if known is None or seen is None else (seen, known[1])

    def back(
        self, tensor: Tensor, passes: Callable[[LintedCall], bool], most: int = _MOST_STEPS
    ) -> dict[LintedCall, None]:
        """Returns the kept call that made ``tensor``, and those before it, back through calls that pass."""
        found: dict[LintedCall, None] = {}
        level = [tensor]
        for _ in range(most):
            calls = [each for each in map(self.producer, level) if each and each not in found]
            found |= dict.fromkeys(calls)
            level = [of for each in dict.fromkeys(calls) if passes(each) for of in each.inputs]
        return found

    def makers(self, tensor: Tensor) -> list[LintedCall]:
        """Returns the kept calls that rounded the values of ``tensor``, before others that did not round them."""
        calls = self.back(tensor, lambda each: not each.rounds and each.passes_on)
        return [each for each in calls if each.rounds]

    def values(self, tensor: Tensor, way: str, most: int = _MOST_STEPS) -> Tensor | None:
        """Returns the values of ``tensor`` as its `makers` compute them another way; None without any.

        Args:
            tensor: A result of a kept call, or a view of one.
            way: ``"exact"``: in float64; ``"kept"``: so, from inputs rounded to the dtype that they computed in;
                ``"deep"`` and ``"wide"``: in float64 and float32, as all calls before them; ``"double"``: in
                float64, with calls of all kinds before them; ``"exact moved"`` and ``"double moved"``: so, from
                inputs that differ by a rounding.
            most: Number of calls to go back.
        """
        most = min(most, _MOST_DOUBLE) if way.startswith("double") else most
        found = self._found(tensor)
        if found is None or not most:
            return None
        seen, result = found
        if way not in seen.known:
            seen.known[way] = self._rerun(seen, way, most)
        return _seen_through(tensor, result, seen.outputs, seen.known[way])

    def is_update(self, seen: LintedCall) -> bool:
        """Whether a term was made from the other, as a step of an iteration is."""
        calls = [call for of in seen.inputs for call in self.back(of, bool, _MOST_DOUBLE)]
        made_from = {memory(of) for call in calls for of in call.inputs}
        return any(memory(each) in made_from for each in seen.inputs)

    def _takes_rest(self, seen: LintedCall, of: LintedCall) -> bool:
        pairs = [(n, one, other) for n, one in enumerate(of.inputs) for other in seen.inputs]
        taken = {n for n, one, other in pairs if _is_same(one, other)}
        of.taken |= taken
        of.undone |= {seen.call.location} if taken else set()
        seen.undone |= {of.call.location} if taken else set()
        return len(taken) > 0 and len(of.taken) > 1

    def undoes(self, seen: LintedCall) -> bool:
        """Whether differences take both terms away from the sum of these, to learn what was lost."""
        sums = [
            each
            for of in seen.inputs
            for each in self.back(of, lambda before: before.call.op in DIFFERENCES, _MOST_UNDONE)
            if each.call.op in DIFFERENCES
        ]
        whole = [of for of in dict.fromkeys(sums) if self._takes_rest(seen, of)]
        self._intended.update(("HP103", each) for of in whole for each in of.undone)
        self._intended.update(
            (code, of.call.location) for of in whole for code in ("HP104", "HP107")
        )
        return bool(whole)

    def updates(self, source: Tensor, target: Tensor, location: str) -> bool:
        """Whether ``source`` was computed from the values of ``target``, without random numbers or masters."""
        calls = self.back(source, lambda each: not each.written)
        inputs = [each for of in calls for each in zip(of.inputs, of.versions, strict=True)]
        read = {version for each, version in inputs if memory(each) == memory(target)}
        if read - {version_of(target)}:  # by masters, made of older values
            self._intended.add(("HP107", location))
        return bool(read) and not any(each.written or draws(each.call.op) for each in calls)

    def note_cast(self, tensor: Tensor) -> None:
        """Notes that the fp32 values of ``tensor`` are cast to a low type: their promotion was intended."""
        self._intended.update(("HP105", each) for each in self._promotions(tensor))

    def note_product(self, seen: LintedCall) -> None:
        """Notes that a product is computed in fp32, of values whose promotion no cast has undone."""
        found = [each for of in seen.inputs for each in self._promotions(of)]
        self._intended.update(("not HP105", each) for each in found)

    def note_sum(self, seen: LintedCall) -> None:
        """Notes a promotion whose result is added to a tensor that is fp32 and as large anyway."""
        if not self.promoted or seen.call.op not in DIFFERENCES or seen.low is not None:
            return
        known = {
            id(each): [of for of in self.wide(each) if of in self.promoted] for each in seen.inputs
        }
        own = [each for each in seen.inputs if not known[id(each)]]
        if any(each.dtype is torch.float32 and each.shape == seen.outputs[0].shape for each in own):
            promoted = itertools.chain(*known.values())
            self._intended.update(("HP105", each.call.location) for each in promoted)

    def upcast_from(self, tensor: Tensor, *, is_kept: bool = False) -> torch.dtype | None:
        """Returns the low dtype from which the program has just converted a tensor; with ``is_kept``, one that it keeps."""
        made = self.producer(tensor)
        if made is None or made.call.op not in CONVERTING or tensor.dtype is not torch.float32:
            return None
        source = made.inputs[0]
        is_new = is_kept and self.producer(source) is not None
        return source.dtype if source.dtype in LOW_DTYPES and not is_new else None

    def has_wide_use(self, tensor: Tensor) -> bool:
        """Whether a kept call in fp32 took a tensor."""
        calls = [each for each in self._calls if each.low is None and not each.moves]
        return any(of is tensor for each in calls for of in each.inputs)

    def note_uses(self, seen: LintedCall) -> None:
        """Notes that values of reported casts and islands are used otherwise, too."""
        for each in seen.inputs if self.reported else ():
            made = self.producer(each)
            is_other = (
                made in self.reported and each.dtype is made.outputs[0].dtype if made else False
            )
            if made and is_other and (seen.low is None) == (each.dtype is torch.float32):
                self._intended.add(("HP106", f"{made.call.op} {made.call.location}"))

    def wide(self, tensor: Tensor) -> list[LintedCall]:
        """Returns the calls in fp32 that made ``tensor``, as far as values are followed."""
        calls = self.back(tensor, lambda each: each.low is None and each.passes_on)
        return [each for each in calls if each.low is None]

    def _promotions(self, tensor: Tensor) -> list[str]:
        return [each.call.location for each in self.wide(tensor) if each.passes_on]

    def note_use(self, made: LintedCall, seen: LintedCall) -> None:
        """Notes that the upcast values of a conversion are used in fp32, or beside those before a rounding."""
        rounding = made.rounding
        if rounding is None or any(each is rounding.inputs[0] for each in seen.inputs):
            call = (rounding or made).call
            self._intended.add(("HP106", f"{call.op} {call.location}"))

    def just_rounded(self, tensor: Tensor) -> LintedCall | None:
        """Returns the conversion of fp32 values to ``tensor``, if only views and copies came after it."""
        for each in reversed(self._calls):
            if not each.outputs or each.outputs[0].dtype is not tensor.dtype:
                return None
            if each.call.op in CONVERTING and each.inputs[0].dtype is torch.float32:
                return each if each in self.back(tensor, bool) else None
            if not (each.moves or is_view(each.call.op)):
                return None
        return None

    def in_low(
        self, tensor: Tensor, low: torch.dtype, origins: Origins, most: int = _MOST_STEPS
    ) -> tuple[Tensor, list[LintedCall]] | None:
        """Returns the values of ``tensor`` if the fp32 calls since the last ones of ``low`` had computed in it.

        Also returns these calls. None if other values than those of ``low`` go in.
        """
        found = self._found(tensor)
        if found is None or found[0].low is not None or not most:
            return (tensor.to(low), []) if origins.contents(tensor) is low else None
        seen, result = found
        inner = {id(each): self.in_low(each, low, origins, most - 1) for each in seen.inputs}
        parts = {key: each for key, each in inner.items() if each is not None}
        takes_dtype = any(isinstance(each, torch.dtype) for each in seen.kwargs.values())
        if len(parts) < len(inner) or not parts or (takes_dtype and not seen.moves):
            return None
        values = seen.run(lambda each: parts[id(each)][0].detach())
        value = _seen_through(tensor, result, seen.outputs, values)
        if value is None or value.dtype is not low:
            return None
        calls = itertools.chain(*[each[1] for each in parts.values()], [] if seen.moves else [seen])
        return value, [*dict.fromkeys(calls)]

    def _rerun(self, seen: LintedCall, way: str, most: int) -> list[Tensor] | None:
        rounds, is_double = seen.rounds, way.startswith("double")
        if not (rounds or is_double or seen.passes_on):
            return None
        before: dict[int, Tensor | None] = {}
        if not rounds or is_double or way in ("deep", "wide"):
            before = {id(each): self.values(each, way, most - 1) for each in seen.inputs}
        if not (rounds or is_double) and all(each is None for each in before.values()):
            return None

        def given(each: Tensor) -> Tensor:
            value = before.get(id(each))
            if value is None:
                is_rounded = rounds and way == "kept" and seen.low is not None
                value = each.detach().to(seen.low) if is_rounded else each.detach()
                value = moved(value) if way.endswith("moved") else value
            return value.to(torch.float32 if way == "wide" else torch.float64)

        return seen.run(given)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.device == other.device and one.equal(other)


def moved(tensor: Tensor) -> Tensor:
    """Returns the values with errors of up to half an ulp. Equal values, as of views, have equal errors."""
    mantissas, eps = tensor.double().frexp()[0], torch.finfo(tensor.dtype).eps
    return tensor.double() * (1 + (1e6 * mantissas).sin() * eps / 2)


def _seen_through(
    tensor: Tensor, base: Tensor, outputs: list[Tensor], values: list[Tensor] | None
) -> Tensor | None:
    """Returns the part of ``values``, of a call's outputs, that ``tensor`` shows: ``base``, or a view of it.

    None if there are none for ``base``, or if it shares memory with itself.
    """
    pairs = zip(outputs, values or [], strict=False)
    new = next((new for each, new in pairs if each is base and new.shape == base.shape), None)
    if new is None or base is tensor:
        return None if new is None else new.detach()
    laid = torch.empty_like(base, dtype=new.dtype)
    if laid.stride() != base.stride():
        return None
    start = tensor.storage_offset() - base.storage_offset()
    return laid.copy_(new.detach()).as_strided(tensor.shape, tensor.stride(), start)


def memory(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, which views share, as long as it is alive."""
    return int(tensor.untyped_storage()._cdata)
