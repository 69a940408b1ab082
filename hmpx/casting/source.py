"""The generated part of a wrapper: the path of a call whose inputs need no cast.

It is unrolled for the positions that hold tensors, which halves the cost of such a call. Any other call goes
to ``call``, from `making`. Read tests/casting/golden first.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import has_torch_function_variadic

from ..compute import LEAST_ELEMENTS, Fused
from ..policy import RELATIVE
from ..tensors import LOW_DTYPES, NUMBERS, PLAIN_TENSORS
from ..torch_internals import transforms
from ..torch_state import is_below_dispatcher, open_regions
from .inputs import are_plain, casts_of, is_settled, unusual
from .plan import CallPlan

# A call's arguments are a0, a1, ... up to the last that may be a tensor, and ``rest``.

_WRAPPER: Final = """\
def make({parameters}):
    {unpacked}def wrapper({signature}*rest, **kwargs):
{body}

    return wrapper
"""

#: The parameters of the function that creates a wrapper: see `make_generated`.
_PARAMETERS: Final = (
    "original, call, cast_and_run, native, widens, casts, control, retry, dtype, fused"
)

#: A call whose dtypes torch's function rejects runs in fp32 instead. Other errors propagate: their
#: tracebacks have no frame but the wrapper's, and no frame keeps them alive.
_TRY: Final = """\
try:
{body}
except Exception as error:
    again = retry(error, given({names}rest), kwargs)
    if again is None:
        raise
return again()"""

#: If compiled nodes may compute calls.
_NODES: Final = """\
if not (open_regions or is_dynamo_compiling() or (nodes := control.nodes) is None):
    result = nodes({names}*rest, **kwargs)
    if result is not None:
        return result
"""

_SETTLED: Final = """\
if not (
    open_regions
    or {has_torch_function}
    or {looks}
):
{fill}    try:
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

#: Plain tensors, all given by position, to one fixed dtype.
_CAST: Final = """\
    if not ({unless}is_below_dispatcher()):
        {casts}
        if not ({are_unusual}):{if_large}
            if rest or kwargs:
                return original({cast}*rest, **kwargs)
            return original({cast})
"""

#: Optional tensors that are missing, or given by name, are put into their positions.
_FILL: Final = """\
    if {last} is missing and {before} is not missing and (not kwargs or are_plain(kwargs)):
        {fills}
"""

#: If compiled nodes may make several casts together.
_TOGETHER: Final = """\
together = None if is_dynamo_compiling() else fused({names})
        if together is not None:
            {cast} = together
        else:
            {casts}"""

#: If autograd may keep parameters instead of their casts.
_IF_LARGE: Final = """
            if (
                {are_large}
            ):
                return native(original, ({cast}*rest), kwargs, ({names}*rest), kwargs)"""

#: If keywords hold no tensor except ``out``.
_SETTLED_BESIDE_KEYWORDS: Final = """\
    if settled and "out" not in kwargs:
        return original({names}*rest, **kwargs)
"""


def make_generated(
    plan: CallPlan, *, fused: Fused | None = None, has_nodes: bool = False, **parameters: Any
) -> Callable[..., Any]:
    """Returns the wrapper for ``plan``; with ``has_nodes`` its ``control`` may get some."""
    casts = tuple(casts_of(plan).values())
    source = source_of(plan, is_fused=fused is not None, has_nodes=has_nodes)
    wrapper: Callable[..., Any] = _compiled(source)(casts=casts, fused=fused, **parameters)
    return wrapper


@functools.cache
def _compiled(source: str) -> Callable[..., Callable[..., Any]]:
    """Returns the function that ``source`` defines; many ops share one."""
    file_name = f"<{__name__} {next(_numbers)}>"
    # Tracebacks and debuggers show its lines.
    linecache.cache[file_name] = len(source), None, source.splitlines(keepends=True), file_name
    namespace: dict[str, Any] = {}
    exec(compile(source, file_name, "exec"), _GLOBALS, namespace)
    return namespace["make"]  # type: ignore[no-any-return]


_numbers: Final = itertools.count(1)


class missing:  # noqa: N801  # a value
    """Stands for a missing positional argument."""

    dtype = None


def given(*values: Any) -> tuple[Any, ...]:
    """Returns a call's original arguments: the named ones, then those in the tuple of the rest."""
    count = len(values) - 1
    while count and values[count - 1] is missing:
        count -= 1
    return values[:count] + values[-1]  # type: ignore[no-any-return]


is_dynamo_compiling = torch.compiler.is_dynamo_compiling
plain_tensors, low_dtypes, numbers, float32 = PLAIN_TENSORS, LOW_DTYPES, NUMBERS, torch.float32

#: What wrappers refer to by name. torch.compile looks all of them up in this module.
_GLOBALS: Final[dict[str, Any]] = {
    "__name__": __name__,
    "open_regions": open_regions,
    "is_below_dispatcher": is_below_dispatcher,
    "are_plain": are_plain,
    "missing": missing,
    "plain_tensors": plain_tensors,
    "low_dtypes": low_dtypes,
    "numbers": numbers,
    "float32": float32,
    "has_torch_function_variadic": has_torch_function_variadic,
    "given": given,
    "transforms": transforms,
    "is_dynamo_compiling": is_dynamo_compiling,
    "is_settled": is_settled,
    "unusual": unusual,
}


def source_of(plan: CallPlan, *, is_fused: bool = False, has_nodes: bool = False) -> str:
    names = [f"a{position}" for position in range(plan.position_count)]
    listed = "".join([f"{name}, " for name in names])
    arguments = f"given({listed}rest)" if names else "rest"
    tests = _tests(plan) if names else []
    body, is_cast = "", not (plan.composes or plan.selects or plan.site.statistics)
    casts = casts_of(plan) if tests and is_cast else {}
    if tests:
        tensors = [f"a{position}" for position in plan.cast_kinds]
        asked = f"has_torch_function_variadic({', '.join(tensors)})"
        may_round = "dtype" in plan.site.parameters.names[: len(names) + 1]
        looks, first = "control.looks_at_all", plan.facts.first_matrix
        if plan.legalizes and first is not None and {first, first + 1} <= plan.cast_kinds.keys():
            looks += (
                f" and (control.forward is not None or control.may_apply(a{first}, a{first + 1}))"
            )
        body = _SETTLED.format(
            has_torch_function=asked if plan.site.is_overridable else "False",
            looks=looks,
            fill=_fill(plan, names),
            tests="\n            and ".join(tests),
            short="original.__wrapped__" if plan.rounds_last and not may_round else "original",
            names=listed,
        )
        if not plan.site.parameters.has_keyword_tensors:
            body += _SETTLED_BESIDE_KEYWORDS.format(names=listed)
        if casts:
            body += _cast(plan, names, [*casts], is_fused=is_fused)
        body += f"    return cast_and_run({arguments}, kwargs)\n"
    if has_nodes:
        body = _NODES.format(names=listed) + body
    if names:
        body += f"if {names[-1]} is not missing:\n    return call(({listed}*rest), kwargs)\n"
    body += f"return call({arguments}, kwargs)"
    is_cast = plan.is_low or plan.decision.cast_policy in RELATIVE
    # A call that fails on cast inputs is tried again in fp32, unless it draws random numbers, or is only observed.
    if is_cast and plan.device_types and plan.target is None and not plan.facts.is_random:
        # `textwrap.indent` would take a quarter of a conversion's time.
        inner = body.replace("\n", "\n    ")
        body = _TRY.format(body=f"    {inner}", names=listed)
    return _WRAPPER.format(
        parameters=_PARAMETERS,
        unpacked="".join([f"cast{p}, " for p in casts]) + "= casts\n    " if casts else "",
        signature="".join([f"{name}=missing, " for name in names]) + ("/, " if names else ""),
        body=" " * 8 + body.replace("\n", "\n" + " " * 8),
    )


def _fill(plan: CallPlan, names: list[str]) -> str:
    """Returns the part that puts optional tensors at the end into their positions."""
    positions = plan.fillable
    if not positions:
        return ""
    called = plan.site.parameters.names
    fills = [f'a{p} = kwargs.pop("{called[p]}", None)' for p in positions]
    for each, p in enumerate(positions[:-1]):
        fills[each] = f"if a{p} is missing:\n            {fills[each]}"
    return _FILL.format(
        last=names[-1], before=f"a{positions[0] - 1}", fills="\n        ".join(fills)
    )


def _cast(plan: CallPlan, names: list[str], positions: list[int], *, is_fused: bool) -> str:
    cast = "".join([f"{'b' if p in positions else 'a'}{p}, " for p in range(len(names))])
    listed = "".join([f"{name}, " for name in names])
    unless = "kwargs or " if plan.site.parameters.has_keyword_tensors else '"out" in kwargs or '
    unless += f"{names[-1]} is missing or "
    unless += "transforms() is not None or " if plan.facts.addends else ""
    if plan.widens_to_fp32 and len(positions) > 1:
        unless += f"widens({', '.join([f'a{p}' for p in positions])}) or "
    is_choosy = plan.options.keep_weight_casts == "auto"
    size = f" and b{{0}}.nbytes >= {2 * LEAST_ELEMENTS}" if is_choosy else ""
    are_large = [f"(b{{0}} is not a{{0}}{size})".format(p) for p in positions]
    large = _IF_LARGE.format(
        are_large="\n                or ".join(are_large), cast=cast, names=listed
    )
    casts, together = {p: f"b{p} = cast{p}(a{p})" for p in positions}, plan.cast_together
    lines = [*casts.values()]
    if is_fused:
        made = _TOGETHER.format(
            names=", ".join([f"a{p}" for p in together]),
            cast=", ".join([f"b{p}" for p in together]),
            casts="\n            ".join([casts.pop(p) for p in together]),
        )
        lines = [made, *casts.values()]
    return _CAST.format(
        unless=unless,
        casts="\n        ".join(lines),
        are_unusual=" or ".join([f"b{p} is unusual" for p in positions]),
        if_large=large if plan.keeps_parameters else "",
        cast=cast,
    )


def _tests(plan: CallPlan) -> list[str]:
    """Returns the tests whether inputs already share one dtype; empty if tests can't show it.

    The dtype is the plan's, or the first tensor's if it depends on the call.
    """
    if plan.emulation is not None or (plan.composes and not plan.keeps_shared_dtype):
        return []
    if plan.target is not None and not plan.site.in_place:
        return []  # its dtype may differ from the first argument's
    kinds, dtype, tests, reference = plan.cast_kinds, "dtype", [], None
    if plan.is_relative:
        dtype, reference = "dtype_", min(kinds)
        if kinds[reference] != "T":
            return []
        tests = [f"(dtype_ := a{reference}.dtype)"]
    sharing: list[int] = []
    if plan.site.statistics:  # a norm's parameters and statistics share a dtype
        names, own = plan.site.parameters.names, plan.facts.norm_parameters
        parameters = [p for p in plan.cast_kinds if names[p] in own]
        sharing = sorted([*parameters, *plan.statistic_positions])
    left = {reference, *sharing, *(plan.fp32_positions or ())}
    for position, kind in sorted(kinds.items()):
        if position not in left:
            tests.append(_TESTS[kind].format(f"a{position}", dtype))
    last = max(kinds)
    if kinds[last] == "A":
        tests.append(f"a{last} is not missing")  # other missing arguments have no dtype
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


def _norm_test(plan: CallPlan, positions: list[int], dtype: str) -> str:
    """Returns the test whether a norm's kernel accepts the arguments at ``positions`` with an input of ``dtype``.

    It checks whether the kernel accepts fp32 there only if one of them is fp32.
    """
    indent = " " * 16

    def are(dtype: str) -> list[str]:
        return [_TESTS["O"].format(f"a{p}", dtype) for p in positions]

    tests = f"\n{indent}and ".join(are(dtype))
    if plan.fp32_positions or (plan.decision.dtype in LOW_DTYPES and plan.takes_fp32_statistics):
        mixes = ["not a0.is_nested and transforms() is None"] if plan.fp32_positions else []
        tests += f"\n{indent}or " + f"\n{indent}and ".join(mixes + are("float32"))
    return f"(\n{indent}{tests}\n            )"
