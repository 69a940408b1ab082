"""The observers of the runs: in low precision, and in float32, where each call also runs in low precision.

In the second run the program itself computes in float32. So gradients are those of the float32 model, and one backward gives
the effect of every call's rounding.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from .. import number_formats, ops
from ..forks import new_lock
from ..observers import CallTensors, OpCall
from ..tensors import (
    CAST,
    LOW_DTYPES,
    Kwargs,
    floating_in,
    is_dense,
    is_floating,
    map_tensors,
    node_of,
    tensors_in,
)
from ..torch_internals import behind_transform, is_of_transform
from .measures import Measurement, effect, largest, limits, measured, sample

_CONVERTING: Final = ops.facts("converting").keys()


#: Where calls are made: the function, the module and the line. Calls of one site are matched by their order.
_Site = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class LowCall:
    """One call of the run in low precision."""

    call: OpCall
    input_dtypes: tuple[torch.dtype, ...]  # of all floating tensors among the arguments, as given
    samples: tuple[Tensor, ...]  # of the floating-point results
    bytes: int  # of the results in float32

    @property
    def low_type(self) -> torch.dtype | number_formats.Format | None:
        """The low-precision type that the call computed with, or None."""
        dtype = self.call.dtype
        if number_formats.is_format(dtype) or dtype in LOW_DTYPES:
            return dtype
        return next((each for each in self.call.output_dtypes if each in LOW_DTYPES), None)


class LowRun:
    """The observer of the low-precision run; ``calls`` lists each site's calls in order."""

    def __init__(self) -> None:
        self.calls: dict[_Site, list[LowCall]] = defaultdict(list)
        self._lock = new_lock()

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
            self.calls[call.site, call.module, call.location].append(low)


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


# --- the run in float32 ---------------------------------------------------------------------------


@dataclass(slots=True)
class Arrival:
    """The effects of one call, of each result and each backward, and its places in `SiteNumbers.measured`."""

    effects: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SiteNumbers:
    """Numbers kept for the calls of one site, on their device."""

    low: LowCall  # the first of its calls in the low-precision run
    order: int  # its position among the sites
    calls: int = 0
    measured: list[Measurement] = field(default_factory=list)  # of each result
    arrivals: list[Arrival] = field(default_factory=list)  # of each compared call
    propagated: list[Tensor] = field(default_factory=list)  # samples' norms: difference, reference
    inputs: list[Tensor] = field(default_factory=list)  # the largest magnitudes
    flips: list[tuple[Tensor, int]] = field(default_factory=list)  # differing integers, of how many


_Found = tuple[SiteNumbers, LowCall, Arrival]


class ShadowRun:
    """The observer of the float32 run. ``unmatched`` counts calls missing from the low-precision run."""

    def __init__(
        self,
        low_run: LowRun,
        reference: torch.dtype,
        compared: Container[int],
        kept: dict[tuple[str, str, str], SiteNumbers],
        *,
        draws_gradients: bool,
    ) -> None:
        """Compares the calls whose ``id`` is in ``compared`` with those of ``low_run``, and adds to ``kept``.

        With ``draws_gradients`` gradients also reach results that depend on no parameter, such as those of
        positions. A program that writes to such a result in place can't run then.
        """
        self.kept, self.unmatched = kept, 0
        self._low_run, self._reference, self._compared = low_run, reference, compared
        self._next: dict[_Site, int] = defaultdict(int)
        self._without: dict[tuple[str, str], deque[_Found]] = defaultdict(deque)
        self._draws_gradients = draws_gradients
        self._drawn: list[weakref.ref[Tensor]] = []
        self._hooks: list[Any] = []
        self._lock = new_lock()

    def __call__(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Compares one call."""
        if tensors is None or not is_compared(call):
            return
        with self._lock:
            found = self._found_again(call) if call.phase == "recompute" else self._found(call)
        if found is None:
            return
        kept, low, _ = found
        if id(low) not in self._compared:
            return
        if call.phase == "forward":
            kept.calls += 1
            _keep_propagated(kept, low, tensors_in([tensors.result]))
        if low.low_type is not None:
            self._compare(found, call, tensors)

    def _found(self, call: OpCall) -> _Found | None:
        """Returns the same call in low precision, by its position at its site."""
        site = call.site, call.module, call.location
        known = self._low_run.calls.get(site, [])
        index = self._next[site]
        self._next[site] += 1
        if index >= len(known):
            self.unmatched += 1
            return None
        key = (call.op, call.module, call.location)
        kept = self.kept.setdefault(key, SiteNumbers(known[index], len(self.kept)))
        return kept, known[index], Arrival()

    def _found_again(self, call: OpCall) -> _Found | None:
        """Returns the call that a checkpoint made before, without gradients; its line is unknown by now."""
        several = self._without.get((call.site, call.module))
        if not several:
            return None
        several.rotate(-1)
        return several[-1]

    def _compare(self, found: _Found, call: OpCall, tensors: CallTensors) -> None:
        kept, low, arrival = found
        results = tensors_in([tensors.result])
        is_again = call.phase == "recompute"
        learns = any(each.requires_grad for each in results)
        if not is_again and not learns:  # a checkpoint may make it again, with gradients
            self._without[call.site, call.module].append(found)
        given = given_floats(tensors.given, tensors.given_kwargs)
        if len(low.input_dtypes) != len(given):
            return
        references, rounded = _results(low, tensors, self._reference)
        if not is_again:
            kept.arrivals.append(arrival)
        within = limits(low.low_type)
        if within is not None and not is_again:
            kept.inputs += [
                largest(each.detach()).float()
                for each in map(stored, given)
                if each.dtype.is_floating_point and is_measurable(each)
            ]
        for result, reference, other in zip(
            *(map(stored, each) for each in (results, references, rounded)), strict=False
        ):
            if not is_measurable(reference) or reference.shape != other.shape:
                continue
            if not is_floating(reference):
                if not is_again:
                    differ = (reference != other).sum().float()
                    kept.flips.append((differ, reference.numel()))
                continue
            differing = measured(reference, other, within)
            if not is_again:
                arrival.places.append(len(kept.measured))
                kept.measured.append(differing._replace(difference=None))
            if self._draws_gradients and not result.requires_grad and result.is_leaf:
                self._drawn.append(weakref.ref(result.requires_grad_()))
            if result.requires_grad:
                node_of(result)  # which `register_hook` has Python see
                assert differing.difference is not None
                hook = functools.partial(_keep_effect, arrival, differing.difference)
                self._hooks.append(result.register_hook(hook))

    def end(self) -> None:
        """Removes hooks and gradients, since a result may be a buffer or a parameter, which lives on."""
        for hook in self._hooks:
            hook.remove()
        for found in self._drawn:
            tensor = found()
            if tensor is not None:
                tensor.requires_grad_(False)
                tensor.grad = None


def _keep_effect(arrival: Arrival, difference: Tensor, gradient: Tensor) -> None:
    if gradient.dtype.is_complex:
        gradient = torch.view_as_real(gradient.resolve_conj())
    if gradient.shape == difference.shape:
        arrival.effects.append(effect(gradient, difference))


def _keep_propagated(kept: SiteNumbers, low: LowCall, results: list[Tensor]) -> None:
    """Compares samples of both runs' results, which include the errors of earlier calls."""
    here = [each for each in map(stored, results) if is_floating(each) and is_measurable(each)]
    for result, other in zip(here, low.samples, strict=False):
        values = sample(result.detach())
        if values.shape == other.shape:
            low_values = other.to(values.dtype)
            zero = torch.zeros_like(values)
            difference = torch.where(values == low_values, zero, low_values - values)
            kept.propagated.append(
                torch.stack(
                    [torch.linalg.vector_norm(difference), torch.linalg.vector_norm(values)]
                ).float()
            )


def _results(
    low: LowCall, tensors: CallTensors, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the results of a call: references, and those in low precision.

    A call that only follows inputs that are already low is compared on these inputs. The effect of their
    rounding is counted at its origin.
    """
    args, kwargs = tensors.given, dict(tensors.given_kwargs)
    given = tuple([each.dtype for each in given_floats(args, kwargs)])
    low_args, low_kwargs = _cast(args, kwargs, low.input_dtypes)
    # A call without a decision ran as it was, and must not be cast.
    run = tensors.run if low.call.cast_policy == "PASS" else tensors.run_cast
    rounded = tensors_in([run(*_fresh(tensors, low_args), **_fresh(tensors, low_kwargs))])
    reference: Any = tensors.result
    if low.call.cast_policy != "LOW" and given != low.input_dtypes:
        args, kwargs = low_args, low_kwargs
        reference = None
    if reference is None or dtype is not torch.float32:
        dtypes = [each.dtype for each in given_floats(args, kwargs)]
        wide = tuple([dtype if each.is_floating_point else each for each in dtypes])
        args, kwargs = _cast(args, kwargs, wide)
        reference = tensors.run(*_fresh(tensors, args), **_fresh(tensors, kwargs))
    return [each.detach() for each in tensors_in([reference])], rounded


def _cast(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtypes: tuple[torch.dtype, ...]
) -> tuple[tuple[Any, ...], Kwargs]:
    rest = iter(dtypes)

    def cast(tensor: Tensor) -> Tensor:
        if not is_floating(tensor):
            return tensor
        dtype = next(rest)
        is_cast = tensor.dtype is not dtype and {tensor.dtype, dtype} <= CAST.keys()
        return CAST[dtype](tensor) if is_cast else tensor

    cast_args = map_tensors(args, cast)
    return cast_args, {name: map_tensors(kwargs[name], cast) for name in sorted(kwargs)}


def _fresh(tensors: CallTensors, value: Any) -> Any:
    """Returns arguments that a call may write to."""
    if not tensors.writes:
        return value
    if isinstance(value, dict):
        return {name: map_tensors(each, Tensor.clone) for name, each in value.items()}
    return map_tensors(value, Tensor.clone)
