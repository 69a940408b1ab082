"""`plan`: the cost of a training step, before there is a device, or memory, to run it on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import arguments
from ..errors import OptionError, said_by, shown
from ..freezing import freeze
from ..session import check_names, convert, unconverted
from ..tensors import default_device_types, parse_device_type
from ..torch_internals import DisableAutocast, uncompiled
from ..torch_state import reached_by
from .places import Place
from .result import Plan
from .sharding import ShardGroup
from .steps import Optimizer, Program, Run, parsed_optimizer, raise_explained

#: Arguments of `convert` that `plan` rejects: it logs no calls, and has its own argument for the device.
_REFUSED: Final = ("verbose", "isVerbose", "device_types")


def plan(
    model_fn: Callable[[], Any],
    inputs_fn: Any,
    device: str | None = None,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer = "AdamW",
    training: bool | None = None,
    small: bool = False,
    **conversion: Any,
) -> Plan:
    """Plans a training step: the dtype of each op, and the memory of its tensors.

    The step runs on tensors without values, in float32, with torch.autocast's casts, and with hmpx's.
    Sizes are those of tensors, without an allocator's overhead. An existing conversion is suspended
    meanwhile; the program's gradients and RNG state are unchanged.

    Args:
        model_fn: A function that returns the model; or a model, which is copied without its weights.
        inputs_fn: The model's input, or a function that returns it: a tuple holds positional arguments, a
            mapping named ones, anything else is a single argument.
        device: A device type, such as ``"hpu"``, present or not; None for the one here.
        loss_fn: Takes the model's output and returns a tensor of one element. None: the output's attribute
            ``loss`` or item ``"loss"``, else the sum of the outputs.
        optimizer: A name in `torch.optim`, with options: ``"SGD momentum=0.9"``; a class, or a function that
            takes a list of parameters and returns an optimizer; None for none.
        training: False plans a forward under `torch.no_grad` in evaluation mode. None: a training step, if
            the model has parameters that require gradients.
        small: Runs on real tensors on the CPU, for models whose computation depends on values.
        **conversion: Arguments of `hmpx.convert`. ``legalize`` is ``"never"`` if the device has native
            kernels, which is assumed of all but the CPU.

    Raises:
        OptionError: An argument has an invalid value, ``model_fn`` returns no model, or ``loss_fn`` returns
            no scalar.
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
    name, make_optimizer = parsed_optimizer(optimizer)
    _check(model_fn, training, conversion)
    place = Place(device_type, is_small=small)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unconverted())
        stack.enter_context(uncompiled())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(DisableAutocast())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(place.entered())
        program = _program(model_fn, inputs_fn, loss_fn, make_optimizer, training, place)
        options = _options(place, conversion)
        runs, groups = _runs(program, options)
        frozen, notes = _frozen(program, options)
    if small:
        notes += ("run on real tensors, on the CPU, in a small size",)
    model = program.model
    learns = any(each.learns for group in groups for each in group)
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
        groups=groups,
    )


def _check(model_fn: Any, training: Any, conversion: Mapping[str, Any]) -> None:
    if not callable(model_fn):
        raise OptionError(
            f"model_fn must be a function that returns a model, or a module, not {shown(model_fn)}"
        )
    if training is not None:
        arguments.truth("training", training)
    check_names(plan, conversion)
    for each in _REFUSED:
        if each in conversion:
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


def _program(  # noqa: PLR0917  # all there is to it
    model_fn: Any,
    inputs_fn: Any,
    loss_fn: Any,
    make_optimizer: Any,
    training: bool | None,
    place: Place,
) -> Program:
    with place.making():
        model = model_fn if isinstance(model_fn, nn.Module) else _called(model_fn, "model_fn")
        is_given = isinstance(inputs_fn, (Tensor, Mapping, list, tuple)) or not callable(inputs_fn)
        inputs = inputs_fn if is_given else _called(inputs_fn, "inputs_fn")
    if not callable(model):
        raise OptionError(
            f"model_fn must return a model, or another function of the inputs, not {shown(model)}"
        )
    if isinstance(model, nn.Module):
        model = place.model(model)
        modules: tuple[nn.Module, ...] = (model,)
    else:
        modules = reached_by(model).modules
    learns = any(each.requires_grad for module in modules for each in module.parameters())
    is_training = learns if training is None else bool(training)
    for module in modules:
        module.train(is_training)
    return Program(
        model, modules, place.inputs(inputs), loss_fn, make_optimizer, is_training, place
    )


def _called(function: Callable[[], Any], name: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise_explained(error, f"{name} raised it")


def _options(place: Place, conversion: Mapping[str, Any]) -> dict[str, Any]:
    native = {} if place.decided_by == "cpu" and not place.is_small else {"legalize": "never"}
    return {**native, **conversion, "device_types": {place.decided_by}}


def _runs(
    program: Program, options: Mapping[str, Any]
) -> tuple[tuple[Run, ...], tuple[ShardGroup, ...]]:
    types = options["device_types"]
    lists = "autocast-cpu" if types == {"cpu"} else "autocast-cuda"
    autocast = {
        "lists": lists,
        "legalize": "never",
        "reuse_casts": True,
        "keep_weight_casts": True,
        "device_types": types,
    }
    if (low := options.get("low_precision_type")) in (torch.bfloat16, torch.float16):
        autocast["low_precision_type"] = low
    runs = [program.run("float32", None)[0], program.run("autocast", autocast)[0]]
    found, groups = program.run("hmpx", options)
    runs.append(found)
    if found.memory.weight_cast_bytes:
        runs.append(program.run("casts not kept", {**options, "keep_weight_casts": False})[0])
    return tuple(runs), groups


def _frozen(program: Program, options: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    model, inputs = program.model, program.inputs
    if not isinstance(model, nn.Module) or program.place.is_small:
        return None, ()
    model.eval()
    args, kwargs = arguments.of_call(inputs)
    try:
        with convert(**options), torch.no_grad():
            frozen = freeze(model, *args, keep_fp32=False, **kwargs)
    except Exception as error:  # hmpx's, or the model's own
        return None, (f"hmpx.freeze can't freeze it: {said_by(error)}",)
    return sum(weight.stored_bytes for weight in frozen.weights), ()
