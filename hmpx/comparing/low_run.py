"""The run in low precision: which call was given and returned which dtypes, and samples of results."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..number_formats import Format
from ..observers import CallTensors, OpCall
from ..tensors import LOW_DTYPES, floating_in, is_dense
from ..torch_internals import behind_transform, is_of_transform
from .measures import sample

_CONVERTING: Final = ops.facts("converting").keys()


class Site(NamedTuple):
    """Where calls are made: those of one site are told apart by their order.

    Attributes:
        function: The site patched: ``"torch.nn.functional.linear"``.
        module: Qualified name of the module.
        location: ``"train.py:12"``.
    """

    function: str
    module: str
    location: str


@dataclass(frozen=True, slots=True)
class LowCall:
    """One call of the run in low precision.

    Attributes:
        call: What was observed.
        input_dtypes: Dtypes of all floating tensors among the arguments, as given.
        samples: Samples of the floating results.
        bytes: What the results take in float32.
    """

    call: OpCall
    input_dtypes: tuple[torch.dtype, ...]
    samples: tuple[Tensor, ...]
    bytes: int

    @property
    def low_type(self) -> torch.dtype | Format | None:
        """The low-precision type that the call has computed with; None if it has with none."""
        dtype = self.call.dtype
        if isinstance(dtype, Format) or dtype in LOW_DTYPES:
            return dtype
        return next((each for each in self.call.output_dtypes if each in LOW_DTYPES), None)


class LowRun:
    """The observer of the run in low precision.

    Attributes:
        calls: Site -> its calls, in their order.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.calls: dict[Site, list[LowCall]] = defaultdict(list)
        self._lock = threading.Lock()

    def __call__(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Notes one call."""
        if tensors is None or not is_compared(call) or call.phase != "forward":
            return
        given = given_floats(tensors.given, tensors.given_kwargs)
        results = floating_in([tensors.result])
        samples = tuple(
            sample(each.detach()).clone() for each in map(stored, results) if is_measurable(each)
        )
        low = LowCall(
            call,
            tuple([each.dtype for each in given]),
            samples,
            sum(4 * each.numel() for each in results),
        )
        with self._lock:
            self.calls[Site(call.site, call.module, call.location)].append(low)


def stored(tensor: Tensor) -> Tensor:
    """Returns what holds the values of a tensor that a transform has made, such as a batch of vmap's."""
    while is_of_transform(tensor):
        behind = behind_transform(tensor)
        if behind is tensor:
            break
        tensor = behind
    return tensor


def is_measurable(tensor: Tensor) -> bool:
    """Whether a tensor has values to look at."""
    return is_dense(tensor) and not tensor.is_meta and tensor.numel() > 0


def is_compared(call: OpCall) -> bool:
    """Whether the call is one of the model's that computes."""
    return call.op not in _CONVERTING and call.phase != "backward"


def given_dtypes(tensors: CallTensors) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of all floating tensors that a call was given."""
    return tuple([each.dtype for each in given_floats(tensors.given, tensors.given_kwargs)])


def given_floats(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns all floating tensors among arguments, in a fixed order."""
    return floating_in([*args, *(kwargs[name] for name in sorted(kwargs))])
