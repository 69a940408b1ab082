"""Recent calls of a program, and their results recomputed in float64."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import raised_here
from ..observers import OpCall
from ..ops import draws, facts
from ..tensors import LOW_DTYPES, floating_in, map_tensors
from ..torch_state import without_casts

CONVERTING: Final = frozenset(facts("converting"))

#: Ops that add or subtract.
DIFFERENCES: Final = frozenset({"add", "sub", "rsub", "isub", "iadd", "radd"})

#: Calls kept with their arguments.
_MOST_CALLS: Final = 64


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

    def __post_init__(self) -> None:
        """Collects the floating results."""
        self.outputs = floating_in([self.result])

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
            The floating results; None if the call writes to its inputs, draws random numbers or fails.
        """
        if self.writes or draws(self.call.op):
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
        base = tensor._base
        found = self._made.get(tensor)
        if found is None and base is not None:
            found = self._made.get(base)
        return found() if found is not None else None

    def maker(self, tensor: Tensor) -> LintedCall | None:
        """Returns the kept call that computed the values of ``tensor``, before conversions and views."""
        seen = self.producer(tensor)
        for _ in range(_MOST_CALLS):
            if seen is None or seen.call.op not in CONVERTING or not seen.inputs:
                return seen
            seen = self.producer(seen.inputs[0])
        return None

    def exact(self, tensor: Tensor, *, round_inputs: bool = False) -> Tensor | None:
        """Returns the values of ``tensor`` as its maker computes them in float64.

        Args:
            tensor: A result of a kept call, converted or not; not a view.
            round_inputs: Whether the maker's inputs are rounded to the dtype that it computed in.
        """
        maker = self.maker(tensor)
        if maker is None or not maker.outputs or maker.outputs[0].shape != tensor.shape:
            return None

        def given(each: Tensor) -> Tensor:
            if round_inputs and maker.low is not None:
                each = each.to(maker.low)
            return each.detach().double()

        found = maker.run(given)
        return found[0].detach() if found else None
