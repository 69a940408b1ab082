"""Recent calls of a program, and their results recomputed in float64."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..comparing import is_readable
from ..errors import raised_here
from ..forks import CachedProperty
from ..observers import OpCall
from ..ops import draws, facts
from ..tensors import LOW_DTYPES, floating_in, map_tensors
from ..torch_state import without_casts

CONVERTING: Final = frozenset(facts("converting"))

#: Ops that add or subtract.
DIFFERENCES: Final = frozenset({"add", "sub", "rsub", "isub", "iadd", "radd"})

#: Values read where reading all would be slow.
SAMPLE: Final = 1 << 16

#: Calls kept with their arguments.
_MOST_CALLS: Final = 64

#: Calls between the rounding of a value and its use.
_MOST_STEPS: Final = 6


@dataclass(eq=False)
class LintedCall:
    """A call with its arguments and its result.

    Attributes:
        call: The call.
        inputs: Its floating inputs, before casts.
        args: All positional arguments, and
        kwargs: those given by name.
        result: Its result.
    """

    call: OpCall
    inputs: list[Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    outputs: list[Tensor] = field(init=False)
    _then: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Collects the floating results."""
        self.outputs = floating_in([self.result])
        self._then = _versions(self.inputs)

    @property
    def low(self) -> torch.dtype | None:
        """The low dtype that the call computed in; None for others."""
        return next(
            (each for each in (self.call.dtype, *self.call.kernels) if each in LOW_DTYPES), None
        )

    @property
    def writes(self) -> bool:
        """Whether the result is one of the inputs."""
        return any(each is given for each in self.outputs for given in self.inputs)

    @CachedProperty
    def rounds(self) -> bool:
        """Whether it computed in a low dtype, and rounded a result; joins and masks round nothing."""
        if self.low is None or self.call.op in CONVERTING:
            return False
        exact = self.run(lambda each: each.detach().double())
        return exact is None or any(
            not torch.equal(each.detach().double().nan_to_num(), right.detach().nan_to_num())
            for each, right in zip(self.outputs, exact, strict=False)
        )

    @CachedProperty
    def cancels(self) -> float:
        """By how many bits the result of a sum or difference is smaller than its terms, on average."""
        numbers = [abs(each) for each in self.args[:2] if isinstance(each, (int, float))]
        sizes = [*map(_size, self.inputs), *numbers]
        if self.call.op not in DIFFERENCES or len(sizes) < 2 or not self.outputs or not min(sizes):
            return 0.0
        size = _size(self.outputs[0])
        return math.log2(min(sizes) / size) if size else math.inf

    @CachedProperty
    def passes_on(self) -> bool:
        """Whether its results are its inputs' values, moved or scaled, or sums of few."""
        if self.call.op in CONVERTING:
            return bool(self.inputs)
        if self.cancels >= 3:
            return False
        if self.low is not None:
            return not self.rounds
        large = max([each.numel() for each in self.inputs], default=0)
        if sum(each.numel() for each in self.outputs) < large and self.call.op not in facts(
            "selects"
        ):
            return False
        never, once, twice = (self._times(number) for number in (0, 1, 2))
        if never is None or once is None or twice is None:
            return False
        return all(
            torch.allclose(c - b, b - a, rtol=1e-9, atol=0.0, equal_nan=True)
            for a, b, c in zip(never, once, twice, strict=True)
        )

    @property
    def picks(self) -> bool:
        """Whether its results are elements of its inputs: close ones may change places, which loses nothing."""
        given = torch.cat([each.detach().double().reshape(-1) for each in self.inputs])
        found = self.run(lambda each: each.detach().double())
        return found is not None and all(
            bool(torch.isin(each.detach().reshape(-1)[:SAMPLE], given).all()) for each in found
        )

    def _times(self, number: int) -> list[Tensor] | None:
        """Returns the results in float64 with all floating inputs multiplied by a number."""
        return self.run(lambda each: each.detach().double() * number)

    @property
    def place(self) -> tuple[str, str, str]:
        """The op, the module and the line of the program."""
        return self.call.op, self.call.module, self.call.location

    def line(self, options: str = "") -> str:
        """Returns a list line for the op, in a section for its module where it has one."""
        line = f"{self.call.op}{options}"
        return f"section module {self.call.module!r}: {line}" if self.call.module else line

    def run(self, replace: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
        """Reruns torch's function on floating inputs replaced by ``replace``.

        Arguments that are low dtypes become float64.

        Returns:
            The floating results; None if the call writes to its inputs, draws random numbers or fails, or if its
            inputs have changed since, or their memory is gone.
        """
        is_as_then = _versions(self.inputs) == self._then and all(map(is_readable, self.inputs))
        if self.writes or draws(self.call.op) or not is_as_then:
            return None

        def given(value: Any) -> Any:
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return map_tensors(value, lambda each: replace(each) if _is_real(each) else each)

        kwargs = {name: given(value) for name, value in self.kwargs.items()}
        try:
            with without_casts(), torch.autocast(self.call.device_type or "cpu", enabled=False):
                return floating_in([self.call.function(*map(given, self.args), **kwargs)])
        except raised_here(RuntimeError, TypeError, ValueError):  # no such kernel
            return None


def _versions(tensors: list[Tensor]) -> list[int]:
    return [0 if each.is_inference() else each._version for each in tensors]


def _size(tensor: Tensor) -> float:
    """Returns the root mean square of the finite values."""
    values = tensor.detach().reshape(-1)[:SAMPLE].double()
    values = values[values.isfinite()]
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


class Trace:
    """The last calls."""

    def __init__(self) -> None:
        """Starts empty."""
        self._calls: deque[LintedCall] = deque(maxlen=_MOST_CALLS)
        self._made: MutableMapping[Tensor, weakref.ref[LintedCall]] = WeakTensorKeyDictionary()

    def add(self, seen: LintedCall) -> None:
        """Keeps a call."""
        self._calls.append(seen)
        for each in seen.outputs:
            self._made[each] = weakref.ref(seen)

    def producer(self, tensor: Tensor) -> LintedCall | None:
        """Returns the kept call whose result is ``tensor``, or of which it is a view."""
        found = self._found(tensor)
        return None if found is None else found[0]

    def _found(self, tensor: Tensor) -> tuple[LintedCall, Tensor] | None:
        for each in (tensor, tensor._base):
            known = None if each is None else self._made.get(each)
            seen = None if known is None else known()
            if each is not None and seen is not None:
                return seen, each
        return None

    def maker(self, tensor: Tensor) -> LintedCall | None:
        """Returns the kept call that computed the values of ``tensor``, before conversions and views."""
        seen = self.producer(tensor)
        for _ in range(_MOST_CALLS):
            if seen is None or seen.call.op not in CONVERTING or not seen.inputs:
                return seen
            seen = self.producer(seen.inputs[0])
        return None

    def makers(self, tensor: Tensor, most: int = _MOST_STEPS) -> list[LintedCall]:
        """Returns the kept calls that rounded the values of ``tensor``.

        Before views, conversions, and calls that moved or scaled the values: masks, transposes, parts, joins.
        """
        seen = self.producer(tensor)
        if seen is None or not most:
            return []
        if seen.rounds:
            return [seen]
        if not seen.passes_on:
            return []
        return [maker for each in seen.inputs for maker in self.makers(each, most - 1)]

    def exact(
        self, tensor: Tensor, *, round_inputs: bool = False, most: int = _MOST_STEPS
    ) -> Tensor | None:
        """Returns the values of ``tensor`` as its `makers` compute them in float64; None without any.

        Args:
            tensor: A result of a kept call, or a view of one.
            round_inputs: Whether the makers' inputs are rounded to the dtype that they computed in.
            most: Number of calls to go back.
        """
        found = self._found(tensor)
        if found is None or not most:
            return None
        seen, result = found

        def given(each: Tensor) -> Tensor:
            if round_inputs and seen.low is not None:
                each = each.to(seen.low)
            return each.detach().double()

        if seen.rounds:
            values = seen.run(given)
        elif seen.passes_on:
            known = {
                id(e): self.exact(e, round_inputs=round_inputs, most=most - 1) for e in seen.inputs
            }
            if not any(each is not None for each in known.values()):
                return None

            def exact(each: Tensor) -> Tensor:
                value = known.get(id(each))
                return each.detach().double() if value is None else value

            values = [exact(seen.inputs[0])] if seen.call.op in CONVERTING else seen.run(exact)
        else:
            return None
        at = next(n for n, each in enumerate(seen.outputs) if each is result)
        if not values or at >= len(values) or values[at].shape != result.shape:
            return None
        return (
            values[at].detach() if result is tensor else _seen_through(tensor, result, values[at])
        )


def _seen_through(view: Tensor, base: Tensor, values: Tensor) -> Tensor | None:
    """Returns the part of the values of ``base`` that ``view`` shows; None if ``base`` shares memory with itself."""
    laid = torch.empty_like(base, dtype=torch.float64)
    if laid.stride() != base.stride():
        return None
    start = view.storage_offset() - base.storage_offset()
    return laid.copy_(values.detach()).as_strided(view.shape, view.stride(), start)
