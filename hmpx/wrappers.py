"""Wrappers of torch's functions: what `casting` says, with a few identity checks a call.

`make_wrapper` generates, for one call site, the code that decides whether there is anything to cast;
whatever a call does not need was settled when the wrapper was made. Knows neither lists nor how
wrappers get into torch.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import pickling, records, switch
from .casting import (
    LOW_DTYPES,
    SEQUENCES,
    Args,
    CallPlan,
    Kwargs,
    cast_args,
    floating_inputs,
    target_dtype,
    transforms,
    widest,
    written_tensor,
)
from .dtypes import CAST, ELIGIBLE
from .policy import CastPolicy, Decision
from .records import Observer, OpCall
from .switch import disable_casts, is_below_dispatcher, is_off, run_when_traced

LOGGER: Final = logging.getLogger("hmpx")

_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({type(None), int, float, bool, complex})


def make_wrapper(original: Callable[..., Any], plan: CallPlan) -> Callable[..., Any] | None:
    """Returns the wrapper of ``original`` at ``plan.site``; None if no call would ever be cast."""
    is_relative = plan.in_place or plan.decision.dtype is None
    if is_relative and not plan.is_python and not plan.parameters.has_several_tensors:
        return None  # there is no other input to cast
    dtype = plan.decision.dtype
    factory = _factory(_wrapper_source(plan, is_relative=is_relative))

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return cast_args(plan, args, kwargs)

    wrapper = factory(
        original,
        cast,
        _runner(plan),
        functools.partial(_retry_in_fp32, plan, original),
        dtype,
        ELIGIBLE - {dtype},
        None if dtype is None else CAST[dtype],
        plan.device_types,
        torch._C._is_any_autocast_enabled,
    )
    return _named_after(original, wrapper, plan.site)


def _is_overridden(args: Args, kwargs: Kwargs) -> bool:
    """Whether a mode, or the class of an argument or of one in a list, overrides torch functions."""
    return (
        has_torch_function(args)
        or has_torch_function(tuple(kwargs.values()))
        or any(isinstance(v, SEQUENCES) and has_torch_function(v) for v in args)
        or any(isinstance(v, SEQUENCES) and has_torch_function(v) for v in kwargs.values())
    )


def _override(
    original: Callable[..., Any],
    wrapper: Callable[..., Any],
    cast: Callable[[Args, Kwargs], tuple[Args, Kwargs]],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Returns what the ``__torch_function__`` of a mode or an argument makes of a call of ``wrapper``.

    It is handed what stands under the function's name now, and the arguments as they came: what it
    calls in turn is cast. But a class that says by ``__torch_dispatch__`` how it computes is a tensor
    to be cast.
    """
    relevant = _values(args, kwargs)
    if not is_off() and any(_is_tensor_by_dispatch(value) for value in relevant):
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = cast(args, kwargs)
        relevant = _values(args, kwargs)
    if not isinstance(original, types.BuiltinFunctionType):  # methods are looked up by torch too
        return original(*args, **kwargs)
    return handle_torch_function(wrapper, relevant, *args, **kwargs)


def _values(args: Args, kwargs: Kwargs) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found.extend(value if isinstance(value, SEQUENCES) else [value])
    return found


def _is_tensor_by_dispatch(value: Any) -> bool:
    own = Tensor.__torch_dispatch__
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not own


def _lacks_kernel(error: RuntimeError) -> bool:
    """Whether ``error`` says that an op has no kernel for a low-precision dtype."""
    return _MISSING_KERNEL.search(str(error)) is not None


_MISSING_KERNEL = re.compile(
    r"not implemented for '(BFloat16|Half)'|[Ll]ow precision dtypes not supported"
)
_retried: set[tuple[str, torch.dtype | None]] = set()


def _retry_in_fp32(
    plan: CallPlan, original: Callable[..., Any], error: RuntimeError, args: Args, kwargs: Kwargs
) -> Any:
    """Returns the call's result computed in fp32 from inputs rounded as ever, and rounded itself.

    Raises:
        RuntimeError: ``error``, where a half-done in-place update can't be ruled out, or where the
            call has no low-precision input.
    """
    if written_tensor(plan, args, kwargs) is not None:
        raise error
    args, kwargs = cast_args(plan, args, kwargs)
    inputs = floating_inputs(plan, args, kwargs)
    if not any(t.dtype in LOW_DTYPES for t in inputs):
        raise error
    dtype = plan.decision.dtype
    assert dtype is not None
    with disable_casts():
        result = _computed_in_fp32(plan, original, args, kwargs, dtype)
    if (plan.op, dtype) not in _retried:
        _retried.add((plan.op, dtype))
        LOGGER.warning("%s runs in fp32 and is rounded: %s", plan.op, error)
    return result


def _computed_in_fp32(
    plan: CallPlan, function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> Any:
    """Returns the result of ``function`` on inputs raised to fp32, rounded to ``dtype``."""
    in_fp32 = replace(plan, decision=Decision(CastPolicy.FP32, torch.float32))
    args, kwargs = cast_args(in_fp32, args, kwargs)
    return _rounded(function(*args, **kwargs), CAST[dtype])


def _rounded(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value) if value.dtype is torch.float32 else value
    if isinstance(value, SEQUENCES):
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
        if _is_overridden(args, kwargs):
            return _override(original, wrapper, cast, args, kwargs)
        if is_off() or is_below_dispatcher():
            return original(*args, **kwargs)
        if is_autocast_on():
            with torch._C._DisableAutocast():
                return wrapper(*args, **kwargs)
        dtype = target_dtype(plan, args, kwargs)
        new_args, new_kwargs = cast(args, kwargs)
        try:
            result = run(original, new_args, new_kwargs)
        except RuntimeError as error:
            if not (plan.may_lack_kernel and _lacks_kernel(error)):
                raise
            result = retry(error, args, kwargs)
        before = floating_inputs(plan, args, kwargs)
        after = floating_inputs(plan, new_args, new_kwargs)
        outputs: list[Tensor] = []
        _collect_any(result, outputs)
        if not before:
            return result  # there was nothing to decide
        if plan.promotes and plan.decision.cast_policy is CastPolicy.WIDEST:
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
            before[0].device.type,
            cast_bytes,
        )
        return result

    run = _runner(plan)
    is_autocast_on = torch._C._is_any_autocast_enabled

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return cast_args(plan, args, kwargs)

    def retry(error: RuntimeError, args: Args, kwargs: Kwargs) -> Any:
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

    run_when_traced(tell)
    return _named_after(original, wrapper, plan.site)


#: Dotted name of a slot -> the wrapper that is in it.
_in_force: Final[dict[str, Callable[..., Any]]] = {}


def put_in_force(wrapper: Callable[..., Any]) -> None:
    """Lets wrappers of earlier conversions, wherever they were kept, pass their calls to ``wrapper``."""
    _in_force[vars(wrapper)["__hmpx_site__"]] = wrapper


def retire(wrapper: Callable[..., Any]) -> None:
    """Makes ``wrapper`` act as what is in its slot from now on, wherever a reference to it was kept."""
    site, original = vars(wrapper)["__hmpx_site__"], vars(wrapper)["__wrapped__"]
    _in_force.pop(site, None)

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = _in_force.get(site)
        # Not to a wrapper of what somebody else has put there since: that may call this one.
        is_same = current is not None and vars(current)["__wrapped__"] is original
        return (current if current is not None and is_same else original)(*args, **kwargs)

    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    replacements = {
        "original": forward,
        "cast": _cast_nothing,
        "run": _run,
        "retry": _raise,
        "other_dtypes": frozenset(),
        "is_autocast_on": bool,
        "tell": _tell_nobody,
    }
    for name in cells.keys() & replacements:
        cells[name].cell_contents = replacements[name]
    pickling.name_retired(wrapper, site)


def _runner(plan: CallPlan) -> Callable[[Callable[..., Any], Args, Kwargs], Any]:
    """Returns what runs the op once its inputs are cast."""
    if plan.is_python:
        return _run_atomically
    return functools.partial(_run_norm, plan) if plan.norm_parameters else _run


def _run(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return function(*args, **kwargs)


def _run_atomically(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Runs a Python function: what it calls is not cast again."""
    with disable_casts():
        return function(*args, **kwargs)


def _run_norm(plan: CallPlan, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Runs a norm, in fp32 where ONNX is to hold it, which takes no fp32 weights beside bf16.

    The kernels that do take them compute in fp32 too, and round the same result.
    """
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        dtype = floating_inputs(plan, args, kwargs)[0].dtype
        if dtype in LOW_DTYPES:
            return _computed_in_fp32(plan, function, args, kwargs, dtype)
    return function(*args, **kwargs)


def _raise(error: RuntimeError, args: Args, kwargs: Kwargs) -> Any:
    raise error


def _tell_nobody(*args: object) -> None:
    pass


def _cast_nothing(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return args, kwargs


# The source of a wrapper, in parts. Unrolled for the positions that hold tensors, it casts twice
# as fast as a loop; ``cast`` is `cast_args` for every call that is not of the usual shape.

_HEAD = """
def make(
    original, cast, run, retry, dtype, other_dtypes, convert, device_types, is_autocast_on
):
    def wrapper(*args, **kwargs):
        if has_torch_function(args):
            return override(original, wrapper, cast, args, kwargs)
        if _looks_closer:
            if is_off():
                return original(*args, **kwargs)
            if is_autocast_on():  # the lists win
                with DisableAutocast():
                    return wrapper(*args, **kwargs)
"""

_CAST = """
        if is_overridden(args, kwargs):
            return override(original, wrapper, cast, args, kwargs)
        args, kwargs = cast(args, kwargs)
        return original(*args, **kwargs)
"""

#: For the ops that `_runner` is about.
_CAST_AND_RUN = """
        if is_overridden(args, kwargs):
            return override(original, wrapper, cast, args, kwargs)
        args, kwargs = cast(args, kwargs)
        return run(original, args, kwargs)
"""

_TAIL = """
    return wrapper
"""

#: A low-precision op whose kernel lacks the type runs in fp32 instead.
_TRY = """
        try:
{body}
        except RuntimeError as error:
            if not lacks_kernel(error):
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
            if is_below_dispatcher():
                return original(*args, **kwargs)
            is_usual = True{mixes}
{casts}
            if is_usual:
                if len(args) == {count} and not kwargs:
                    return original({arguments})
                return original({arguments}, *args[{count}:], **kwargs)
"""

#: Whether a norm's parameters may stay fp32, as `casting` has it.
_MIXES = "type(args[0]) in plain_tensors and not args[0].is_nested and transforms() is None"

_UNROLLED_CAST = """
            {value} = args[{position}]
            if type({value}) in plain_tensors:
                dtype_ = {value}.dtype
                if dtype_ in other_dtypes:
                    if {value}.layout is not strided:
                        return original(*args, **kwargs)
                    if {is_to_be_cast}:
                        {value} = convert({value})
                elif dtype_ is not dtype and (dtype_.is_floating_point or dtype_.is_complex):
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
        return _CAST_AND_RUN
    cast = _CAST_AND_RUN if plan.norm_parameters else _CAST
    kinds = plan.cast_kinds
    if is_relative:
        first = min(kinds, default=None)
        if first is None or kinds[first] != "T":
            return cast
        return _settled_source(plan, first) + cast
    if "A" in kinds.values() or plan.fp32_positions is None or plan.never_narrows:
        return _settled_source(plan, None) + cast
    return _settled_source(plan, None) + _unrolled_source(plan) + cast


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
            "N": f"(type({value}) in numbers or {value}.dtype is {dtype})",
            "A": f"is_settled({value}, {dtype})",
        }[kind]
        if position in (plan.fp32_positions or ()):
            test = f"({value} is None or {value}.dtype is float32 or {value}.dtype is {dtype})"
        is_required = position < plan.parameters.required
        tests.append(test if is_required else f"(len(args) <= {position} or {test})")
    if plan.fp32_positions:
        tests.append(_MIXES)
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
            test = f"(dtype_ is not float32 or not mixes) and {test}"
        and_no_number = f" and type({value}) not in numbers" if kind == "N" else ""
        casts.append(
            _UNROLLED_CAST.format(
                value=value, position=position, is_to_be_cast=test, and_no_number=and_no_number
            )
        )
    plain = "False" if plan.parameters.has_keyword_tensors else '"out" not in kwargs'
    return _UNROLLED.format(
        count=count,
        kwargs_are_plain=plain,
        mixes=f"\n            mixes = {_MIXES}" if plan.fp32_positions else "",
        casts="".join(casts),
        arguments=", ".join(arguments),
    )


def _is_settled(value: Any, dtype: torch.dtype) -> bool:
    """Whether no tensor in ``value``, a tensor or a list of them, has another dtype."""
    if isinstance(value, Tensor):
        return value.dtype is dtype and type(value) in _PLAIN_TENSORS
    if isinstance(value, SEQUENCES):
        return all([_is_settled(item, dtype) for item in value])  # noqa: C419  # twice as fast
    return type(value) in _NUMBERS or type(value) is str


@functools.cache
def _factory(source: str) -> Callable[..., Callable[..., Any]]:
    """Returns the wrapper factory that ``source`` defines: many ops share one."""
    # Names are the switch's globals, its gate above all, or constants in closure cells.
    parameters = ", ".join(_CONSTANTS)
    source = f"def bind({parameters}):\n{textwrap.indent(source, '    ')}\n    return make\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{__name__}>", "exec"), vars(switch), namespace)
    return namespace["bind"](**_CONSTANTS)  # type: ignore[no-any-return]


_CONSTANTS: Final = {
    "plain_tensors": _PLAIN_TENSORS,
    "numbers": _NUMBERS,
    "float32": torch.float32,
    "strided": torch.strided,
    "has_torch_function": has_torch_function,
    "is_overridden": _is_overridden,
    "override": _override,
    "DisableAutocast": torch._C._DisableAutocast,
    "transforms": transforms,
    "is_settled": _is_settled,
    "lacks_kernel": _lacks_kernel,
}


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
    elif isinstance(value, SEQUENCES):
        for item in value:
            _collect_any(item, found)
