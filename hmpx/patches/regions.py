"""Parts of torch that need to know whether casts are on, or that run with casts off.

Printing shows values as they are. The arithmetic of optimizers, of loss scaling and of gradient
clipping is not cast. A checkpointed forward is recomputed in the on/off state that it first ran in.
Modules that check dtypes before their ops run leave that to the ops. Calls that bypass all wrappers, of operators
such as `torch.ops.aten.mm` and of TorchScript, get fallbacks.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.backends.mha
import torch.utils.checkpoint
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import compute, torch_internals, torch_state
from ..errors import CheckpointError, HmpxWarning
from ..patching import Draft, Patch
from ..places import is_installed
from ..tensors import LOW_DTYPES, Args, Kwargs, tensors_of
from . import autocast_regions
from .early_names import subclasses


def region_patches(
    draft: Draft,
    add: Callable[[Patch], None],
    run_suspended: Callable[..., Any],
    low_dtype: torch.dtype | None,
) -> Iterator[Patch]:
    represent = draft.attribute(torch.Tensor, "__repr__")
    yield Patch(torch.Tensor, "__repr__", torch_state.without_casts()(represent))
    yield from _optimizer_patches(draft, add)
    yield from _scaler_patches(draft, add)
    for cell in torch_internals.CLIPPING:
        clip = draft.read(Patch(cell, "cell_contents", None))
        yield Patch(cell, "cell_contents", torch_state.without_casts()(clip), stays_idle=True)
    yield from _checkpoint_patches(draft)
    yield draft.around(torch.backends.mha, "get_fastpath_enabled", _has_fastpath)
    yield draft.around(torch.nn.RNNBase, "check_input", _check)
    yield from autocast_regions.patches(draft, low_dtype)
    yield from _beneath_patches(draft, run_suspended, low_dtype)


# --- optimizers --------------------------------------------------------------------------------


def _optimizer_patches(draft: Draft, add: Callable[[Patch], None]) -> Iterator[Patch]:
    for optimizer_class in subclasses(Optimizer):
        if torch_internals.has_hooked_step(optimizer_class):
            yield from _step_patches(optimizer_class, draft)

    def prepare(patch_step_function: Callable[..., Any], self: Optimizer) -> None:
        had_hooked_step = torch_internals.has_hooked_step(type(self))
        patch_step_function(self)
        if not had_hooked_step and torch_internals.has_hooked_step(type(self)):
            for patch in _step_patches(type(self), Draft()):
                add(patch)

    yield draft.around(Optimizer, torch_internals.PREPARE_STEP, prepare)


def _step_patches(optimizer_class: type[Optimizer], draft: Draft) -> Iterator[Patch]:
    # torch.compile also patches the steps of some classes on its first use.
    step = draft.attribute(optimizer_class, "step")
    yield Patch(optimizer_class, "step", _without_casts(step), stays_idle=True)
    # A scheduler of learning rates holds the hooked step of an optimizer that it was made for.
    for cell in step.__closure__ or ():
        computing = draft.read(Patch(cell, "cell_contents", None))
        yield Patch(cell, "cell_contents", _without_casts(computing), stays_idle=True)


def _without_casts(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``step`` with casts off, except in the closure, which is the user's forward."""

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(
            torch_state.keeps_state(each)
            if callable(each) and not isinstance(each, (Optimizer, torch.nn.Module))
            else each
            for each in args
        )
        if callable(kwargs.get("closure")):
            kwargs["closure"] = torch_state.keeps_state(kwargs["closure"])
        with torch_state.without_casts():
            return step(self, *args, **kwargs)

    return wrapper


# --- loss scaling ------------------------------------------------------------------------------

#: The methods of a loss scaler that a program calls.
_SCALING: Final = tuple(
    name
    for name, value in vars(GradScaler).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
)


#: Live scalers that have scaled a loss under a conversion; readers clear it.
SCALERS: Final[weakref.WeakSet[GradScaler]] = weakref.WeakSet()
#: Called with each optimizer whose step a loss scaler has skipped.
ON_SKIP: Final[list[Callable[[Optimizer], object]]] = []


def _scaler_patches(draft: Draft, add: Callable[[Patch], None]) -> Iterator[Patch]:
    """Patches torch's loss scaler and all classes derived from it, including later ones.

    A scale of 65,536 is infinite in float16.
    """
    patched = weakref.WeakSet[type[GradScaler]](subclasses(GradScaler))
    for scaler_class in list(patched):
        yield from _scaling_patches(scaler_class, draft)

    def prepare(init: Callable[..., Any], self: GradScaler, *args: Any, **kwargs: Any) -> None:
        for scaler_class in type(self).__mro__:
            if issubclass(scaler_class, GradScaler) and scaler_class not in patched:
                patched.add(scaler_class)
                for patch in _scaling_patches(scaler_class, Draft()):
                    add(patch)
        init(self, *args, **kwargs)

    yield draft.around(GradScaler, "__init__", prepare)


def _scaling_patches(scaler_class: type[GradScaler], draft: Draft) -> Iterator[Patch]:
    for name in _SCALING:
        method = draft.read(Patch(scaler_class, name, None))
        if isinstance(method, types.FunctionType):
            own = {"scale": _scale_without_casts, "step": _step_without_casts}
            wrapper = own.get(name, _without_casts)(method)
            yield Patch(scaler_class, name, wrapper, stays_idle=True)


def _step_without_casts(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``step`` with casts off, which tells of the steps that it skips."""
    uncast = _without_casts(step)

    @functools.wraps(step)
    def wrapper(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Optimizer):
            return uncast(self, optimizer, *args, **kwargs)
        made: list[object] = []
        hook = optimizer.register_step_post_hook(lambda *_: made.append(None))
        try:
            result = uncast(self, optimizer, *args, **kwargs)
        finally:
            hook.remove()
        for tell in [] if made else list(ON_SKIP):
            tell(optimizer)
        return result

    return wrapper


def _scale_without_casts(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``scale`` with casts off, except for losses computed lazily while it iterates."""

    @functools.wraps(scale)
    def wrapper(self: GradScaler, outputs: Any) -> Any:
        SCALERS.add(self)
        if isinstance(outputs, Iterator):
            outputs = iter(torch_state.keeps_state(outputs.__next__), _NO_LOSS)
        with torch_state.without_casts():
            scaled = scale(self, outputs)
        if isinstance(scaled, Iterator):
            return iter(torch_state.without_casts()(scaled.__next__), _NO_LOSS)
        return scaled

    return wrapper


_NO_LOSS: Final = object()


# --- checkpoints -------------------------------------------------------------------------------


def _checkpoint_patches(draft: Draft) -> Iterator[Patch]:
    """Patches the functions behind `torch.utils.checkpoint.checkpoint`, so early imports of it work."""
    apply = draft.read(Patch(torch.autograd.Function, "apply", None))

    # The descriptor of a class method: since torch 2.14 a C descriptor, called with the class.
    apply_to = getattr(apply, "__func__", apply)
    apply_as_training = torch_state.as_training(apply_to)

    def forward(original: Callable[..., Any], ctx: Any, function: Any, *args: Any) -> Any:
        setattr(ctx, _NOTED, True)
        return original(ctx, _as_it_runs_here(function, runs_first=True), *args)

    def backward(original: Callable[..., Any], ctx: Any, *args: Any) -> Any:
        if hasattr(ctx, _NOTED):
            return original(ctx, *args)
        with torch_state.without_casts():  # its forward ran before convert
            return original(ctx, *args)

    def non_reentrant(original: Callable[..., Any], fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_as_it_runs_here(fn, runs_first=False), *args, **kwargs)

    @functools.wraps(apply_to)
    def counting(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # Its forward records no gradients; its backward may run the same calls again, recording them.
        run = apply_as_training if torch_state.is_training() else apply_to
        return run(cls, *args, **kwargs)

    module = torch.utils.checkpoint
    yield draft.around(module.CheckpointFunction, "forward", forward)
    yield draft.around(module.CheckpointFunction, "backward", backward)
    yield draft.around(module, torch_internals.CHECKPOINT_GENERATOR, non_reentrant)
    yield Patch(torch.autograd.Function, "apply", classmethod(counting))


#: Attribute of a reentrant checkpoint's context, set if its forward ran under a conversion.
_NOTED: Final = "_hmpx_noted"


def _as_it_runs_here(function: Callable[..., Any], *, runs_first: bool) -> Callable[..., Any]:
    """Makes a checkpoint's ``function`` rerun under the conditions of its forward, or raise an error."""
    again = torch_state.keeps_place(torch_state.keeps_state(torch_state.keeps_kind(function)))
    again = torch_state.as_recomputation(again, after_first=runs_first)
    if torch_state.is_off():
        return again
    its_own, its_step = torch_state.conversion(), compute.ended_steps()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch_state.conversion() != its_own:
            raise CheckpointError(
                f"the checkpoint of {getattr(function, '__qualname__', type(function).__qualname__)} "
                "can't be recomputed: the conversion that its forward ran under was reverted or "
                "replaced, or its rules have changed, so the values would differ from those of the "
                "forward. Call backward() before hmpx.revert(), another hmpx.convert() or a change "
                "of rules"
            )
        if compute.ended_steps() != its_step:
            _warn_of_step(function)
        return again(*args, **kwargs)

    return wrapper


_warned_of_step: object = None  # the conversion that has warned


def _warn_of_step(function: Callable[..., Any]) -> None:
    """Warns, once per conversion, that a checkpoint is recomputed with the scales of another step."""
    global _warned_of_step
    if _warned_of_step is torch_state.in_force():
        return
    _warned_of_step = torch_state.in_force()
    warnings.warn(
        f"the checkpoint of {getattr(function, '__qualname__', type(function).__qualname__)} is recomputed "
        "after a step of an optimizer: formats with a history scale by other amaxes than in its forward; "
        "call backward() before step(), or take a format without a history. Said once",
        HmpxWarning,
        stacklevel=3,
    )


# --- modules that decide by dtypes before any op is called --------------------------------------


def _has_fastpath(get_fastpath_enabled: Callable[[], bool]) -> bool:
    # The inference fast path of TransformerEncoder and MultiheadAttention is one fused kernel,
    # which no list names.
    return torch_state.is_off() and get_fastpath_enabled()


def _check(check_input: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # It raises an error if the input's dtype differs from the weights', unless autocast is on.
    # The check calls no op, so autocast casts nothing.
    was_enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", was_enabled or not torch_state.is_off())
    try:
        check_input(*args, **kwargs)
    finally:
        torch.set_autocast_enabled("cpu", was_enabled)


# --- operators such as `torch.ops.aten.mm`, and TorchScript -------------------------------------


LOGGER: Final = logging.getLogger("hmpx")


def _complete(call: Callable[..., Any], operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(operator, *args, **kwargs)
    except Exception as error:
        again = _retry(functools.partial(call, operator), operator, error, args, kwargs)
        if again is None:
            raise
    return again()  # here nothing keeps the error's frames alive


def _retry(
    function: Callable[..., Any], operator: Any, error: Exception, args: Args, kwargs: Kwargs
) -> Callable[[], Any] | None:
    """Returns a function that computes the call in fp32; None if it failed for another reason."""
    # A traced graph would keep the failed call.
    if (
        torch_internals.dispatch_modes()
        or torch_state.is_below_dispatcher()
        or not compute.may_run_again(error)
    ):
        return None
    inputs = compute.inputs_of(args, kwargs)
    if inputs is None or inputs.low is None or not torch_state.has_casts(inputs.low.device.type):
        return None
    is_one = isinstance(operator, torch_internals.OpOverload)
    overloads = [operator] if is_one else [getattr(operator, n) for n in operator.overloads()]
    arguments = [each for overload in overloads for each in overload._schema.arguments]
    names = [each.name for each in overloads[0]._schema.arguments if not each.kwarg_only]
    writes = {each.name for each in arguments if each.alias_info and each.alias_info.is_write}
    callee = compute.Callee(str(operator), function, tuple(names), frozenset(writes), False, False)
    compute.note_legalized()
    _log(callee.op)
    return functools.partial(compute.in_fp32, callee, args, kwargs, inputs.first.dtype)


@functools.cache
def _log(operator: str) -> None:
    LOGGER.info("%s computes in fp32: it refuses the dtypes of its inputs", operator)


#: Functions that were traced during a conversion: their graphs hold the casts.
_traced: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def _beneath_patches(
    draft: Draft, run_suspended: Callable[..., Any], low_dtype: torch.dtype | None
) -> Iterator[Patch]:
    has_warned = False

    def script_uncast(script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        caller = sys._getframe(2)
        is_by_torch = str(caller.f_globals.get("__name__")).startswith("torch.")
        is_users = not (is_by_torch or is_installed(caller.f_code.co_filename))
        if is_users and not has_warned and torch_state.casts_any():
            has_warned = True
            warnings.warn(
                "torch.jit.script takes only torch's own functions, so scripted code is not cast. "
                "Use torch.jit.trace or torch.export to have the casts in the graph",
                HmpxWarning,
                stacklevel=3,
            )
        return run_suspended(script, *args, **kwargs)

    def trace(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        traced = original(*args, **kwargs)
        if torch_state.in_force() is not None:
            _traced.add(traced if isinstance(traced, torch_internals.SCRIPTED) else traced.forward)
        return traced

    def cast_inside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0] in _traced:
            return call(*args, **kwargs)
        for tensor in tensors_of((args[1:], kwargs)):
            if tensor.dtype in LOW_DTYPES and torch_state.has_casts(tensor.device.type):
                with torch.autocast(tensor.device.type, low_dtype):
                    return call(*args, **kwargs)
        return call(*args, **kwargs)

    yield draft.around(torch.jit, "script", script_uncast)
    # torch.compile also patches it on its first use.
    yield draft.around(torch.jit, "trace", trace, stays_idle=True)
    if low_dtype is not None:
        yield from [
            draft.around(kind, "__call__", cast_inside) for kind in torch_internals.SCRIPTED
        ]
    for operator_class in (torch_internals.OpOverload, torch_internals.OpOverloadPacket):
        yield draft.around(operator_class, "__call__", _complete)
