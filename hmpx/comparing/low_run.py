"""The low-precision run: dtypes of the calls' inputs and results, samples of results, and gradients."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from .. import number_formats, ops
from ..observers import CallTensors, OpCall
from ..tensors import LOW_DTYPES, floating_in, is_dense
from ..torch_internals import behind_transform, is_of_transform
from ..torch_state import without_casts
from .measures import sample

if TYPE_CHECKING:
    from ..number_formats import Format

_CONVERTING: Final = ops.facts("converting").keys()


class Site(NamedTuple):
    """Where calls are made. Calls of one site are matched by their order."""

    function: str
    module: str
    location: str


@dataclass(frozen=True, slots=True)
class LowCall:
    """One call of the run in low precision."""

    call: OpCall
    input_dtypes: tuple[torch.dtype, ...]  # of all floating tensors among the arguments, as given
    samples: tuple[Tensor, ...]  # of the floating-point results
    bytes: int  # of the results in float32

    @property
    def low_type(self) -> torch.dtype | Format | None:
        """The low-precision type that the call computed with, or None."""
        dtype = self.call.dtype
        if number_formats.is_format(dtype) or dtype in LOW_DTYPES:
            return dtype
        return next((each for each in self.call.output_dtypes if each in LOW_DTYPES), None)

    @property
    def key(self) -> tuple[str, str, str]:
        """The comparison's row for the call: op, module and location."""
        return self.call.op, self.call.module, self.call.location


class LowRun:
    """The observer of the low-precision run; ``calls`` lists each site's calls in order."""

    def __init__(self) -> None:
        self.calls: dict[Site, list[LowCall]] = defaultdict(list)
        self._lock = threading.Lock()

    def __call__(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Records one call."""
        if tensors is None or not is_compared(call) or call.phase != "forward":
            return
        given = given_floats(tensors.given, tensors.given_kwargs)
        results = floating_in([tensors.result])
        low = LowCall(
            call,
            tuple(each.dtype for each in given),
            tuple(sample(r.detach()).clone() for r in map(stored, results) if is_measurable(r)),
            sum(4 * each.numel() for each in results),
        )
        with self._lock:
            self.calls[Site(call.site, call.module, call.location)].append(low)


def stored(tensor: Tensor) -> Tensor:
    """Returns the plain tensor inside a tensor that a transform made, such as a batch of vmap's."""
    while is_of_transform(tensor):
        behind = behind_transform(tensor)
        if behind is tensor:
            break
        tensor = behind
    return tensor


def is_measurable(tensor: Tensor) -> bool:
    """Whether a tensor has values to read."""
    return is_dense(tensor) and not tensor.is_meta and tensor.numel() > 0


def is_compared(call: OpCall) -> bool:
    """Whether the model made the call, and the call computes."""
    return call.op not in _CONVERTING and call.phase != "backward"


def given_floats(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns all floating tensors among arguments, in a fixed order."""
    return floating_in([*args, *(kwargs[name] for name in sorted(kwargs))])


# --- gradients -----------------------------------------------------------------------------------


def taken(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients of parameters, and clears them."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def gradient_norms(
    gradients: Mapping[str, Tensor], low: Mapping[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """Returns for each parameter the norms of difference, float32 and low-precision gradient."""
    found = []
    with without_casts():
        for name in filter(low.__contains__, gradients):
            a, b = gradients[name].detach(), low[name]
            if is_dense(a) and is_dense(b):
                wide = torch.promote_types(a.dtype, torch.float32)
                a, b = a.to(wide), b.to(wide)
                norms = [torch.linalg.vector_norm(each) for each in (b - a, a, b)]
                found.append((name, torch.stack(norms).real.float()))
    return found
