"""A planned training step, or forward, of a model, and its costs in each precision."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from .. import arguments
from ..errors import OptionError, PlanError, fielded, noted, shown, suggestion
from ..observers import Attached
from ..recording import Ledger, Recorder, raised_at
from ..reports import Memory, Report
from ..session import convert
from ..tensors import floats_of, stored_parameters
from ..torch_internals import differs_in_devices, lacks_kernel, needs_values
from .places import Place
from .sharding import ShardGroup, groups_of


@dataclass(frozen=True)
class Run:
    """The costs of a step in one precision.

    Attributes:
        name: ``"float32"``, ``"autocast"``, ``"hmpx"``, ``"casts not kept"``.
        memory: The memory of its tensors.
        report: Its calls; no rows in float32.
    """

    name: str
    memory: Memory
    report: Report

    __repr__ = fielded


@dataclass(frozen=True)
class Program:
    """A model, or a function that calls some, its outermost modules, and everything that a step needs."""

    model: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    inputs: Any
    loss_fn: Callable[[Any], Any] | None
    make_optimizer: Callable[[list[nn.Parameter]], Any] | None
    is_training: bool
    place: Place

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        found = {id(each): each for module in self.modules for each in stored_parameters(module)}
        return list(found.values())

    def run(
        self, name: str, conversion: Mapping[str, Any] | None
    ) -> tuple[Run, tuple[ShardGroup, ...]]:
        """Runs a step: converted with the given arguments of `convert`, or in float32.

        Returns:
            Its costs, and the groups of parameters.

        Raises:
            PlanError: The model needs values.
        """
        ledger, recorder = Ledger(), Recorder()
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            if conversion is not None:
                stack.enter_context(Attached(recorder, every_op=True, values=True))
                stack.enter_context(convert(**conversion))
            stack.enter_context(ledger.noting())
            for module in self.modules:
                ledger.note_module(module)
            groups = groups_of(self.modules, self._step())
        return Run(name, ledger.memory(), Report(recorder.rows())), groups

    def _step(self) -> Any:
        try:
            with torch.set_grad_enabled(self.is_training):
                args, kwargs = arguments.of_call(self.inputs)
                output = self.model(*args, **kwargs)  # it stays to the end of the step
                loss = self._loss(output)
                if loss is None:
                    return None
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise_explained(error, "the model raised it in a plan")
        learning = [each for each in self.parameters if each.requires_grad]
        if self.make_optimizer is None or not learning:
            return None
        optimizer = _made(self.make_optimizer, learning, self.place.device_type)
        with self.place.without_values():
            try:
                optimizer.step()
            except Exception as error:
                noted(
                    error,
                    "hmpx.plan: plan without this optimizer by optimizer=None, or another one",
                )
                raise
        return optimizer

    def _loss(self, output: Any) -> Tensor | None:
        if not self.is_training:
            return None
        if self.loss_fn is not None:
            return _checked(self.loss_fn(output))
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.reshape(()) if loss.requires_grad else None
        learning = [each for each in floats_of(output) if each.requires_grad]
        if not learning:
            return None
        return torch.stack([each.float().sum() for each in learning]).sum()

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.dtype.is_floating_point:
        is_tensor = isinstance(loss, Tensor)
        given = f"one of shape {list(loss.shape)} and {loss.dtype}" if is_tensor else shown(loss)
        raise OptionError(
            f"loss_fn must return a floating-point tensor of one element, not {given}"
        )
    if not loss.requires_grad:
        raise OptionError(
            "loss_fn returns a tensor that no gradient comes from: it depends on no parameter, or was "
            "computed under torch.no_grad(); for inference pass training=False"
        )
    return loss.reshape(())


def raise_explained(error: Exception, note: str) -> NoReturn:
    """Raises a `PlanError` if the error comes from tensors without values, else the same error with a note."""
    if found := _without_values(error):
        raise found from error
    if differs_in_devices(error):
        note += (
            "; make all tensors inside model_fn or inputs_fn, and give a module with its weights, not a "
            "function of one"
        )
    raise noted(error, f"hmpx.plan: {note}")


def _without_values(error: Exception) -> PlanError | None:
    """Returns the error to raise if tensors without values are the cause; None otherwise."""
    where = raised_at(error)
    at = f" at {where}" if where else ""
    op = needs_values(error)
    if op:
        return PlanError(
            f"what the model computes depends on values{at}: {op} (of .item(), nonzero, a mask as an "
            "index, or an if on a tensor), and tensors of a plan have none; pass small=True and a small "
            "config, with which it is run on real tensors"
        )
    op = lacks_kernel(error)
    if op:
        return PlanError(
            f"{op}{at} has no kernel for tensors without values; pass small=True and a small config, "
            "with which it is run on real tensors"
        )
    return None


# --- optimizers ----------------------------------------------------------------------------------

#: The ``optimizer`` argument of `plan`: None for no optimizer.
Optimizer = str | type[torch.optim.Optimizer] | Callable[[Iterable[nn.Parameter]], Any] | None

#: Devices on which torch's optimizers update all parameters at once by default.
_AT_A_TIME: Final = ("cuda", "xpu", "mtia")

_NAMES: Final = {
    name.lower(): found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
}


def parsed_optimizer(value: Any) -> tuple[str, Callable[[list[nn.Parameter]], Any] | None]:
    """Returns an optimizer's name and its factory; None for no optimizer."""
    if value is None:
        return "no optimizer", None
    if isinstance(value, str):
        return _named(value)
    if not callable(value):
        raise OptionError(
            f'optimizer must be a name such as "AdamW", a class or a function of parameters, not '
            f"{shown(value)}"
        )
    return getattr(value, "__name__", type(value).__name__), value


def _named(text: str) -> tuple[str, Callable[[list[nn.Parameter]], Any]]:
    name, *options = text.split()
    found = _NAMES.get(name.lower())
    if found is None:
        hint = suggestion(name.lower(), _NAMES) or f" (known: {', '.join(sorted(_NAMES))})"
        raise OptionError(f"optimizer: torch.optim has no {shown(name)}{hint}")
    try:
        pairs = [option.split("=", 1) for option in options]
        arguments = {key: ast.literal_eval(value) for key, value in pairs}
    except (ValueError, SyntaxError):
        raise OptionError(
            f'optimizer {shown(text)}: options are given as in "SGD momentum=0.9"'
        ) from None
    said = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{found.__name__} {said}".strip(), lambda parameters: found(parameters, **arguments)


def _made(
    make: Callable[[list[nn.Parameter]], Any], parameters: list[nn.Parameter], device_type: str
) -> Any:
    """Returns an optimizer that updates parameters as on the device."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        is_undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_undecided and device_type in _AT_A_TIME:
            group["foreach"] = True
    return optimizer
