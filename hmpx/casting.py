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
import logging
import os
import re
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from . import records
from .dtypes import CAST, ELIGIBLE
from .ops import Parameters
from .policy import CastPolicy, Decision
from .records import Observer, OpCall

LOGGER: Final = logging.getLogger("hmpx")

_F = TypeVar("_F", bound=Callable[..., Any])
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({type(None), int, float, bool, complex})
_LOW_DTYPES = frozenset({torch.bfloat16, torch.float16})
_FLOAT32 = torch.float32
_STRIDED = torch.strided
_SEQUENCES = (list, tuple)
_DENSE = frozenset({torch.strided, torch.jagged})

# --- on and off --------------------------------------------------------------------------------

#: Whether casts may be off in some thread. While False, a call looks no further.
_may_be_off = False
_off_regions = 0  # regions with casts off that are open, in all threads together
_has_traced_regions = False  # torch.compile has put one into a graph: it may run at any time
_off_regions_lock = threading.Lock()
#: Depth of such regions in this thread, or asyncio task.
_off_depth: contextvars.ContextVar[int] = contextvars.ContextVar("hmpx_off_depth", default=0)
_thread = threading.local()  # .regions: those opened by Python code of this thread

# The state is marked in a place that torch itself carries along as well: the autocast bit of a
# device type that nobody has. torch.compile guards on it and captures it, and autograd's backward
# threads inherit it, as they do neither thread-locals nor context variables.
_MARK = "maia"


def _mark(is_off: bool) -> None:
    torch.set_autocast_enabled(_MARK, is_off)


def _is_marked() -> bool:
    return torch.is_autocast_enabled(_MARK)


class disable_casts:  # noqa: N801  # HMP's name; a context manager, like torch.no_grad
    """Switches casting off for a block, or for the calls of a decorated function.

    Holds for the current thread or asyncio task, nests, and restores the previous state however
    the block is left. As a decorator it takes functions, generators and coroutines.

    Example:
        >>> with hmpx.disable_casts():
        ...     optimizer.step()
    """

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            # torch.compile runs wrappers, it does not trace into them: they see the mark, which
            # becomes part of the graph.
            _note_traced_region()
            self._was_marked = _is_marked()
            _mark(True)
        else:
            _set_depth(_off_depth.get() + 1, regions=+1)

    def __exit__(self, *exc_info: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            _mark(self._was_marked)
        else:
            _set_depth(_off_depth.get() - 1, regions=-1)

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
    if torch.compiler.is_dynamo_compiling():
        return _is_marked()
    if _off_depth.get():
        return True
    # A mark that no code of this thread has set comes from a compiled graph, or is inherited by a
    # backward thread. Otherwise it is that of another asyncio task.
    return _is_marked() and not getattr(_thread, "regions", 0)


def keeps_state(function: _F) -> _F:
    """Returns ``function`` such that it runs with casts on or off as they are here and now.

    What runs it later may have switched them: a checkpoint's recomputation, an optimizer.
    """
    depth = _off_depth.get()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        there = _off_depth.get()
        _set_depth(depth, regions=+1)
        try:
            return function(*args, **kwargs)
        finally:
            _set_depth(there, regions=-1)

    return wrapper  # type: ignore[return-value]


def _set_depth(depth: int, regions: int) -> None:
    """Sets the depth of this thread or task; ``regions`` is +1 where a region begins, else -1."""
    global _may_be_off, _off_regions
    _off_depth.set(depth)
    _thread.regions = getattr(_thread, "regions", 0) + regions
    _mark(depth > 0)
    with _off_regions_lock:
        _off_regions += regions
        _may_be_off = _off_regions > 0 or _has_traced_regions


def _start_in_forked_child() -> None:
    """Leaves behind the regions and the lock of threads that the child does not have."""
    global _may_be_off, _off_regions, _off_regions_lock
    _off_regions_lock = threading.Lock()
    _off_regions = getattr(_thread, "regions", 0)
    _may_be_off = _off_regions > 0 or _has_traced_regions


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_in_forked_child)


def _note_traced_region() -> None:
    global _may_be_off, _has_traced_regions
    with _off_regions_lock:
        _may_be_off = _has_traced_regions = True


def _run_when_traced(function: Callable[..., Any]) -> None:
    """Makes torch.compile run ``function`` at trace time, once, instead of tracing into it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_run_when_traced(_note_traced_region)


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
        inplace_flag: Position of a Python function's ``inplace`` argument.
        fp32_positions: Positions of norm parameters that stay fp32; None if that depends on the
            call's device.
        cast_kinds: ``parameters.kinds`` without the buffers.
        skipped: Names whose values are no inputs to cast.
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

    inplace_flag: int | None = field(init=False)
    fp32_positions: frozenset[int] | None = field(init=False)
    cast_kinds: Mapping[int, str] = field(init=False)
    skipped: frozenset[str] = field(init=False)

    @property
    def may_lack_kernel(self) -> bool:
        """Whether a missing kernel for the low-precision dtype may be made up for in fp32."""
        return self.decision.dtype in _LOW_DTYPES and not self.in_place

    def __post_init__(self) -> None:
        """Works out what follows from the rest, here and not in each call."""
        names = self.parameters.names
        flag = names.index("inplace") if self.is_python and "inplace" in names else None
        kinds = {p: k for p, k in self.parameters.kinds.items() if names[p] not in self.never_cast}
        fp32_positions: frozenset[int] | None = frozenset()
        if self.decision.dtype in _LOW_DTYPES and self.norm_parameters:
            if self.device_types <= self.mixed_device_types:
                fp32_positions = frozenset(map(names.index, self.norm_parameters))
            elif self.device_types & self.mixed_device_types:
                fp32_positions = None
        object.__setattr__(self, "inplace_flag", flag)
        object.__setattr__(self, "fp32_positions", fp32_positions)
        object.__setattr__(self, "cast_kinds", kinds)
        object.__setattr__(self, "skipped", self.never_cast | self.parameters.plain | {"out"})


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

    def cast_value(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype is dtype or not _is_eligible(value, plan.device_types):
                return value
            keeps_fp32 = (
                name in plan.norm_parameters
                and value.dtype is torch.float32
                and dtype in _LOW_DTYPES
                and value.device.type in plan.mixed_device_types
            )
            return value if keeps_fp32 else cast(value)
        if isinstance(value, _SEQUENCES):
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
        first = out[0] if isinstance(out, _SEQUENCES) and out else out
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
    elif isinstance(value, _SEQUENCES):
        for item in value:
            _collect(item, found)


def _padded(names: tuple[str, ...], length: int) -> tuple[str, ...]:
    return names if len(names) >= length else names + ("",) * (length - len(names))


# Below the dispatcher (a decomposition, a meta function, a kernel written in Python) the call's
# dtypes were settled above it. This private test is exact; it is present since torch 2.0.
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_SNAPSHOT = torch._C.DispatchKey.PythonTLSSnapshot


def _below_dispatcher() -> bool:
    return _is_excluded(_SNAPSHOT)


_run_when_traced(_below_dispatcher)


# --- wrappers ----------------------------------------------------------------------------------


def make_wrapper(original: Callable[..., Any], plan: CallPlan) -> Callable[..., Any] | None:
    """Returns the wrapper of ``original`` at ``plan.site``; None if no call would ever be cast."""
    is_relative = plan.in_place or plan.decision.dtype is None
    if is_relative and not plan.is_python and not plan.parameters.has_several_tensors:
        return None  # there is no other input to cast
    dtype = plan.decision.dtype
    factory = _factory(_wrapper_source(plan, is_relative=is_relative))

    def cast(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        return cast_args(plan, args, kwargs)

    wrapper = factory(
        original,
        cast,
        functools.partial(_retry_in_fp32, plan, original),
        dtype,
        ELIGIBLE - {dtype},
        None if dtype is None else CAST[dtype],
        plan.device_types,
    )
    return _named_after(original, wrapper, plan.site)


def _lacks_kernel(error: RuntimeError) -> bool:
    """Whether ``error`` says that an op has no kernel for a low-precision dtype."""
    return _MISSING_KERNEL.search(str(error)) is not None


_MISSING_KERNEL = re.compile(
    r"not implemented for '(BFloat16|Half)'|[Ll]ow precision dtypes not supported"
)
_retried: set[tuple[str, torch.dtype | None]] = set()


def _retry_in_fp32(
    plan: CallPlan, original: Callable[..., Any], error: RuntimeError, args: _Args, kwargs: _Kwargs
) -> Any:
    """Returns the call's result computed in fp32 from inputs rounded as ever, and rounded itself.

    Raises:
        RuntimeError: ``error``, where a half-done in-place update can't be ruled out, or where the
            call has no low-precision input.
    """
    if _written_tensor(plan, args, kwargs) is not None:
        raise error
    args, kwargs = cast_args(plan, args, kwargs)
    inputs = floating_inputs(plan, args, kwargs)
    if not any(t.dtype in _LOW_DTYPES for t in inputs):
        raise error
    in_fp32 = replace(plan, decision=Decision(CastPolicy.FP32, torch.float32))
    args, kwargs = cast_args(in_fp32, args, kwargs)
    with disable_casts():
        result = original(*args, **kwargs)
    dtype = plan.decision.dtype
    if (plan.op, dtype) not in _retried:
        _retried.add((plan.op, dtype))
        LOGGER.warning("%s runs in fp32 and is rounded: %s", plan.op, error)
    return _rounded(result, CAST[dtype]) if dtype is not None else result


def _rounded(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value) if value.dtype is torch.float32 else value
    if isinstance(value, _SEQUENCES):
        new = [_rounded(item, convert) for item in value]
        if isinstance(value, list):
            return new
        # torch.return_types are tuples made from one sequence, named tuples from several values
        return value._make(new) if hasattr(value, "_make") else type(value)(new)
    return value


def make_observed_wrapper(
    original: Callable[..., Any], plan: CallPlan, observers: tuple[Observer, ...]
) -> Callable[..., Any]:
    """Returns a wrapper that casts as `make_wrapper`'s does and tells ``observers`` each call."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_off() or _below_dispatcher():
            return original(*args, **kwargs)
        dtype = target_dtype(plan, args, kwargs)
        new_args, new_kwargs = cast(args, kwargs)
        try:
            if plan.is_python:
                with disable_casts():
                    result = original(*new_args, **new_kwargs)
            else:
                result = original(*new_args, **new_kwargs)
        except RuntimeError as error:
            if not (plan.may_lack_kernel and _lacks_kernel(error)):
                raise
            result = retry(error, args, kwargs)
        before = floating_inputs(plan, args, kwargs)
        after = floating_inputs(plan, new_args, new_kwargs)
        outputs: list[Tensor] = []
        _collect_any(result, outputs)
        if before and plan.promotes and plan.decision.cast_policy is CastPolicy.WIDEST:
            dtype = before[0].dtype if plan.in_place else widest(before)  # torch's kernel does that
        cast_bytes = 0
        if not torch.compiler.is_dynamo_compiling():  # where sizes may be symbols
            for a, b in zip(before, after, strict=True):
                cast_bytes += b.numel() * b.element_size() if a.dtype is not b.dtype else 0
        tell(
            dtype,
            tuple([t.dtype for t in before]),
            tuple([t.dtype for t in after]),
            tuple([t.dtype for t in outputs]),
            before[0].device.type if before else None,
            cast_bytes,
        )
        return result

    def cast(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        return cast_args(plan, args, kwargs)

    def retry(error: RuntimeError, args: _Args, kwargs: _Kwargs) -> Any:
        return _retry_in_fp32(plan, original, error, args, kwargs)

    def tell(  # noqa: PLR0917  # torch.compile passes constants by position
        dtype: torch.dtype | None,
        input_dtypes: tuple[torch.dtype, ...],
        cast_dtypes: tuple[torch.dtype, ...],
        output_dtypes: tuple[torch.dtype, ...],
        device_type: str | None,
        cast_bytes: int,
    ) -> None:
        call = OpCall(
            op=plan.op,
            site=plan.site,
            function=original,
            cast_policy=plan.decision.cast_policy.name,
            reason=plan.decision.reason,
            dtype=dtype,
            input_dtypes=input_dtypes,
            cast_dtypes=cast_dtypes,
            output_dtypes=output_dtypes,
            device_type=device_type,
            cast_bytes=cast_bytes,
            module=records.module_path(),
            location=records.user_location(),
        )
        for observer in observers:
            observer(call)

    _run_when_traced(tell)
    return _named_after(original, wrapper, plan.site)


def retire(wrapper: Callable[..., Any]) -> None:
    """Makes ``wrapper`` act as its original does, wherever a reference to it was kept."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    cells["cast"].cell_contents = _cast_nothing
    if "retry" in cells:
        cells["retry"].cell_contents = _raise
    if "other_dtypes" in cells:
        cells["other_dtypes"].cell_contents = frozenset()
    if "tell" in cells:
        cells["tell"].cell_contents = _tell_nobody


def _raise(error: RuntimeError, args: _Args, kwargs: _Kwargs) -> Any:
    raise error


def _tell_nobody(*args: object) -> None:
    pass


def _cast_nothing(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    return args, kwargs


# The source of a wrapper, in parts. Unrolled for the positions that hold tensors, it casts twice
# as fast as a loop; ``cast`` is `cast_args` for every call that is not of the usual shape.

_HEAD = """
def make(original, cast, retry, dtype, other_dtypes, convert, device_types):
    def wrapper(*args, **kwargs):
        if _may_be_off and is_off():
            return original(*args, **kwargs)
"""

_CAST = """
        args, kwargs = cast(args, kwargs)
        return original(*args, **kwargs)
"""

#: A Python function is atomic: what it calls is not cast again.
_ATOMIC_CAST = """
        args, kwargs = cast(args, kwargs)
        with disable_casts():
            return original(*args, **kwargs)
"""

_TAIL = """
    return wrapper
"""

#: A low-precision op whose kernel lacks the type runs in fp32 instead.
_TRY = """
        try:
{body}
        except RuntimeError as error:
            if not _lacks_kernel(error):
                raise
            return retry(error, args, kwargs)
"""

_SETTLED = """
        try:
            settled = {test}
        except (AttributeError, IndexError):
            settled = False
        if settled:
            return original(*args)
"""

_UNROLLED = """
        if len(args) >= {count} and (not kwargs or {kwargs_are_plain}):
            if _below_dispatcher():
                return original(*args, **kwargs)
            is_usual = True
{casts}
            if is_usual:
                if len(args) == {count} and not kwargs:
                    return original({arguments})
                return original({arguments}, *args[{count}:], **kwargs)
"""

_UNROLLED_CAST = """
            {value} = args[{position}]
            if type({value}) in _PLAIN_TENSORS:
                dtype_ = {value}.dtype
                if dtype_ in other_dtypes:
                    if {value}.layout is not _STRIDED:
                        return original(*args, **kwargs)
                    if {is_to_be_cast}:
                        {value} = convert({value})
                elif dtype_ is not dtype and dtype_.is_floating_point:
                    return original(*args, **kwargs)
            elif {value} is not None{and_no_number}:
                is_usual = False
"""


def _wrapper_source(plan: CallPlan, *, is_relative: bool) -> str:
    """Returns the source of the factory that makes the wrapper for ``plan``."""
    body = _body_source(plan, is_relative=is_relative)
    if plan.may_lack_kernel:
        body = _TRY.format(body=textwrap.indent(body, "    "))
    return _HEAD + body + _TAIL


def _body_source(plan: CallPlan, *, is_relative: bool) -> str:
    if plan.is_python:
        return _ATOMIC_CAST
    kinds = plan.cast_kinds
    if is_relative:
        first = min(kinds, default=None)
        if first is None or kinds[first] != "T":
            return _CAST
        return _settled_source(plan, first) + _CAST
    if "A" in kinds.values() or plan.fp32_positions is None:
        return _settled_source(plan, None) + _CAST
    return _settled_source(plan, None) + _unrolled_source(plan) + _CAST


def _settled_source(plan: CallPlan, reference: int | None) -> str:
    """Returns the test whether all inputs have one dtype already, so that nothing is cast.

    That dtype is the plan's, or with ``reference`` that of the tensor at this position.
    """
    tests = ["not kwargs"]
    if reference is not None:
        tests.append(f"(dtype_ := args[{reference}].dtype)")
    dtype = "dtype" if reference is None else "dtype_"
    for position, kind in sorted(plan.cast_kinds.items()):
        if position == reference:
            continue
        value = f"args[{position}]"
        test = {
            "T": f"{value}.dtype is {dtype}",
            "O": f"({value} is None or {value}.dtype is {dtype})",
            "N": f"(type({value}) in _NUMBERS or {value}.dtype is {dtype})",
            "A": f"_is_settled({value}, {dtype})",
        }[kind]
        if position in (plan.fp32_positions or ()):
            test = f"({value} is None or {value}.dtype is _FLOAT32 or {value}.dtype is {dtype})"
        is_required = position < plan.parameters.required
        tests.append(test if is_required else f"(len(args) <= {position} or {test})")
    return _SETTLED.format(test=" and ".join(tests))


def _unrolled_source(plan: CallPlan) -> str:
    """Returns the casts of a call that gives all its tensors by position, to one fixed dtype."""
    count = max(plan.cast_kinds, default=-1) + 1
    device_types = sorted(plan.device_types)
    on_device = "{value}.device.type in device_types"
    if len(device_types) == 1 and hasattr(Tensor, f"is_{device_types[0]}"):
        on_device = f"{{value}}.is_{device_types[0]}"
    casts, arguments = [], [f"args[{position}]" for position in range(count)]
    for position, kind in sorted(plan.cast_kinds.items()):
        value = arguments[position] = f"a{position}"
        test = on_device.format(value=value)
        if position in (plan.fp32_positions or ()):
            test = f"dtype_ is not _FLOAT32 and {test}"
        and_no_number = f" and type({value}) not in _NUMBERS" if kind == "N" else ""
        casts.append(
            _UNROLLED_CAST.format(
                value=value, position=position, is_to_be_cast=test, and_no_number=and_no_number
            )
        )
    plain = "False" if plan.parameters.has_keyword_tensors else '"out" not in kwargs'
    return _UNROLLED.format(
        count=count, kwargs_are_plain=plain, casts="".join(casts), arguments=", ".join(arguments)
    )


def _is_settled(value: Any, dtype: torch.dtype) -> bool:
    """Whether no tensor in ``value``, a tensor or a list of them, has another dtype."""
    if isinstance(value, Tensor):
        return value.dtype is dtype
    if isinstance(value, _SEQUENCES):
        for item in value:
            if not _is_settled(item, dtype):
                return False
    return True


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
    wrapper.__hmpx_site__ = site  # type: ignore[attr-defined]
    return wrapper


def _collect_any(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            _collect_any(item, found)
