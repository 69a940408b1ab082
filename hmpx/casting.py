"""Casting the inputs of one call: the rules, the wrappers that apply them, and the off switch.

`cast_args` is the rule in full, pure and readable. `make_wrapper` generates, for one call site,
the wrapper that decides with a few identity checks whether there is anything to cast; whatever a
call does not need was settled when the wrapper was made. Knows neither lists nor how wrappers get
into torch.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import records
from .dtypes import CAST, ELIGIBLE
from .ops import Parameters
from .policy import CastPolicy, Decision
from .records import Observer, OpCall

_F = TypeVar("_F", bound=Callable[..., Any])
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({type(None), int, float, bool, complex})
_LOW_DTYPES = frozenset({torch.bfloat16, torch.float16})
_DENSE = frozenset({torch.strided, torch.jagged})

# --- on and off --------------------------------------------------------------------------------

#: Regions with casts off that are open in any thread. While it is 0, a call looks no further.
_off_regions = 0
_off_regions_lock = threading.Lock()
#: Depth of such regions in this thread, or asyncio task.
_off_depth: contextvars.ContextVar[int] = contextvars.ContextVar("hmpx_off_depth", default=0)


class disable_casts:  # noqa: N801  # HMP's name; a context manager, like torch.no_grad
    """Switches casting off for a block, or for the calls of a decorated function.

    Holds for the current thread or asyncio task, nests, and restores the previous state however
    the block is left. As a decorator it takes functions, generators and coroutines.

    Example:
        >>> with hmpx.disable_casts():
        ...     optimizer.step()
    """

    def __enter__(self) -> None:
        global _off_regions
        _off_depth.set(_off_depth.get() + 1)
        with _off_regions_lock:
            _off_regions += 1

    def __exit__(self, *exc_info: object) -> None:
        global _off_regions
        with _off_regions_lock:
            _off_regions -= 1
        _off_depth.set(_off_depth.get() - 1)

    def __call__(self, function: _F) -> _F:
        """Returns ``function`` with casts off while it runs."""
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"disable_casts can't decorate the async generator {function.__qualname__}; "
                "use `with disable_casts():` inside it"
            )
        wrapper: Any
        if asyncio.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with disable_casts():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (yield from _run_generator(function(*args, **kwargs)))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with disable_casts():
                    return function(*args, **kwargs)

        return wrapper  # type: ignore[no-any-return]


def is_off() -> bool:
    """Whether casts are off in this thread."""
    return _off_depth.get() > 0


def _run_generator(generator: Any) -> Any:
    """Runs ``generator`` with casts off inside it only, not in the code between its yields."""
    resume, value = generator.send, None
    while True:
        try:
            with disable_casts():
                yielded = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            value, resume = (yield yielded), generator.send
        except GeneratorExit:
            with disable_casts():
                generator.close()
            raise
        except BaseException as error:
            value, resume = error, generator.throw


# --- the rule ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallPlan:
    """All that is known of a call site when its wrapper is made.

    Attributes:
        op: Op name.
        site: Dotted name of the slot.
        decision: The policy's decision for the op.
        parameters: What the callable's arguments are.
        device_types: Tensors elsewhere are not cast.
        in_place: The callable writes to its first argument.
        promotes: torch's kernel takes mixed dtypes and gives the widest, in place too.
        is_python: The callable is implemented in Python: nothing inside it is cast.
        never_cast: Names of buffers.
        norm_parameters: Names of a norm's weight and bias, which stay fp32 beside a low-precision
            input on ``mixed_device_types``.
    """

    op: str
    site: str
    decision: Decision
    parameters: Parameters
    device_types: frozenset[str]
    in_place: bool = False
    promotes: bool = False
    is_python: bool = False
    never_cast: frozenset[str] = frozenset()
    norm_parameters: frozenset[str] = frozenset()
    mixed_device_types: frozenset[str] = frozenset()

    @functools.cached_property
    def inplace_flag(self) -> int | None:
        """Position of a Python function's ``inplace`` argument."""
        names = self.parameters.names
        return names.index("inplace") if self.is_python and "inplace" in names else None

    @functools.cached_property
    def skipped(self) -> frozenset[str]:
        """Names whose values are no inputs to cast."""
        return self.never_cast | self.parameters.plain | {"out"}


def cast_args(plan: CallPlan, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """Returns the arguments that ``plan`` makes of ``args`` and ``kwargs``; changes neither."""
    dtype = target_dtype(plan, args, kwargs)
    return (args, kwargs) if dtype is None else _cast_to(dtype, plan, args, kwargs)


def target_dtype(plan: CallPlan, args: _Args, kwargs: _Kwargs) -> torch.dtype | None:
    """Returns the dtype that the eligible inputs are cast to; None to leave the call alone."""
    if _below_dispatcher():
        return None
    target = _written_tensor(plan, args, kwargs)
    if target is not None:  # the tensor written to keeps its dtype, whatever the lists say
        return None if plan.promotes or target.dtype not in CAST else target.dtype
    inputs = floating_inputs(plan, args, kwargs)
    if not inputs:
        return None
    cast_policy = plan.decision.cast_policy
    if cast_policy is CastPolicy.FIRST:
        dtype = inputs[0].dtype
    elif cast_policy is CastPolicy.WIDEST:
        if plan.promotes:
            return None
        dtype = widest(inputs)
    else:
        if any(t.dtype not in ELIGIBLE or t.layout not in _DENSE for t in inputs):
            return None  # float64, float8 or sparse: casting the others would mix dtypes
        assert plan.decision.dtype is not None
        dtype = plan.decision.dtype
    return dtype if dtype in CAST else None


def floating_inputs(plan: CallPlan, args: _Args, kwargs: _Kwargs) -> list[Tensor]:
    """Returns the floating tensors among the inputs, in the order of the op's parameters."""
    found: list[Tensor] = []
    for name, value in zip(_padded(plan.parameters.names, len(args)), args, strict=False):
        if name not in plan.never_cast:
            _collect(value, found)
    order = {name: position for position, name in enumerate(plan.parameters.names)}
    for name in sorted(kwargs, key=lambda name: order.get(name, len(order))):
        if name not in plan.skipped:
            _collect(kwargs[name], found)
    return found


def widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the dtype that `torch.result_type` gives for these floating tensors together.

    0-dim tensors count only where there are no others.
    """
    tensors = list(tensors)
    dimensioned = [t.dtype for t in tensors if t.dim()] or [t.dtype for t in tensors]
    return functools.reduce(torch.promote_types, dimensioned)


def _cast_to(
    dtype: torch.dtype, plan: CallPlan, args: _Args, kwargs: _Kwargs
) -> tuple[_Args, _Kwargs]:
    cast = CAST[dtype]
    keeps_fp32: bool | None = None

    def cast_value(name: str, value: Any) -> Any:
        nonlocal keeps_fp32
        if isinstance(value, Tensor):
            if value.dtype is dtype or not _is_eligible(value, plan.device_types):
                return value
            if name in plan.norm_parameters:
                if keeps_fp32 is None:
                    keeps_fp32 = dtype in _LOW_DTYPES and (
                        value.device.type in plan.mixed_device_types
                    )
                if keeps_fp32 and value.dtype is torch.float32:
                    return value
            return cast(value)
        if isinstance(value, list | tuple):
            new = [cast_value(name, item) for item in value]
            if all(a is b for a, b in zip(new, value, strict=True)):
                return value
            if isinstance(value, list):
                return new
            return type(value)._make(new) if hasattr(value, "_make") else tuple(new)
        return value

    names = _padded(plan.parameters.names, len(args))
    new_args = tuple(
        value if name in plan.never_cast else cast_value(name, value)
        for name, value in zip(names, args, strict=False)
    )
    new_kwargs = {
        name: value if name in plan.skipped else cast_value(name, value)
        for name, value in kwargs.items()
    }
    return new_args, new_kwargs


def _written_tensor(plan: CallPlan, args: _Args, kwargs: _Kwargs) -> Tensor | None:
    """Returns the tensor that the call writes to: ``out=``, or the first one of an in-place op."""
    out = kwargs.get("out")
    if out is not None:
        first = out[0] if isinstance(out, list | tuple) and out else out
        return first if isinstance(first, Tensor) else None
    is_in_place = plan.in_place
    if plan.inplace_flag is not None:
        given = args[plan.inplace_flag] if len(args) > plan.inplace_flag else None
        is_in_place = is_in_place or bool(kwargs.get("inplace", given))
    if not is_in_place:
        return None
    names = plan.parameters.names
    first = args[0] if args else kwargs.get(names[0] if names else "self")
    return first if isinstance(first, Tensor) else None


def _is_eligible(tensor: Tensor, device_types: frozenset[str]) -> bool:
    return (
        tensor.dtype in ELIGIBLE and tensor.layout in _DENSE and tensor.device.type in device_types
    )


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point:
            found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)


def _padded(names: tuple[str, ...], length: int) -> tuple[str, ...]:
    return names if len(names) >= length else names + ("",) * (length - len(names))


# Below the dispatcher (a decomposition, a meta function, a kernel written in Python) the call's
# dtypes were settled above it. This private test is exact; it is present since torch 2.0.
_below_dispatcher: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.PythonTLSSnapshot
)


# --- wrappers ----------------------------------------------------------------------------------


def make_wrapper(original: Callable[..., Any], plan: CallPlan) -> Callable[..., Any] | None:
    """Returns the wrapper of ``original`` at ``plan.site``; None if no call would ever be cast."""
    kinds = plan.parameters.kinds
    is_relative = plan.in_place or plan.decision.dtype is None
    if is_relative and not plan.is_python and not plan.parameters.has_several_tensors:
        return None  # there is no other input to cast
    if plan.is_python:
        source = _PYTHON_LEVEL
    else:
        reference = _first_tensor_position(kinds) if is_relative else None
        if is_relative and reference is None:
            source = _UNCHECKED
        else:
            source = _checked_source(plan.parameters, reference)
    wrapper = _factory(source)(original, _fast_cast(plan), plan.decision.dtype)
    return _named_after(original, wrapper, plan.site)


def make_observed_wrapper(
    original: Callable[..., Any], plan: CallPlan, observers: tuple[Observer, ...]
) -> Callable[..., Any]:
    """Returns a wrapper that casts as `make_wrapper`'s does and tells ``observers`` each call."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _off_depth.get() or _below_dispatcher():
            return original(*args, **kwargs)
        dtype = target_dtype(plan, args, kwargs)
        new_args, new_kwargs = cast(args, kwargs)
        if plan.is_python:
            with disable_casts():
                result = original(*new_args, **new_kwargs)
        else:
            result = original(*new_args, **new_kwargs)
        before = floating_inputs(plan, args, kwargs)
        after = floating_inputs(plan, new_args, new_kwargs)
        outputs: list[Tensor] = []
        _collect_any(result, outputs)
        if before and plan.promotes and plan.decision.cast_policy is CastPolicy.WIDEST:
            dtype = before[0].dtype if plan.in_place else widest(before)  # torch's kernel does that
        call = OpCall(
            op=plan.op,
            site=plan.site,
            function=original,
            cast_policy=plan.decision.cast_policy.name,
            reason=plan.decision.reason,
            dtype=dtype,
            input_dtypes=tuple(t.dtype for t in before),
            cast_dtypes=tuple(t.dtype for t in after),
            output_dtypes=tuple(t.dtype for t in outputs),
            device_type=before[0].device.type if before else None,
            cast_bytes=sum(
                b.numel() * b.element_size()
                for a, b in zip(before, after, strict=True)
                if a.dtype is not b.dtype
            ),
            module=records.module_path(),
            location=records.user_location(),
        )
        for observer in observers:
            observer(call)
        return result

    cast: Callable[[_Args, _Kwargs], tuple[_Args, _Kwargs]] = functools.partial(cast_args, plan)
    return _named_after(original, wrapper, plan.site)


def retire(wrapper: Callable[..., Any]) -> None:
    """Makes ``wrapper`` act as its original does, wherever a reference to it was kept."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    cells["cast"].cell_contents = _cast_nothing
    if "observers" in cells:
        cells["observers"].cell_contents = ()


def _cast_nothing(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    return args, kwargs


def _fast_cast(plan: CallPlan) -> Callable[[_Args, _Kwargs], tuple[_Args, _Kwargs]]:
    """Returns `cast_args` for ``plan``, with a short way for plain tensors in the usual places."""
    reference = functools.partial(cast_args, plan)
    dtype = plan.decision.dtype
    kinds = plan.parameters.kinds
    if dtype is None or plan.in_place or plan.is_python or plan.norm_parameters:
        return reference
    if "A" in kinds.values() or plan.never_cast or plan.parameters.has_keyword_tensors:
        return reference
    positions = tuple(sorted(kinds))
    count = positions[-1] + 1 if positions else 0
    is_on_device = _device_test(plan.device_types)
    convert = CAST[dtype]
    float_dtypes = ELIGIBLE - {dtype}

    def cast(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        if kwargs and (len(args) < count or "out" in kwargs):
            return reference(args, kwargs)
        if _below_dispatcher():
            return args, kwargs
        new = list(args)
        for position in positions:
            if position >= len(new):
                break
            value = new[position]
            if type(value) in _PLAIN_TENSORS:
                value_dtype = value.dtype
                if value_dtype in float_dtypes:
                    if value.layout is not torch.strided:
                        return args, kwargs
                    if is_on_device(value):
                        new[position] = convert(value)
                elif value_dtype is not dtype and value_dtype.is_floating_point:
                    return args, kwargs
            elif value is not None and type(value) is not float and type(value) is not int:
                return reference(args, kwargs)
        return tuple(new), kwargs

    return cast


def _device_test(device_types: frozenset[str]) -> Callable[[Tensor], bool]:
    if len(device_types) == 1:
        flag = getattr(Tensor, f"is_{next(iter(device_types))}", None)
        if inspect.isgetsetdescriptor(flag):
            return flag.__get__
    return lambda tensor: tensor.device.type in device_types


_HEAD = """
def make(original, cast, dtype):
    def wrapper(*args, **kwargs):
        if _off_regions and _off_depth.get():
            return original(*args, **kwargs)
"""

#: A Python function is atomic: what it calls is not cast again.
_PYTHON_LEVEL = (
    _HEAD
    + """
        args, kwargs = cast(args, kwargs)
        with disable_casts():
            return original(*args, **kwargs)
    return wrapper
"""
)

_UNCHECKED = (
    _HEAD
    + """
        args, kwargs = cast(args, kwargs)
        return original(*args, **kwargs)
    return wrapper
"""
)

_CHECKED = (
    _HEAD
    + """
        try:
            settled = {test}
        except (AttributeError, IndexError):
            settled = False
        if settled and not kwargs:
            return original(*args)
        if not settled or {unseen}:
            args, kwargs = cast(args, kwargs)
        return original(*args, **kwargs)
    return wrapper
"""
)


def _checked_source(parameters: Parameters, reference: int | None) -> str:
    """Returns the source of a wrapper that tests whether all inputs have one dtype already.

    That dtype is the plan's, or with ``reference`` that of the tensor at this position.
    """
    tests = []
    if reference is not None:
        tests.append(f"(dtype_ := args[{reference}].dtype)")
    dtype = "dtype" if reference is None else "dtype_"
    for position, kind in sorted(parameters.kinds.items()):
        if position == reference:
            continue
        test = {
            "T": f"args[{position}].dtype is {dtype}",
            "N": f"(type(args[{position}]) in _NUMBERS or args[{position}].dtype is {dtype})",
            "A": f"_is_settled(args[{position}], {dtype})",
        }[kind]
        is_required = position < parameters.required
        tests.append(test if is_required else f"(len(args) <= {position} or {test})")
    count = max(parameters.kinds, default=-1) + 1
    keywords = (
        "True" if parameters.has_keyword_tensors else f'len(args) < {count} or "out" in kwargs'
    )
    return _CHECKED.format(test=" and ".join(tests) or "True", unseen=keywords)


def _is_settled(value: Any, dtype: torch.dtype) -> bool:
    """Whether no tensor in ``value``, a tensor or a list of them, has another dtype."""
    if isinstance(value, Tensor):
        return value.dtype is dtype
    if isinstance(value, list | tuple):
        for item in value:
            if not _is_settled(item, dtype):
                return False
    return True


def _first_tensor_position(kinds: Mapping[int, str]) -> int | None:
    first = min(kinds, default=None)
    return first if first is not None and kinds[first] == "T" else None


@functools.cache
def _factory(source: str) -> Callable[..., Callable[..., Any]]:
    """Returns the wrapper factory that ``source`` defines: many ops share one."""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{__name__} wrapper>", "exec"), globals(), namespace)
    return namespace["make"]  # type: ignore[no-any-return]


def _named_after(
    original: Callable[..., Any], wrapper: Callable[..., Any], site: str
) -> Callable[..., Any]:
    """Gives ``wrapper`` the name by which it can be imported, so that it can be pickled."""
    module, _, name = site.rpartition(".")
    if module == "torch.Tensor":
        module, name = "torch", f"Tensor.{name}"
    wrapper.__module__ = module
    wrapper.__name__ = getattr(original, "__name__", name)
    wrapper.__qualname__ = name
    wrapper.__doc__ = original.__doc__
    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    return wrapper


def _collect_any(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_any(item, found)
