"""`plan`: the cost of a training step, before there is a device, or memory, to run it on."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from .. import arguments, phases
from ..errors import OptionError, PlanError, noted, raised_here, said_by, shown, suggestion
from ..freezing import freeze
from ..inputs import Steps, is_factory
from ..observers import Attached
from ..recording import Ledger, Recorder, raised_at
from ..renames import renamed
from ..reports import Report
from ..session import about_run, check_names, checked_policy, convert, restoring, unconverted
from ..tensors import default_device_types, floats_of, map_all, parse_device_type, stored_parameters
from ..torch_internals import (
    DisableAutocast,
    differs_in_devices,
    lacks_kernel,
    needs_values,
    uncompiled,
)
from ..torch_state import named_tensors, reached_by, unchanged
from .places import PlannedDevice
from .result import Plan, Run, ShardGroup, groups_of


@restoring
@renamed(model_fn="model", inputs_fn="inputs")
def plan(
    model: Callable[..., Any],
    inputs: Any,
    device: str | None = None,
    *,
    forward_step: Callable[[Any, Any], Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: Optimizer = "AdamW",
    training: bool | None = None,
    small: bool = False,
    **conversion: Any,
) -> Plan:
    """Plans a training step: the dtype of each op, and the memory of its tensors.

    The step runs on tensors without values, in float32, with torch.autocast's casts, and with
    hmpx's. Sizes are those of tensors, without an allocator's overhead. A given model, the
    conversion and the RNG state are unchanged.

    Args:
        model: A function that returns the model; or a model, which is copied without its weights.
        inputs: Its arguments ([inputs](#inputs)), or a function that returns them; with ``forward_step`` any
            batch.
        device: A device type, such as ``"hpu"``, present or not; None for the one here.
        forward_step: As for ``compare``.
        loss_fn: As for ``compare``. None: the output's attribute ``loss`` or item ``"loss"``, else
            the sum of the outputs.
        optimizer: A name in `torch.optim`, with options: ``"SGD momentum=0.9"``; a class, or a function that
            takes a list of parameters and returns an optimizer; None for none.
        training: False plans a forward in evaluation mode without gradients. None: a training step,
            if parameters require gradients.
        small: Runs on real tensors on the CPU, for models whose computation depends on values.
        **conversion: Arguments of `hmpx.convert`. On devices other than the CPU native kernels are
            assumed (``legalize="never"``).

    Raises:
        OptionError: An argument has an invalid value, ``model`` returns no model, ``loss_fn`` no scalar, or
            the model does not take such inputs.
        PlanError: The model's computation depends on values. Its own errors pass, with a note.

    Example:
        >>> def build():
        ...     return torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 4096))
        >>> p = hmpx.plan(build, lambda: torch.randn(8, 4096), device="hpu", keep_weight_casts=True)
        >>> p.parameter_bytes, p.weight_cast_bytes, p.optimizer_bytes
        (134250496, 33554432, 268501008)
        >>> p.run("float32").memory.saved_bytes, p.saved_bytes
        (262144, 131072)
    """
    small = arguments.truth("small", small)
    device_type = _device_type(device)
    name, make_optimizer = _parsed_optimizer(optimizer, device_type)
    _check(model, training, conversion)
    steps = Steps("plan", model, forward_step, loss_fn)
    place = PlannedDevice(device_type, is_small=small)
    real = () if small else reached_by(model).modules  # whose values don't change
    but = [tensor for module in real for _, tensor in named_tensors(module)]
    with contextlib.ExitStack() as stack:
        reached = unchanged(model, inputs, forward_step, loss_fn, but=but)
        place.given = stack.enter_context(reached).tensors
        stack.enter_context(unconverted())
        stack.enter_context(uncompiled())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(DisableAutocast())
        stack.enter_context(place.entered())
        program = _Program(steps, inputs, make_optimizer, training, place)
        is_native = small or place.device_type != "cpu"
        native = {"legalize": "never"} if is_native else {}
        options = {**native, **conversion, "device_types": {place.device_type}}
        runs = _runs(program, options)
        frozen, notes = _frozen(program, options)
    if small:
        notes += ("run on real tensors, on the CPU, in a small size",)
    model = program.steps.model
    learns = any(each.learns for group in program.groups for each in group)
    if program.is_training and not learns:
        notes += ("no gradient comes from what the model returns, so that this is a forward",)
    return Plan(
        model=getattr(model, "__name__", type(model).__name__),
        device_type=device_type,
        optimizer=name,
        is_training=program.is_training and learns,
        parameters=sum(each.numel() for each in program.parameters),
        runs=runs,
        frozen_bytes=frozen,
        notes=notes,
        groups=program.groups,
        about=about_run(checked_policy(**conversion)),
    )


def _check(model: Any, training: Any, conversion: Mapping[str, Any]) -> None:
    if not callable(model):
        raise OptionError(
            f"model must be a function that returns a model, or a module, not {shown(model)}"
        )
    if training is not None:
        arguments.truth("training", training)
    check_names(plan, conversion)
    for each in ("verbose", "isVerbose", "device_types"):
        if each in conversion:  # it logs no calls, and has its own argument for the device
            hint = "; pass device" if each == "device_types" else ""
            raise OptionError(f"hmpx.plan takes no {each}{hint}")


def _device_type(device: str | torch.device | None) -> str:
    if device is None:
        return min(default_device_types())
    if isinstance(device, torch.device):
        return device.type
    return parse_device_type(
        "device", device.partition(":")[0] if isinstance(device, str) else device
    )


def _called(function: Callable[[], Any], name: str) -> Any:
    try:
        return function()
    except Exception as error:
        _raise_explained(error, f"{name} raised it")


def _runs(program: _Program, options: Mapping[str, Any]) -> tuple[Run, ...]:
    types = options["device_types"]
    autocast = {
        "lists": "autocast-cpu" if types == {"cpu"} else "autocast-cuda",
        "legalize": "never",
        "keep_weight_casts": True,
        "device_types": types,
    }
    if (low := options.get("low_precision_type")) in (torch.bfloat16, torch.float16):
        autocast["low_precision_type"] = low
    planned = {"float32": None, "autocast": autocast, "hmpx": options}
    runs = [program.run(name, conversion) for name, conversion in planned.items()]
    if runs[-1].memory.weight_cast_bytes:
        runs.append(program.run("casts not kept", {**options, "keep_weight_casts": False}))
    return tuple(runs)


def _frozen(program: _Program, options: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    model = program.steps.model
    if not isinstance(model, nn.Module) or program.place.is_small or program.steps.forward_step:
        return None, ()
    phases.enter("freeze")
    model.eval()
    try:
        with convert(**options), torch.no_grad():
            frozen = freeze(model, program.inputs, keep_fp32=False)
    except raised_here(Exception) as error:  # hmpx's, or the model's own
        return None, (f"hmpx.freeze can't freeze it: {said_by(error)}",)
    return sum(weight.stored_bytes for weight in frozen.weights), ()


# --- a step ---------------------------------------------------------------------------------------


class _Program:
    """A model, or a function that calls some, its outermost modules, and everything that a step needs."""

    def __init__(
        self,
        steps: Steps,
        inputs: Any,
        make_optimizer: OptimizerFactory | None,
        training: bool | None,
        place: PlannedDevice,
    ) -> None:
        phases.enter("model and inputs")
        with place.making():
            is_model = isinstance(steps.model, nn.Module)
            model = steps.model if is_model else _called(steps.model, "model()")
            inputs = _called(inputs, "inputs()") if is_factory(inputs) else inputs
        if not callable(model):
            raise OptionError(
                f"model() must return a model, or another function of the inputs, not {shown(model)}"
            )
        if isinstance(model, nn.Module):
            model = place.model(model)
            self.modules: tuple[nn.Module, ...] = (model,)
        else:
            self.modules = reached_by(model).modules
        learns = any(each.requires_grad for module in self.modules for each in module.parameters())
        self.is_training = learns if training is None else bool(training)
        for module in self.modules:
            module.train(self.is_training)
        loss_fn = steps.loss_fn
        loss_fn = place.model(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self.steps = replace(steps, model=model, loss_fn=loss_fn)
        self.inputs = map_all(inputs, place.placed)
        self.make_optimizer = make_optimizer
        self.place = place
        self.groups: tuple[ShardGroup, ...] = ()  # of parameters, as the last step left them

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        found = {id(each): each for module in self.modules for each in stored_parameters(module)}
        return list(found.values())

    def run(self, name: str, conversion: Mapping[str, Any] | None) -> Run:
        """Runs a step: converted with the given arguments of `convert`, or in float32.

        Raises:
            PlanError: The model needs values.
        """
        phases.enter(name)
        ledger, recorder = Ledger(), Recorder()
        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged(self.steps.model, self.inputs)).restart()
            if conversion is not None:
                stack.enter_context(Attached(recorder, every_op=True, values=True))
                stack.enter_context(convert(**conversion))
            stack.enter_context(ledger.noting())
            for module in self.modules:
                ledger.note_module(module)
            self.groups = groups_of(self.modules, self._step())
        return Run(name, ledger.memory(), Report(recorder.rows()))

    def _step(self) -> Any:
        try:
            with torch.set_grad_enabled(self.is_training):
                output = self.steps.forward(self.inputs)  # it stays to the end of the step
                loss = self._loss(output)
                if loss is None:
                    return None
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            _raise_explained(error, "the model raised it in a plan")
        learning = [each for each in self.parameters if each.requires_grad]
        if self.make_optimizer is None or not learning:
            return None
        optimizer = self.make_optimizer(learning)
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
        if self.steps.loss_fn is not None:
            scalar = self.steps.scalar_loss(output, self.inputs)
            if not scalar.requires_grad:
                raise OptionError(
                    "loss_fn returns a tensor that no gradient comes from: it depends on no parameter, or was "
                    "computed under torch.no_grad(); for inference pass training=False"
                )
            return scalar
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.reshape(()) if loss.requires_grad else None
        learning = [each for each in floats_of(output) if each.requires_grad]
        if not learning:
            return None
        return torch.stack([each.float().sum() for each in learning]).sum()


def _raise_explained(error: Exception, note: str) -> NoReturn:
    """Raises a `PlanError` if the error comes from tensors without values, else the same error with a note."""
    where = raised_at(error)
    at = f" at {where}" if where else ""
    small = "pass small=True and a small config, with which it is run on real tensors"
    if op := needs_values(error):
        raise PlanError(
            f"what the model computes depends on values{at}: {op} (of .item(), nonzero, a mask as an "
            f"index, or an if on a tensor), and tensors of a plan have none; {small}"
        ) from error
    if op := lacks_kernel(error):
        raise PlanError(f"{op}{at} has no kernel for tensors without values; {small}") from error
    if differs_in_devices(error):
        note += (
            "; make all tensors inside the functions of the model and the inputs, and give a module with its weights, not a "
            "function of one"
        )
    raise noted(error, f"hmpx.plan: {note}")


# --- optimizers ----------------------------------------------------------------------------------

#: The ``optimizer`` argument of `plan`: None for no optimizer.
Optimizer = str | type[torch.optim.Optimizer] | Callable[[Iterable[nn.Parameter]], Any] | None

OptimizerFactory = Callable[[list[nn.Parameter]], Any]

_NAMES: Final = {
    name.lower(): found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
}


def _parsed_optimizer(value: Any, device_type: str) -> tuple[str, OptimizerFactory | None]:
    """Returns an optimizer's name, and what makes one that updates parameters as on the device; None for none."""
    if value is None:
        return "no optimizer", None
    if isinstance(value, str):
        name, make = _named(value)
    elif callable(value):
        name, make = getattr(value, "__name__", type(value).__name__), value
    else:
        raise OptionError(
            f'optimizer must be a name such as "AdamW", a class or a function of parameters, not '
            f"{shown(value)}"
        )

    def made(parameters: list[nn.Parameter]) -> Any:
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            is_undecided = "foreach" in group and group["foreach"] is None
            # Devices on which torch's optimizers update all parameters at once by default.
            if is_undecided and not group.get("fused") and device_type in ("cuda", "xpu", "mtia"):
                group["foreach"] = True
        return optimizer

    return name, made


def _named(text: str) -> tuple[str, OptimizerFactory]:
    name, *options = text.split()
    found = _NAMES.get(name.lower())
    if found is None:
        hint = suggestion(name.lower(), _NAMES) or f" (known: {', '.join(sorted(_NAMES))})"
        raise OptionError(f"optimizer: torch.optim has no {shown(name)}{hint}")
    try:
        pairs = [option.split("=", 1) for option in options]
        arguments = {key: ast.literal_eval(value) for key, value in pairs}
    except raised_here(ValueError, SyntaxError):
        raise OptionError(
            f'optimizer {shown(text)}: options are given as in "SGD momentum=0.9"'
        ) from None
    said = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{found.__name__} {said}".strip(), functools.partial(found, **arguments)
