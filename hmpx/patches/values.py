"""Tensors that programs create, keep or pass on other than by calling ops.

A program's own gradients, numbers that fill tensors, branches and loops that torch traces, and tensors for
numpy. An fp32 program has fp32 there; casts elsewhere must not stop it. Results that it keeps as parameters and
buffers are upcast.

If a program never requests low precision, all its low-precision values come from the conversion. Requested
tensors stay unchanged. If there are any, other low-precision values are ambiguous: they stay too, with one
warning. Requests are recorded by memory, which covers views and in-place initialization. A dtype may also be
read from a result of the conversion: once such results exist, `x.to(dtype)` proves nothing about other values.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.overrides import (
    get_default_nowrap_functions,
    handle_torch_function,
    has_torch_function,
    has_torch_function_unary,
)
from torch.utils.hooks import BackwardHook

from .. import torch_state
from ..compute import held, widen
from ..errors import raised_here, warn
from ..patching import Draft, ItemPatch, Patch, entries
from ..places import is_ours
from ..tensors import (
    CAST,
    LOW_DTYPES,
    PLAIN_TENSORS,
    SEQUENCES,
    Function,
    is_low,
    short_name,
    widened,
    with_items,
)
from ..torch_internals import (
    BUFFER_HOOKS,
    NAMING_GETTERS,
    device_constructors,
    leave_uncompiled,
    rebuild_tensor,
)
from ..torch_state import has_casts, in_force, is_off, is_outside, without_casts, without_low_casts
from .compiled import unwrapped


def value_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches of functions that fill, branch, loop, take gradients, or make arrays of numpy."""
    device_constructors()  # makes torch cache its own `torch.full`
    yield Patch(torch, "full", _full(draft.attribute(torch, "full")))
    yield Patch(Tensor, "new_full", _new_full(draft.attribute(Tensor, "new_full")))
    for name, settle in (("cond", _cond), ("while_loop", _while_loop)):
        if hasattr(torch, name):  # both are prototypes
            original = draft.attribute(torch, name)
            wrapper = named_after(original, settle(original), name)
            package = original.__globals__["__package__"]  # torch imports it from there
            yield Patch(torch, name, wrapper)
            yield Patch(sys.modules[package], name, wrapper)
    grad = _grad(draft.attribute(Tensor, "grad"))
    yield Patch(Tensor, "grad", grad)
    # Subclasses of Tensor do not wrap their results: `x.grad is x.grad` holds.
    getters = get_default_nowrap_functions() | {grad.__get__}
    for module in NAMING_GETTERS:
        yield Patch(module, "get_default_nowrap_functions", lambda: getters)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield draft.around(Tensor, name, _register)
    yield draft.around(BackwardHook, "__init__", _collect)
    numpy_patch = draft.around(Tensor, "numpy", _numpy)
    for each in (numpy_patch.value, _numpy):  # graphs of their own would call them for their arrays
        leave_uncompiled(each, with_callees=False)
    yield numpy_patch
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "from_dlpack"):
        yield draft.around(numpy, "from_dlpack", _from_dlpack)


# --- numbers that new tensors are filled with, even those that a low dtype does not hold --------


def _full(original: Function) -> Function:
    def full(*args: Any, **kwargs: Any) -> Any:
        return _filled(original, kwargs.get("dtype"), args, kwargs)

    return named_after(original, full, "full")


def _new_full(original: Function) -> Function:
    def new_full(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype not in LOW_DTYPES and not kwargs:
            return original(self, *args)
        if has_torch_function_unary(self):
            return handle_torch_function(new_full, (self,), self, *args, **kwargs)
        return _filled(original, kwargs.get("dtype") or self.dtype, (self, *args), kwargs)

    return named_after(original, new_full, "new_full", Tensor)


def _filled(
    original: Function, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the tensor that ``original`` creates; its number is the last of ``args``, or ``fill_value``."""
    if not is_low(dtype):
        return original(*args, **kwargs)
    given = kwargs.get("fill_value", args[-1] if args else None)
    number = held(given, dtype)
    if number is given or torch_state.in_force() is None or torch_state.is_off():
        return original(*args, **kwargs)
    if "fill_value" in kwargs:
        return original(*args, **{**kwargs, "fill_value": number})
    return original(*args[:-1], number, **kwargs)


def named_after(original: Any, function: Function, name: str, owner: Any = torch) -> Function:
    """Makes ``function`` look like torch's ``original`` at ``owner.name``; returns it."""
    qualified = name if owner is torch else f"Tensor.{name}"
    function.__module__, function.__name__, function.__qualname__ = "torch", name, qualified
    function.__doc__ = original.__doc__
    vars(function).update(__wrapped__=unwrapped(original), __hmpx_filled__=True)
    return function


# --- branches and loops that torch traces: results get the dtypes that it expects ---------------


def _cond(original: Function) -> Function:
    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if is_off():
            return original(pred, true_fn, false_fn, operands)

        def widening(branch: Any) -> Any:
            return lambda *args: widened(branch(*args))

        return original(pred, widening(true_fn), widening(false_fn), operands)

    return cond


def _while_loop(original: Function) -> Function:
    def while_loop(cond_fn: Any, body_fn: Function, carried_inputs: Any) -> Any:
        def body(*carried: Any) -> Any:
            return _alike(body_fn(*carried), carried)

        return original(cond_fn, body, carried_inputs)

    return while_loop


def _alike(value: Any, given: Any) -> Any:
    """Returns ``value`` with the dtypes of ``given`` where both are floating, at any depth."""
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        return _cast(value, given.dtype)
    is_several = isinstance(value, SEQUENCES) and isinstance(given, SEQUENCES)
    if is_several and len(value) == len(given):  # else torch raises an error
        return with_items(value, [*map(_alike, value, given)])
    if isinstance(value, dict) and isinstance(given, dict):
        return {key: _alike(each, given.get(key)) for key, each in value.items()}
    return value


# --- gradients from hooks, and for `.grad` -----------------------------------------------------


def _grad(slot: Any) -> property:
    def set_grad(tensor: Tensor, value: Any) -> None:
        if type(value) in PLAIN_TENSORS and type(tensor) in PLAIN_TENSORS:
            value = _cast(value, tensor.grad_dtype if tensor.is_leaf else tensor.dtype)
        slot.__set__(tensor, value)

    return property(slot.__get__, set_grad, slot.__delete__, slot.__doc__)


def _register(register: Function, tensor: Tensor, hook: Function) -> Any:
    return register(tensor, _fitting(hook, 0))


def _collect(init: Function, self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
    hooks, pre_hooks = ([_fitting(hook, 1) for hook in h] for h in (user_hooks, user_pre_hooks))
    init(self, module, hooks, pre_hooks)


def _fitting(hook: Function, position: int) -> Function:
    """Makes ``hook`` return gradients in the dtypes of those that it gets at ``position``."""

    @functools.wraps(hook)
    def fitting(*args: Any) -> Any:
        if in_force() is None or torch.compiler.is_dynamo_compiling():
            return hook(*args)
        with without_low_casts():
            return _alike(hook(*args), args[position])

    return fitting


def _cast(value: Tensor, dtype: Any) -> Tensor:
    is_castable = dtype in CAST and dtype is not value.dtype and value.dtype in CAST
    return CAST[dtype](value) if is_castable else value


# --- numpy, which gets float32 copies of bfloat16 tensors instead of views ----------------------


def _numpy(original: Function, tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    if has_torch_function_unary(tensor):
        return handle_torch_function(Tensor.numpy, (tensor,), tensor, *args, **kwargs)
    return original(_known_to_numpy(tensor), *args, **kwargs)


def _from_dlpack(original: Function, x: Any, /, **kwargs: Any) -> Any:
    return original(_known_to_numpy(x) if isinstance(x, Tensor) else x, **kwargs)


def _known_to_numpy(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, or its values in float32 if it is bfloat16 and torch is converted."""
    is_bf16 = tensor.dtype is torch.bfloat16
    return widen(tensor) if is_bf16 and torch_state.in_force() is not None else tensor


_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

#: ``id`` -> memory that the program requested in low precision, and the memory of weights from `hmpx.freeze`.
_asked_for: Final = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
#: The last conversion in which the program made a request, and the last that has warned.
_asked: object = None
_warned: object = None


def kept_value_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches of functions that create low-precision tensors on request, or that keep tensors."""
    names = {function.__name__ for function in device_constructors()}
    names |= {name for name in vars(torch) if name.endswith("_like")}
    names |= {"from_dlpack", "from_file", "from_numpy", "frombuffer", "normal"}
    functions = (types.BuiltinFunctionType, types.FunctionType)
    requests = [(torch, n) for n in sorted(names) if isinstance(vars(torch).get(n), functions)]
    methods = [name for name in dir(Tensor) if name.startswith("new_")]
    constructors = []
    for owner, name in [*requests, *((Tensor, name) for name in (*methods, *_CASTS, "to", "type"))]:
        original = draft.attribute(owner, name)
        noting = named_after(original, _noting(original), name, owner)
        yield Patch(owner, name, noting)
        if unwrapped(original) in device_constructors():
            constructors.append(noting)
    yield entries(device_constructors(), *constructors)
    module, name = sys.modules[rebuild_tensor.__module__], rebuild_tensor.__name__
    yield Patch(module, name, functools.wraps(rebuild_tensor)(_noting(rebuild_tensor)))
    yield Patch(nn.Parameter, "__new__", _new(draft.attribute(nn.Parameter, "__new__")))
    yield Patch(Tensor, "data", _data(draft.attribute(Tensor, "data")))
    yield ItemPatch(BUFFER_HOOKS, "hmpx", _keep_buffer)
    parametrize = torch.nn.utils.parametrize
    for function in ("register_parametrization", "remove_parametrizations"):
        uncast = without_casts()(draft.attribute(parametrize, function))
        yield Patch(parametrize, function, uncast)  # compute the kept value, and check its dtype
    invert = draft.attribute(parametrize.ParametrizationList, "right_inverse")
    yield Patch(parametrize.ParametrizationList, "right_inverse", _right_inverse(invert))


# --- requests ----------------------------------------------------------------------------------


def _noting(original: Function) -> Function:
    """Makes ``original`` record the low-precision tensors that it creates on request, and raw memory for them."""
    is_function = isinstance(original, types.BuiltinFunctionType)  # torch looks up methods

    def noting(*args: Any, **kwargs: Any) -> Any:
        if is_function and has_torch_function(args):
            return handle_torch_function(noting, args, *args, **kwargs)
        made = original(*args, **kwargs)
        if type(made) in PLAIN_TENSORS and made.dtype in _NOTED and not _is_dynamo_compiling():
            _note(made, original.__name__, args, kwargs)
        return made

    return noting


def _note(made: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name not in _CASTS and args and made is args[0]:
        return  # already had the dtype
    if made.dtype not in LOW_DTYPES:
        _add(made)
        return
    is_named = kwargs.get("dtype") is not None or torch.dtype in map(type, args)
    if not (name in _CASTS or is_named):
        followed = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if followed and not any(map(_is_asked_for, followed)):
            return
    asker = sys._getframe(2).f_globals.get("__name__", "")
    if asker[:5] != "hmpx.":
        _add(made)
        if asker[:6] != "torch.":  # torch also requests the dtype of its inputs
            _ask(is_literal=name in _CASTS)


def _ask(*, is_literal: bool = False) -> None:
    """Records that the program requests a low dtype, unless it may have read that from a result."""
    global _asked
    if is_literal or not (_has_asked() or any(_low_tensors(in_force()))):
        _asked = in_force()


def _has_asked() -> bool:
    """Whether the program has requested low precision; low parameters show requests before `convert`."""
    return _asked is in_force() or _low_tensors(in_force())[0]


@functools.lru_cache(maxsize=1)
def _low_tensors(conversion: object) -> tuple[bool, bool]:
    """Returns whether there are low parameters, and low results, when that is first asked in a conversion."""
    found = [each for each in gc.get_objects() if type(each) in PLAIN_TENSORS]
    low = [each for each in found if each.dtype in LOW_DTYPES]
    return any(type(each) is nn.Parameter for each in low), not all(map(_is_asked_for, low))


#: Methods named after dtypes.
_CASTS: Final = ("bfloat16", "half")
#: File loaders use `Tensor.view` to turn these into low-precision tensors, which share their memory.
_NOTED: Final = LOW_DTYPES | {torch.int8, torch.int16, torch.uint8, torch.uint16}


def _add(tensor: Tensor) -> None:
    if (storage := _memory(tensor)) is not None:
        _asked_for[id(storage)] = storage


def _is_asked_for(tensor: Tensor) -> bool:
    storage = _memory(tensor)
    return storage is not None and _asked_for.get(id(storage)) is storage


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return _untyped_storage(tensor)
    except raised_here(RuntimeError):  # it has no memory of its own: a transform's, or sparse
        return None


_untyped_storage = Tensor.untyped_storage


# --- kept values -------------------------------------------------------------------------------


def _kept(value: Any, what: str) -> Any:
    """Returns ``value`` as it is kept as ``what`` by the frame that calls the caller.

    If torch itself is that frame, except `torch.nn`, it keeps a value that is not its own.
    """
    global _warned
    if type(value) not in PLAIN_TENSORS or value.dtype not in LOW_DTYPES or _is_dynamo_compiling():
        return value
    keeper: Any = sys._getframe(2)
    while keeper.f_code in _PASSING_ON:
        keeper = keeper.f_back
    name = str(keeper.f_globals.get("__name__"))
    if is_ours(name):
        _add(value)
    is_carried = keeper.f_code in _CARRYING or (name[:6] == "torch." and name[:9] != "torch.nn.")
    if is_carried or not has_casts(value.device.type) or is_outside():
        return value
    if _is_asked_for(value):
        _ask()
        return value
    if not _has_asked():
        return widen(value)
    if _warned is not in_force():
        _warned = in_force()
        warn(
            f"{what} is {short_name(value.dtype)}. The program also uses low precision itself, so hmpx can't "
            "tell whether that is intended. Compute it in `with hmpx.disable_casts():` to get the dtype "
            "that the program gives it, or call .float() on it. Shown once"
        )
    return value


#: Methods by which modules keep buffers, and methods that create parameters from parameters.
_PASSING_ON: Final = frozenset([nn.Module.__setattr__.__code__, nn.Module.register_buffer.__code__])
_CARRYING: Final = frozenset([nn.Module._apply.__code__, nn.Parameter.__deepcopy__.__code__])


def _new(original: Function) -> staticmethod[..., Any]:
    @functools.wraps(original)
    def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        return original(cls, _kept(data, "a parameter"), requires_grad)

    return staticmethod(new)


def _data(slot: Any) -> property:
    def set_data(tensor: Tensor, value: Any) -> None:
        if tensor.dtype is torch.float32:
            value = _kept(value, "the data of a tensor that was fp32")
        slot.__set__(tensor, value)

    return property(slot.__get__, set_data, doc=slot.__doc__)


def _keep_buffer(module: nn.Module, name: str, value: Tensor | None) -> Tensor | None:
    before = module._buffers.get(name)
    is_low = before is not None and before.dtype in LOW_DTYPES
    return value if is_low else _kept(value, f"the buffer {name!r}")


def _right_inverse(original: Function) -> Function:
    uncast = without_casts()(original)

    @functools.wraps(original)
    def right_inverse(self: Any, value: Tensor) -> None:
        uncast(self, _kept(value, "a parametrized tensor"))

    return right_inverse
