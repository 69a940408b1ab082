"""The low-precision run: dtypes of the calls' inputs and results, samples of results, and gradients."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..number_formats import Format
from ..observers import CallTensors, OpCall
from ..tensors import LOW_DTYPES, floating_in, is_dense
from ..torch_internals import behind_transform, is_of_transform
from .measures import sample

_CONVERTING: Final = ops.facts("converting").keys()


class Site(NamedTuple):
    """Where calls are made. Calls of one site are matched by their order."""

    function: str
    module: str
    location: str


@dataclass(frozen=True, slots=True)
class LowCall:
    """One call of the run in low precision.

    Attributes:
        call: The observed call.
        input_dtypes: Dtypes of all floating tensors among the arguments, as given.
        samples: Samples of the floating-point results.
        bytes: Bytes of the results in float32.
    """

    call: OpCall
    input_dtypes: tuple[torch.dtype, ...]
    samples: tuple[Tensor, ...]
    bytes: int

    @property
    def low_type(self) -> torch.dtype | Format | None:
        """The low-precision type that the call computed with, or None."""
        dtype = self.call.dtype
        if isinstance(dtype, Format) or dtype in LOW_DTYPES:
            return dtype
        return next((each for each in self.call.output_dtypes if each in LOW_DTYPES), None)

    @property
    def key(self) -> tuple[str, str, str]:
        """The comparison's row for the call: op, module and location."""
        return self.call.op, self.call.module, self.call.location


class LowRun:
    """The observer of the low-precision run; ``calls`` lists each site's calls in order."""

    def __init__(self) -> None:
        """Starts empty."""
        self.calls: dict[Site, list[LowCall]] = defaultdict(list)
        self._lock = threading.Lock()

    def __call__(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Records one call."""
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


class GradientRun:
    """Compares each gradient as soon as it is computed, then discards it: only one set is ever held.

    ``found`` maps the parameter's name to the norms of difference, float32 and low-precision gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], low: Mapping[str, Tensor]) -> None:
        """Compares with the gradients ``low``, from `start` on."""
        self._parameters, self._low = parameters, low
        self.found: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Begins with the next backward; gradients within a forward are the model's own."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def _hook(self, name: str) -> Any:
        low = self._low.get(name)

        def compare(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if low is not None and gradient is not None and is_dense(gradient) and is_dense(low):
                self.found.append((name, _norms(gradient.detach(), low)))

        return compare

    def end(self) -> None:
        """Removes the hooks; later gradients are not compared."""
        for hook in self._hooks:
            hook.remove()


def _norms(gradient: Tensor, low: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    a, b = gradient.to(wide), low.to(wide)
    return torch.stack([torch.linalg.vector_norm(each) for each in (b - a, a, b)]).real.float()
