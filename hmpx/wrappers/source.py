"""The generated part of a wrapper: the way of a call to whose inputs nothing is to be done.

It is unrolled for the positions that hold tensors, which halves what such a call costs. Any other call goes
on to ``call``, which `calls` makes. Read tests/wrappers/golden first.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import textwrap
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import has_torch_function, has_torch_function_variadic

from ..casting import CallPlan, is_settled
from ..tensors import LOW_DTYPES, NUMBERS, PLAIN_TENSORS
from ..torch_internals import transforms
from ..torch_state import switch  # its gate, as it is at each call

# A call's arguments are a0, a1, ... up to the last that may be a tensor, and ``rest``.

_WRAPPER: Final = """\
def make(original, call, control, retry, dtype):
    def wrapper({parameters}*rest, **kwargs):
{body}

    return wrapper
"""

#: A call whose dtypes torch's function refuses runs in fp32 instead. What else is raised passes: no frame
#: but the wrapper's is in its traceback, and none holds it.
_TRY: Final = """\
try:
{body}
except Exception as error:
    again = retry(error, given({names}rest), kwargs)
    if again is None:
        raise
return again()"""

_SETTLED: Final = """\
if not (_looks_closer or control.looks_at_all or {has_torch_function}):
    try:
        settled = (
            {tests}
        )
    except AttributeError:
        settled = False
    if settled and not kwargs:
        if not rest:
            return {short}({names})
        if len(rest) == 1:
            return {short}({names}rest[0])
        if len(rest) == 2:  # a star takes 0.1 us
            return original({names}rest[0], rest[1])
        return original({names}*rest)
"""

#: Where keywords hold no tensor but ``out``.
_SETTLED_BESIDE_KEYWORDS: Final = """\
    if settled and "out" not in kwargs:
        return original({names}*rest, **kwargs)
"""

_CALL: Final = "return call(given({names}rest), kwargs)"


def make_generated(
    plan: CallPlan, **parameters: Any
) -> Callable[..., Any]:
    """Returns the wrapper for ``plan``.

    Args:
        plan: That of the call site.
        parameters: ``original``, torch's function; ``call``, which makes any call; the wrapper's `Control`;
            ``retry``, which makes up for a missing kernel; the ``dtype`` that inputs are cast to.
    """
    wrapper: Callable[..., Any] = _compiled(source_of(plan))(**parameters)
    return wrapper


@functools.cache
def _compiled(source: str) -> Callable[..., Callable[..., Any]]:
    """Returns the function that ``source`` defines: many ops share one."""
    # Names are the switch's globals, its gate above all, or constants in closure cells.
    parameters, body = ", ".join(_CONSTANTS), textwrap.indent(source, "    ")
    source = f"def bind({parameters}):\n{body}\n    return make\n"
    file_name = f"<{__name__} {next(_numbers)}>"
    # Tracebacks and debuggers show its lines.
    linecache.cache[file_name] = len(source), None, source.splitlines(keepends=True), file_name
    namespace: dict[str, Any] = {}
    exec(compile(source, file_name, "exec"), vars(switch), namespace)
    return namespace["bind"](**_CONSTANTS)  # type: ignore[no-any-return]


_numbers: Final = itertools.count(1)


class missing:  # noqa: N801  # a value
    """Stands for a positional argument that was not given."""

    dtype = None


def given(*values: Any) -> tuple[Any, ...]:
    """Returns a call's arguments as they were given: those with names, then the tuple of the rest."""
    *named, rest = values
    return (*[value for value in named if value is not missing], *rest)


_CONSTANTS: Final = {
    "missing": missing,
    "plain_tensors": PLAIN_TENSORS,
    "low_dtypes": LOW_DTYPES,
    "numbers": NUMBERS,
    "float32": torch.float32,
    "has_torch_function": has_torch_function,
    "has_torch_function_variadic": has_torch_function_variadic,
    "given": given,
    "transforms": transforms,
    "is_settled": is_settled,
}


def source_of(plan: CallPlan) -> str:
    """Returns the text of the function that makes the wrapper for ``plan``."""
    names = [f"a{position}" for position in range(plan.position_count)]
    listed = "".join([f"{name}, " for name in names])
    body = ""
    tests = _tests(plan) if names else []
    if tests:
        tensors = [f"a{position}" for position in plan.cast_kinds]
        asked = f"has_torch_function_variadic({', '.join(tensors)})"
        is_short = plan.rounds_last and "dtype" not in plan.site.parameters.names[: len(names) + 1]
        body = _SETTLED if plan.site.parameters.has_keyword_tensors else _SETTLED + _SETTLED_BESIDE_KEYWORDS
        body = body.format(
            has_torch_function=asked if plan.site.is_overridable else "False",
            tests="\n            and ".join(tests),
            short="original.__wrapped__" if is_short else "original",
            names=listed,
        )
    body += _CALL.format(names=listed)
    if plan.is_retried:
        body = _TRY.format(body=textwrap.indent(body, "    "), names=listed)
    parameters = "".join([f"{name}=missing, " for name in names]) + ("/, " if names else "")
    return _WRAPPER.format(parameters=parameters, body=textwrap.indent(body, " " * 8))


def _tests(plan: CallPlan) -> list[str]:
    """Returns the tests whether inputs have one dtype already; none where that is not told by tests.

    It is the plan's, or that of the first tensor where the dtype depends on the call.
    """
    if plan.emulation is not None or (plan.composes and not plan.keeps_shared_dtype):
        return []
    if plan.target is not None and not plan.site.in_place:
        return []  # its dtype need not be that of the first argument
    kinds, dtype, tests, reference = plan.cast_kinds, "dtype", [], None
    if plan.is_relative:
        dtype, reference = "dtype_", min(kinds)
        if kinds[reference] != "T":
            return []
        tests = [f"(dtype_ := a{reference}.dtype)"]
    sharing = _sharing(plan) if plan.site.statistics else []
    left = {reference, *sharing, *(plan.fp32_positions or ())}
    for position, kind in sorted(kinds.items()):
        if position not in left:
            tests.append(_TESTS[kind].format(f"a{position}", dtype))
    last = max(kinds)
    if kinds[last] == "A":
        tests.append(f"a{last} is not missing")  # the others have no dtype if they are missing
    if plan.fp32_positions:
        tests.append("type(a0) in plain_tensors")
    if sharing or plan.fp32_positions:
        tests.append(_norm_test(plan, sharing or sorted(plan.fp32_positions or ()), dtype))
    return tests


#: Kind of a position -> the test whether a value there has a dtype.
_TESTS: Final = {
    "T": "{0}.dtype is {1}",
    "O": "({0} is None or {0}.dtype is {1})",
    "N": "(type({0}) in numbers or {0}.dtype is {1})",
    "A": "is_settled({0}, {1})",
}


def _sharing(plan: CallPlan) -> list[int]:
    """Returns the positions of a norm's parameters and statistics, which share a dtype."""
    names = plan.site.parameters.names
    parameters = [p for p in plan.cast_kinds if names[p] in plan.facts.norm_parameters]
    return sorted([*parameters, *plan.statistic_positions])


def _norm_test(plan: CallPlan, positions: list[int], dtype: str) -> str:
    """Returns the test whether a norm's kernel takes what is at ``positions`` beside an input of ``dtype``.

    Whether it takes fp32 there is asked only where one of them is.
    """

    def are(dtype: str) -> str:
        return " and ".join([_TESTS["O"].format(f"a{p}", dtype) for p in positions])

    mixes = "not a0.is_nested and transforms() is None"
    ...
