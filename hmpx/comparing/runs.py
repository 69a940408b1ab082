"""The runs of a model for a comparison, each from the same state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import raised_here, said_by, shown
from ..freezing import is_layer_cast
from ..inputs import Steps
from ..observers import Attached, CallTensors, OpCall, attach
from ..recording import Recorder
from ..tensors import (
    Opaque,
    copied,
    floating_parts,
    is_dense,
    map_all,
    parts_of,
    tensors_of,
    widened,
)
from ..torch_state import ModelState, disable_casts, reached_by, without_casts

#: Number of random projections of the outputs that replace a loss.
PROJECTIONS: Final = 4


#: An observer of one run.
Run = Callable[[OpCall, CallTensors | None], None]


@dataclass(frozen=True)
class Done:
    """The result of a run: outputs by place, floating-point and others, the loss or NaN."""

    outputs: dict[str, Tensor]
    others: dict[str, Any]
    loss: float
    error: str | None = None  # why the backward failed, if the user did not request one


class _Passing:
    """Passes observed calls on to the current run. Holds no model, since wrappers may outlive the block."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.recorder: Recorder | None = None

    def observe(self, call: OpCall, tensors: CallTensors | None) -> None:
        if self.run is not None:
            self.run(call, tensors)

    def count(self, call: OpCall, *values: Any) -> None:
        if self.recorder is not None:
            with torch.no_grad():  # gradients are not counted
                self.recorder(call, *values)


class Runs:
    """Runs a model, each time from its initial state."""

    def __init__(
        self,
        steps: Steps,
        batch: Any,
        seed: int,
        state: ModelState,
    ) -> None:
        self._steps, self._batch, self._seed, self._state = steps, batch, seed, state
        self._modules = [steps.model] if isinstance(steps.model, nn.Module) else []
        tensors = list(tensors_of(batch))
        outermost = reached_by(steps.model, batch, steps.forward_step).modules
        every = [each for outer in outermost for each in outer.modules()]
        self._layer_cast = list(filter(is_layer_cast, every))
        self.gradients_error: str | None = None  # of low precision; runs are then without gradients
        self.is_calling = False  # the model is running, or has failed
        self.parameters = {
            name.replace("_orig_mod.", ""): parameter
            for module in self._modules
            for name, parameter in module.named_parameters()
        }
        self._passing = _Passing()
        self.recorder = Recorder()  # of the calls of the run in low precision
        found = [*self.parameters.values(), *tensors]
        self.device_types = frozenset({each.device.type for each in found} or {"cpu"})

    # --- observation -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Passes on calls of runs to their observers. Wrappers are slow to make, so they are made once."""
        passing = self._passing
        with (
            attach(passing.observe, tensors=True, every_op=True),
            Attached(passing.count, every_op=True, values=True),
        ):
            yield

    # --- runs ------------------------------------------------------------------------------------

    def low(self, run: Run) -> tuple[Done, dict[str, Tensor]]:
        """Runs forward and backward as converted, and returns the result and the gradients."""

        def differentiate(scalars: list[Tensor]) -> str | None:
            compared = scalars[-1:]  # the one whose gradients `exact` compares
            self._state.keep_gradients(compared)
            return self._differentiate(compared)

        self._passing.recorder = self.recorder
        try:
            done = self._run(run, differentiate)
        finally:
            self._passing.recorder = None
        found = _taken(self.parameters)
        return done, found

    def exact(self, run: Run, low: Mapping[str, Tensor]) -> tuple[Done, list[tuple[str, Tensor]]]:
        """Runs forward and backward in float32; returns the result, and the gradients compared with ``low``."""
        compared: list[tuple[str, Tensor]] = []

        def differentiate(scalars: list[Tensor]) -> str | None:
            first = len(scalars) - 1
            error = self._differentiate(scalars[first:], keep=first > 0)
            compared.extend(
                _gradient_norms(_taken(self.parameters), low)
            )  # it has none of the others
            return error or self._differentiate(scalars[:first])

        try:
            with disable_casts():
                done = self._run(run, differentiate)
        finally:
            _taken(self.parameters)
        return done, compared

    def _call(self) -> Any:
        is_learning, learners = self.gradients_error is None, self.parameters.values()
        with without_casts():
            given = copied(self._batch)
            if not is_learning:
                given = map_all(given, Tensor.detach)
            elif not any(each.requires_grad for each in learners):
                # Gradients must arrive somewhere, to pass all calls.
                given = map_all(given, _learning_copy)
        with torch.set_grad_enabled(is_learning):
            return self._steps.forward(given)

    def _run(self, run: Run, differentiate: Callable[[list[Tensor]], str | None]) -> Done:
        self._state.restart()
        for module in self._layer_cast:
            module.requires_grad_(False)  # its weights refuse gradients
        self._passing.run = run
        try:
            self.is_calling = True
            found = self._call()
            self.is_calling = False
            with without_casts():
                found = widened(found)
                parts = [*parts_of(found)]
                outputs = floating_parts(parts)
                loss = math.nan
                if self._steps.loss_fn is not None:
                    scalars = [self._steps.scalar_loss(found, self._batch)]
                    loss = scalars[0].item()
                else:
                    scalars = self._projections([*outputs.values()])
            error = differentiate(scalars)
        finally:
            self._passing.run = None
        others = {each.where: each.value for each in parts if each.where not in outputs}
        outputs = {where: each.detach().clone() for where, each in outputs.items()}
        return Done(outputs, others, loss, error or self.gradients_error)

    def _differentiate(self, scalars: list[Tensor], *, keep: bool = False) -> str | None:
        """Differentiates scalars; returns the error if the user did not request gradients."""
        for index, scalar in enumerate(scalars):
            if scalar.requires_grad:
                try:
                    scalar.backward(  # type: ignore[no-untyped-call]
                        retain_graph=keep or index + 1 < len(scalars)
                    )
                except raised_here(RuntimeError) as error:
                    if self._steps.loss_fn is not None:
                        raise
                    return said_by(error)
        return None

    def _projections(self, outputs: list[Tensor]) -> list[Tensor]:
        learning = [each for each in outputs if each.requires_grad]
        generator = torch.Generator().manual_seed(self._seed)
        found = []
        for _ in range(PROJECTIONS if learning else 0):
            parts = []
            for each in learning:
                signs = torch.randint(0, 2, each.shape, generator=generator, dtype=torch.int8)
                signs = (2 * signs - 1).to(each.device, each.dtype)
                parts.append((_finite(each) * signs).sum().to(learning[0].device))
            found.append(torch.stack(parts).sum())
        return found


def _learning_copy(tensor: Tensor) -> Tensor:
    """Returns a copy that gets gradients; not a leaf, so that it may be written to."""
    is_real = tensor.dtype.is_floating_point and is_dense(tensor)
    return tensor.detach().requires_grad_().clone() if is_real else tensor


def _finite(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with 0 for values masked by infinities, and for NaN."""
    return torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))


def _taken(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients of parameters, and clears them."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def _gradient_norms(
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


def norm_of(outputs: Iterable[Tensor]) -> float:
    """Returns the norm of the finite part of outputs."""
    return math.hypot(*[torch.linalg.vector_norm(_finite(o.float())).item() for o in outputs])


def relative(outputs: dict[str, Tensor], references: dict[str, Tensor]) -> float:
    """Returns the norm of the differences over that of the references; NaN if they don't match."""
    shapes = {where: each.shape for where, each in references.items()}
    if not outputs or {where: each.shape for where, each in outputs.items()} != shapes:
        return math.nan
    differences = [0.0]
    for where, reference in references.items():
        a, b = outputs[where].float(), reference.float()
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        difference = torch.where(same, torch.zeros_like(a), a - b)
        differences.append(torch.linalg.vector_norm(difference).item())
    part, whole = math.hypot(*differences), norm_of(references.values())
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def different(low: Done, exact: Done) -> tuple[str, ...]:
    """Describes differences in outputs that are not floating-point, and outputs that can't be compared."""
    given, found = [{**each.others, **each.outputs} for each in (exact, low)]
    said = []
    for where in dict.fromkeys([*given, *found]):
        name = f"output {where}" if where else "the output"
        if where not in given or where not in found:
            only = "in low precision" if where in found else "in fp32"
            said.append(f"{name} is there {only} only")
        elif isinstance(given[where], Opaque):
            said.append(f"{name} can't be compared: {given[where].said}")
        elif isinstance(given[where], Tensor) and isinstance(found[where], Tensor):
            a, b = given[where], found[where]
            if a.shape != b.shape:
                said.append(
                    f"{name} has shape {tuple(a.shape)} in fp32, {tuple(b.shape)} in low precision"
                )
            elif where in exact.others and (count := int((a != b).sum())):
                said.append(f"{name}: {count} of {a.numel()} numbers differ")
        elif given[where] != found[where]:
            said.append(
                f"{name} is {shown(given[where])} in fp32, {shown(found[where])} in low precision"
            )
    return tuple(said)
