"""The source of a wrapper: a few identity checks a call, put together for the op's signature.

Unrolled for the positions that hold tensors, it casts twice as fast as a loop. A call that is not of
the usual shape goes to ``cast``, which is `casting.cast_args`. Knows neither torch's ops nor lists.
"""

from __future__ import annotations

import textwrap
from typing import Final

from torch import Tensor

from ..casting import Recipe
from ..compute import LEAST_ELEMENTS
from ..tensors import LOW_DTYPES
from .optional_tensors import filled, placed, position_count
from .templates import (
    CAST,
    IS_PLAIN,
    MIXES,
    NARROWS,
    NUMBER,
    RUN,
    RUN_LATE,
    SETTLED,
    SETTLED_BESIDE_KEYWORDS,
    TRY,
    UNROLLED,
    UNROLLED_CAST,
    WIDENED,
    WRAPPER,
)

#: What the factory of wrappers takes; those that the wrapper uses become cells of its closure.
PARAMETERS: Final = (
    "original",  # torch's function
    "cast",  # casts the arguments of any call
    "run",  # runs the op once its inputs are cast: of the arguments, cast and as given
    "native",  # runs torch's kernel likewise, such that autograd keeps no casts of parameters
    "retry",  # makes up for a missing kernel, if that is why a call failed
    "override",  # hands a call to ``__torch_function__``
    "dtype",
    "other_dtypes",
    "convert",
    "device_types",
    "is_autocast_on",
    "narrowed",  # where some casts are off: the wrapper for the others, else None
    "may_legalize",  # whether a product of two matrices is not left to its kernel for its size
    "is_open",  # whether the first input is not on a device type that is left to torch's kernels
    "legalizes",  # False where ``run`` would do nothing else than call the function
)

#: What changes when the wrapper is retired: itself, by which it would be kept alive, and those of
#: `PARAMETERS` that are reached then. Others are not: without ``other_dtypes`` there is nothing to
#: convert, on whatever device, nor a cast that autograd may keep; and without ``legalizes`` nobody asks whether a call may be; ``dtype``
#: is merely compared with.
VARIABLES: Final = (
    "wrapper",
    "original",
    "cast",
    "run",
    "retry",
    "override",
    "other_dtypes",
    "is_autocast_on",
    "narrowed",
    "legalizes",
)


def source_of(recipe: Recipe) -> str:
    """Returns the text of the factory of wrappers for ``recipe``."""
    count = 0 if recipe.site.is_python else position_count(recipe)
    names = [f"a{position}" for position in range(count)]
    listed = _listed(names)
    body = _body(recipe, listed)
    if recipe.is_retried:
        body = TRY.format(body=textwrap.indent(body, "    "), names=listed)
    tensors = [names[position] for position in recipe.cast_kinds if position < count]
    return WRAPPER.format(
        factory_parameters=", ".join(PARAMETERS),
        variables=", ".join(VARIABLES),
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
        narrows=NARROWS.format(names=listed) if recipe.narrows else "",
        body=body,
    )


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
    return f"{test} and may_legalize(a{first}, a{first + 1})"


def _listed(names: list[str]) -> str:
    return "".join([f"{name}, " for name in names])


def _body(recipe: Recipe, names: str) -> str:
    """Returns the part that looks at the arguments; ``names`` are ``"a0, a1, "``."""
    run, native = "run(original, cast_args, kwargs, args)", "original(*cast_args, **kwargs)"
    keeps = recipe.keeps_parameters
    if keeps:
        native = "native(original, cast_args, kwargs, args, given_kwargs)"
    is_norm = bool(recipe.facts.norm_parameters or recipe.site.statistics)
    is_layered = recipe.site.is_python or is_norm or (recipe.is_fp32 and not recipe.facts.promotes)
    if is_layered or recipe.composes or recipe.emulation is not None:
        call = run
    else:
        call = f"{run} if legalizes else {native}" if recipe.legalizes else native
    is_overridden = "is_overridden(args, kwargs)" if recipe.site.is_overridable else "False"
    late = RUN_LATE.format(names=names, is_overridden=is_overridden)
    if recipe.returns_input_dtype:
        return (_settled_by_first(recipe, names) if recipe.keeps_shared_dtype else "") + late
    if recipe.selects:
        return _settled(recipe, names, None) + late
    keep = "\n        given_kwargs = kwargs" if keeps and "given_kwargs" in call else ""
    body = CAST.format(names=names, call=call, keep=keep, is_overridden=is_overridden)
    if not names or recipe.emulation is not None:
        return body
    if recipe.target is not None and not recipe.site.in_place:
        return body  # its dtype need not be that of the first argument
    if recipe.is_relative:
        return _settled_by_first(recipe, names) + body
    kinds = recipe.site.parameters.kinds
    is_fixed = not (
        "A" in recipe.cast_kinds.values()
        or recipe.fp32_positions is None
        or recipe.facts.never_narrows
        or "sparse" in recipe.site.parameters.plain  # by which the cast depends on the call
        or any(kinds[position] == "N" for position in recipe.statistic_positions)
    )
    if is_fixed:
        body = _unrolled(recipe, names) + body
    if recipe.widens_to_fp32 and set(recipe.cast_kinds.values()) <= {"T", "O", "N"}:
        body = _widened(recipe, names) + body
    settled = _settled(recipe, names, None)
    body = settled + filled(recipe, settled) + body
    if not recipe.casts_late:
        return body
    test = _legalizes(recipe)
    if recipe.options.legalize != "fast":
        has_own = "has_own_products" if recipe.site.op == "linear" else "has_own_gradients"
        test += f" and {has_own}(a0, a1)"
    return RUN.format(names=names, legalizes=test, fill=placed(recipe, names)) + body


def _settled_by_first(recipe: Recipe, names: str) -> str:
    """Returns the part for inputs that have the first one's dtype; nothing if that can be left out."""
    first = min(recipe.cast_kinds)
    if not names or recipe.cast_kinds[first] != "T":
        return ""
    settled = _settled(recipe, names, first)
    return settled + filled(recipe, settled)


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
        if position not in (recipe.fp32_positions or ()):
            tests.append(test)
    if recipe.cast_kinds[last] == "A":
        tests.append(f"a{last} is not missing")  # the others have no dtype if they are missing
    if recipe.fp32_positions:
        tests.append(IS_PLAIN)
    if recipe.site.statistics:
        tests.append(_fitting(recipe, dtype))
    elif recipe.fp32_positions:
        tests.append(_mixing(recipe, dtype))

    def call(plain: str) -> str:
        run = f"run(original, ({names}*rest), kwargs, ({names}*rest))"
        if recipe.composes and not recipe.keeps_shared_dtype:
            return run
        return f"{run} if {_legalizes(recipe)}{is_low} else {plain}" if recipe.legalizes else plain

    settled = SETTLED.format(test=" and ".join(tests), call=call(_call(recipe, names)))
    if recipe.site.parameters.has_keyword_tensors:
        return settled
    return settled + SETTLED_BESIDE_KEYWORDS.format(call=call(f"original({names}*rest, **kwargs)"))


def _mixing(recipe: Recipe, dtype: str) -> str:
    """Returns the test whether a norm's kernel takes its parameters beside an input of ``dtype``.

    What tells whether it takes them in fp32 is asked only where one of them is.
    """
    positions = sorted(recipe.fp32_positions or ())
    alike = [f"(d{p} := {dtype} if a{p} is None else a{p}.dtype) is {dtype}" for p in positions]
    # The first is known; the others are not where one before them was another dtype.
    first, *others = positions
    either = [f"(d{first} is float32 or d{first} is {dtype})"]
    either += [f"(a{p} is None or a{p}.dtype is float32 or a{p}.dtype is {dtype})" for p in others]
    return f"({' and '.join(f'({each})' for each in alike)} or {' and '.join(either)} and {MIXES})"


def _widened(recipe: Recipe, names: str) -> str:
    """Returns the part for inputs of which one is fp32 and has dimensions."""
    tests = [
        f"(type(a{p}) in plain_tensors and a{p}.dtype is dtype and a{p}.dim() > 0)"
        for p in sorted(recipe.cast_kinds)
    ]
    return WIDENED.format(test=" or ".join(tests), call=f"original(*given({names}rest), **kwargs)")


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
    mixes = f"{'mixes' if cast == 'b' else MIXES} and " if recipe.fp32_positions else ""
    return f"({mixes}{are('float32')} or {are(dtype)})"


def _sharing(recipe: Recipe) -> list[int]:
    """Returns the positions of a norm's parameters and statistics, which share a dtype."""
    names = recipe.site.parameters.names
    parameters = [p for p in recipe.cast_kinds if names[p] in recipe.facts.norm_parameters]
    return sorted([*parameters, *recipe.statistic_positions])


def _call(recipe: Recipe, names: str) -> str:
    """Returns the call without keywords; without a star, which takes 0.1 us, where few arguments follow.

    So many for all ops: there are fewer sources to be compiled. To round to a ``dtype=`` takes 0.15 us.
    """
    may_round = "dtype" in recipe.site.parameters.names[: position_count(recipe) + 1]
    short = "original.__wrapped__" if recipe.rounds_last and not may_round else "original"
    two = f"original({names}rest[0], rest[1]) if len(rest) == 2 else original({names}*rest)"
    one = f"{short}({names}rest[0]) if len(rest) == 1 else {two}"
    return f"{short}({names}) if not rest else {one}"


def _unrolled(recipe: Recipe, names: str) -> str:
    device_types = sorted(recipe.device_types)
    on_device = "b{position}.device.type in device_types"
    if len(device_types) == 1 and hasattr(Tensor, f"is_{device_types[0]}"):
        on_device = f"b{{position}}.is_{device_types[0]}"
    arguments = [
        f"{'b' if p in recipe.cast_kinds else 'a'}{p}" for p in range(position_count(recipe))
    ]
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
            UNROLLED_CAST.format(
                position=position,
                leave_alone=leave_alone,
                is_to_be_cast=test,
                or_number="" if "cpu" in device_types else NUMBER.format(position=position),
                and_no_number=and_no_number,
            )
        )
    cast = _listed(arguments)
    call = f"(original({cast}*rest, **kwargs) if kwargs else {_call(recipe, cast)})"
    if recipe.keeps_parameters:
        is_choosy = recipe.options.keep_weight_casts == "auto"
        size = f" and b{{0}}.nbytes >= {2 * LEAST_ELEMENTS}" if is_choosy else ""
        test = f"b{{0}} is not a{{0}}{size}"
        is_cast = " or ".join([test.format(p) for p in sorted(recipe.cast_kinds)])
        call = f"(native(original, ({cast}*rest), kwargs, ({names}*rest)) if {is_cast} else {call})"
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
    return UNROLLED.format(
        last=f"a{position_count(recipe) - 1}",
        kwargs_are_plain="not kwargs" if has_keywords else '"out" not in kwargs',
        names=names,
        mixes=f"\n            mixes = {IS_PLAIN} and {MIXES}" if recipe.fp32_positions else "",
        casts="".join(casts),
        call=call,
    )
