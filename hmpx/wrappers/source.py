"""The source of a wrapper: a few identity checks a call, generated for the op's signature.

Unrolled for the positions that hold tensors, it casts twice as fast as a loop. A call that is not of
the usual shape goes to ``cast``, which is `casting.cast_args`. Knows neither torch's ops nor lists.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import (
    handle_torch_function,
    has_torch_function,
    has_torch_function_variadic,
)

from .. import compute
from ..casting import Recipe, is_settled
from ..tensors import LOW_DTYPES, NUMBERS, PLAIN_TENSORS, SEQUENCES
from ..torch_internals import DisableAutocast, is_jit_tracing, transforms
from ..torch_state import switch  # its gate, as it is at each call

#: What the factory takes that `factory` returns; they become closure cells of the wrapper.
PARAMETERS: Final = (
    "original",  # torch's function
    "cast",  # casts the arguments of any call
    "run",  # runs the op once its inputs are cast: of the arguments, cast and as given
    "retry",  # makes up for a missing kernel
    "override",  # hands a call to ``__torch_function__``
    "dtype",
    "other_dtypes",
    "convert",
    "device_types",
    "is_autocast_on",
    "narrowed",  # where casts of some device types are off: the wrapper for the others, else None
    "is_large",  # whether a product of two matrices is not left to its kernel for its size
    "is_open",  # whether the first input is not on a device type that is left to torch's kernels
    "legalizes",  # False where ``run`` would do nothing else than call the function
)


class missing:  # noqa: N801  # a value
    """Stands for a positional argument that was not given."""

    dtype = None


def factory(recipe: Recipe) -> Callable[..., Callable[..., Any]]:
    """Returns the function of `PARAMETERS` that makes the wrapper for ``recipe``."""
    return _compiled(_source(recipe))


# A call's arguments are a0, a1, ... up to the last that may be a tensor, and ``rest``; cast ones are
# b0, b1, ...

_WRAPPER = """
def make({factory_parameters}):
    def wrapper({parameters}*rest, **kwargs):
        if {has_torch_function}:
            return override(wrapper, given({names}rest), kwargs)
        if _looks_closer:
            if is_off():
                return {plain_call}{narrows}
            if is_autocast_on():  # the lists win
                with DisableAutocast():
                    return wrapper(*given({names}rest), **kwargs)
{body}
    return wrapper
"""

#: Where several device types are covered, and torch.autocast is off for some of them only.
_NARROWS = """
            if (others := narrowed()) is not None:
                return others(*given({names}rest), **kwargs)"""

#: A call that fails on inputs that were cast runs in fp32 instead, whatever it says of its failure.
_TRY = """
        try:
{body}
        except Exception as error:
            return retry(error, given({names}rest), kwargs)
"""

#: Any call.
_CAST = """
        args = given({names}rest)
        if {is_overridden}:
            return override(wrapper, args, kwargs)
        cast_args, kwargs = cast(args, kwargs)
        return {call}
"""

#: As `_CAST`, where ``run`` casts.
_RUN_LATE = """
        args = given({names}rest)
        if {is_overridden}:
            return override(wrapper, args, kwargs)
        return run(original, args, kwargs, args)
"""

#: As `_CAST`, where ``run`` casts.
_RUN = """
        if {legalizes}:
            args = given({names}rest)
            if is_overridden(args, kwargs):
                return override(wrapper, args, kwargs)
            return run(original, args, kwargs, args)
"""

#: Nothing is to be cast.
_SETTLED = """
        try:
            settled = {test}
        except AttributeError:
            settled = False
        if settled:
            return {call}
"""

#: torch computes in fp32 by itself, where one of several inputs is.
_WIDENED = """
        try:
            widened = {test}
        except AttributeError:
            widened = False
        if widened:
            return {call}
"""

#: Plain tensors, all given by position, to one fixed dtype.
_UNROLLED = """
        if {last} is not missing and {kwargs_are_plain}:
            if is_below_dispatcher():
                return original({names}*rest, **kwargs)
            is_usual = True{mixes}
{casts}
            if is_usual:
                return {call}
"""

_UNROLLED_CAST = """
            b{position} = a{position}
            if type(b{position}) in plain_tensors:
                dtype_ = b{position}.dtype
                if dtype_ in other_dtypes:
                    if b{position}.layout is not strided:
                        is_usual = False
                    elif {is_to_be_cast}:
                        b{position} = convert(b{position}){or_number}
                elif dtype_ is not dtype and (dtype_.is_floating_point or dtype_.is_complex):
                    {leave_alone}
            elif b{position} is not None{and_no_number}:
                is_usual = False
"""

#: A 0-dim tensor on the CPU is cast with those beside it, wherever they are.
_NUMBER = """
                    elif not b{position}.dim():
                        is_usual = False"""

#: Whether a norm's parameters may stay fp32, as `casting` has it.
_MIXES = "type(a0) in plain_tensors and not a0.is_nested and transforms() is None"


def _source(recipe: Recipe) -> str:
    count = 0 if recipe.site.is_python else _count(recipe)
    names = [f"a{position}" for position in range(count)]
    listed = _listed(names)
    body = _body(recipe, listed)
    if recipe.is_retried:
        body = _TRY.format(body=textwrap.indent(body, "    "), names=listed)
    tensors = [names[position] for position in recipe.cast_kinds if position < count]
    return _WRAPPER.format(
        factory_parameters=", ".join(PARAMETERS),
        parameters=_listed([f"{name}=missing" for name in names]) + ("/, " if names else ""),
        has_torch_function=(
            "False"
            if not recipe.site.is_overridable
            else f"has_torch_function_variadic({', '.join(tensors)})"
            if tensors
            else "has_torch_function(rest)"
        ),
        names=listed,
        plain_call=_plain_call(names),
        narrows=_NARROWS.format(names=listed) if recipe.narrows else "",
        body=body,
    )


def _count(recipe: Recipe) -> int:
    """Returns the number of arguments that are looked at."""
    return max([*recipe.cast_kinds, *recipe.statistic_positions], default=-1) + 1


def _plain_call(names: list[str]) -> str:
    """Returns the call of torch's function with what was given."""
    if not names:
        return "original(*rest, **kwargs)"
    listed = _listed(names)
    is_given = f"{names[-1]} is not missing"
    return f"original({listed}*rest, **kwargs) if {is_given} else original(*given({listed}rest), **kwargs)"


def _legalizes(recipe: Recipe) -> str:
    """Returns the test whether the op may have to be legalized."""
    test, position = "legalizes", min(recipe.cast_kinds)
    if len(recipe.device_types) > 1 and recipe.cast_kinds[position] == "T":
        test += f" and is_open(a{position})"
    first = recipe.facts.first_matrix
    if first is None or not {first, first + 1} <= recipe.cast_kinds.keys():
        return test
    return f"{test} and is_large(a{first}, a{first + 1})"


def _listed(names: list[str]) -> str:
    return "".join([f"{name}, " for name in names])


def _body(recipe: Recipe, names: str) -> str:
    """Returns the part that looks at the arguments; ``names`` are ``"a0, a1, "``."""
    run, native = "run(original, cast_args, kwargs, args)", "original(*cast_args, **kwargs)"
    is_norm = bool(recipe.facts.norm_parameters or recipe.site.statistics)
    if recipe.site.is_python or is_norm or recipe.composes or recipe.emulation is not None:
        call = run
    else:
        call = f"{run} if legalizes else {native}" if recipe.legalizes else native
    is_overridden = "is_overridden(args, kwargs)" if recipe.site.is_overridable else "False"
    if recipe.returns_input_dtype:
        return _RUN_LATE.format(names=names, is_overridden=is_overridden)
    body = _CAST.format(names=names, call=call, is_overridden=is_overridden)
    if not names or recipe.emulation is not None:
        return body
    if recipe.target is not None and not recipe.site.in_place:
        return body  # its dtype need not be that of the first argument
    if recipe.is_relative:
        first = min(recipe.cast_kinds)
        return _settled(recipe, names, first) + body if recipe.cast_kinds[first] == "T" else body
    kinds = recipe.site.parameters.kinds
    is_fixed = not (
        "A" in recipe.cast_kinds.values()
        or recipe.fp32_positions is None
        or recipe.facts.never_narrows
        or any(kinds[position] == "N" for position in recipe.statistic_positions)
    )
    if is_fixed:
        body = _unrolled(recipe, names) + body
    if recipe.widens_to_fp32 and set(recipe.cast_kinds.values()) <= {"T", "O", "N"}:
        body = _widened(recipe, names) + body
    body = _settled(recipe, names, None) + body
    if not recipe.casts_late:
        return body
    test = _legalizes(recipe)
    if recipe.options.legalize != "fast":
        test += " and has_own_gradients(a0, a1)"
    return _RUN.format(names=names, legalizes=test) + body


def _settled(recipe: Recipe, names: str, reference: int | None) -> str:
    """Returns the part for inputs that have one dtype already.

    That dtype is the recipe's, or with ``reference`` that of the tensor at this position.
    """
    dtype, is_low = ("dtype", "") if reference is None else ("dtype_", " and dtype_ in low_dtypes")
    tests = [] if reference is None else [f"(dtype_ := a{reference}.dtype)"]
    last = max(recipe.cast_kinds)
    fitting = set(_sharing(recipe)) if recipe.site.statistics else set()
    for position, kind in sorted(recipe.cast_kinds.items()):
        if position == reference or position in fitting:
            continue
        value = f"a{position}"
        test = {
            "T": f"{value}.dtype is {dtype}",
            "O": f"({value} is None or {value}.dtype is {dtype})",
            "N": f"(type({value}) in numbers or {value}.dtype is {dtype})",
            "A": f"is_settled({value}, {dtype})",
        }[kind]
        if position in (recipe.fp32_positions or ()):
            test = f"({value} is None or {value}.dtype is float32 or {value}.dtype is {dtype})"
        tests.append(test)
    if recipe.cast_kinds[last] == "A":
        tests.append(f"a{last} is not missing")  # the others have no dtype if they are missing
    if recipe.site.statistics:
        tests.append(_fitting(recipe, dtype))
    if recipe.fp32_positions:
        tests.append(_MIXES)
    run = f"run(original, ({names}*rest), kwargs, ({names}*rest))"
    call = _short_call(names)
    if recipe.composes:
        call = run
    elif recipe.legalizes:
        call = f"{run} if {_legalizes(recipe)}{is_low} else {call}"
    return _SETTLED.format(test=" and ".join([*tests, "not kwargs"]), call=call)


def _widened(recipe: Recipe, names: str) -> str:
    """Returns the part for inputs of which one is fp32 and has dimensions."""
    tests = [
        f"(type(a{p}) in plain_tensors and a{p}.dtype is dtype and a{p}.dim() > 0)"
        for p in sorted(recipe.cast_kinds)
    ]
    return _WIDENED.format(test=" or ".join(tests), call=f"original(*given({names}rest), **kwargs)")


def _fitting(recipe: Recipe, dtype: str, cast: str = "a") -> str:
    """Returns the test whether a norm's kernel takes its statistics beside an input of ``dtype``.

    ``cast`` begins the names of the inputs.
    """
    values = [f"{cast if p in recipe.cast_kinds else 'a'}{p}" for p in _sharing(recipe)]

    def are(dtype: str) -> str:
        return " and ".join([f"({value} is None or {value}.dtype is {dtype})" for value in values])

    may_be_fp32 = recipe.decision.dtype in LOW_DTYPES and recipe.takes_fp32_statistics
    if not may_be_fp32:
        return f"({are(dtype)})"
    mixes = "mixes and " if cast == "b" and recipe.fp32_positions else ""
    return f"({mixes}{are('float32')} or {are(dtype)})"


def _sharing(recipe: Recipe) -> list[int]:
    """Returns the positions of a norm's parameters and statistics, which share a dtype."""
    names = recipe.site.parameters.names
    parameters = [p for p in recipe.cast_kinds if names[p] in recipe.facts.norm_parameters]
    return sorted([*parameters, *recipe.statistic_positions])


def _short_call(names: str) -> str:
    """Returns the call without keywords; a star in it takes 0.1 us."""
    one_more = f"original({names}rest[0]) if len(rest) == 1"
    return f"original({names}) if not rest else {one_more} else original({names}*rest)"


def _unrolled(recipe: Recipe, names: str) -> str:
    device_types = sorted(recipe.device_types)
    on_device = "b{position}.device.type in device_types"
    if len(device_types) == 1 and hasattr(Tensor, f"is_{device_types[0]}"):
        on_device = f"b{{position}}.is_{device_types[0]}"
    arguments = [f"{'b' if p in recipe.cast_kinds else 'a'}{p}" for p in range(_count(recipe))]
    # What promotes takes float64 numbers, tensors without dimensions, beside inputs that are cast.
    leave_alone = (
        "is_usual = False" if recipe.facts.promotes else f"return original({names}*rest, **kwargs)"
    )
    casts = []
    for position, kind in sorted(recipe.cast_kinds.items()):
        test = on_device.format(position=position)
        if position in (recipe.fp32_positions or ()):
            test = f"(dtype_ is not float32 or not mixes) and {test}"
        and_no_number = f" and type(b{position}) not in numbers" if kind == "N" else ""
        casts.append(
            _UNROLLED_CAST.format(
                position=position,
                leave_alone=leave_alone,
                is_to_be_cast=test,
                or_number="" if "cpu" in device_types else _NUMBER.format(position=position),
                and_no_number=and_no_number,
            )
        )
    cast = _listed(arguments)
    call = f"original({cast}*rest, **kwargs)"
    run = f"run(original, ({cast}*rest), kwargs, ({names}*rest))"
    if recipe.composes:
        call = run
    elif recipe.site.statistics:
        fitting = _fitting(recipe, "dtype", "b")
        test = f"legalizes or not {fitting}" if recipe.legalizes else f"not {fitting}"
        call = f"{run} if {test} else {call}"
    elif recipe.legalizes:
        call = f"{run} if {_legalizes(recipe)} else {call}"
    has_keywords = recipe.site.parameters.has_keyword_tensors
    return _UNROLLED.format(
        last=f"a{_count(recipe) - 1}",
        kwargs_are_plain="not kwargs" if has_keywords else '"out" not in kwargs',
        names=names,
        mixes=f"\n            mixes = {_MIXES}" if recipe.fp32_positions else "",
        casts="".join(casts),
        call=call,
    )


@functools.cache
def _compiled(source: str) -> Callable[..., Callable[..., Any]]:
    """Returns the wrapper factory that ``source`` defines: many ops share one."""
    # Names are the switch's globals, its gate above all, or constants in closure cells.
    parameters = ", ".join(_CONSTANTS)
    source = f"def bind({parameters}):\n{textwrap.indent(source, '    ')}\n    return make\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{__name__}>", "exec"), vars(switch), namespace)
    return namespace["bind"](**_CONSTANTS)  # type: ignore[no-any-return]


# --- what the source calls ---------------------------------------------------------------------


def given(*values: Any) -> tuple[Any, ...]:
    """Returns a call's arguments as they were given: those with names, then the tuple of the rest."""
    *named, rest = values
    return (*[value for value in named if value is not missing], *rest)


def is_overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a mode, or the class of an argument or of one in a list, overrides torch functions."""
    if has_torch_function(args):
        return True
    for value in args:
        if isinstance(value, SEQUENCES) and has_torch_function(value):
            return True
    return bool(kwargs) and is_overridden(tuple(kwargs.values()), {})


def hands_over(function: Callable[..., Any]) -> bool:
    """Whether torch has modes and tensor subclasses override a function of its own.

    One that is implemented in Python does that itself, or else leaves it to what it calls.
    """
    code = getattr(function, "__code__", None)
    return code is None or handle_torch_function.__name__ in code.co_names


def _has_own_gradients(x: Any, weight: Any) -> bool:
    """Whether `convolutions` may have use for the inputs as they are given."""
    if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
        return False
    return not is_jit_tracing() and compute.is_large(x, weight)


_CONSTANTS: Final = {
    "missing": missing,
    "plain_tensors": PLAIN_TENSORS,
    "low_dtypes": LOW_DTYPES,
    "numbers": NUMBERS,
    "float32": torch.float32,
    "strided": torch.strided,
    "has_own_gradients": _has_own_gradients,
    "has_torch_function": has_torch_function,
    "has_torch_function_variadic": has_torch_function_variadic,
    "given": given,
    "is_overridden": is_overridden,
    "DisableAutocast": DisableAutocast,
    "transforms": transforms,
    "is_settled": is_settled,
}
