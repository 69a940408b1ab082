"""The rules about single calls. Each yields findings for a call, with the effect measured in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from .. import ops
from ..comparing import Origins
from ..places import located
from ..tensors import LOW_DTYPES, short_name
from .findings import Finding
from .lint_kernels import rounded_integers
from .lint_trace import CONVERTING, DIFFERENCES, SAMPLE, LintedCall, Trace, first_rows

#: An effect must be this many times the unit roundoff of the low type (one rounding's is 0.4 of it),
_UNITS: Final = 2.0
#: and this many times the remedy's.
_TIMES: Final = 4.0

#: A call must make the error of its inputs that much larger.
_GROWS: Final = 1.5

#: Where only a part of the results cancels, as with random terms, it must have lost so much.
_LEAST_OF_PART: Final = 0.1

#: Numbers beyond this are masks.
_MASK: Final = 1e30

#: Streams of fewer values cost neither bytes nor time.
_FEW: Final = 1024

Rule = Callable[[LintedCall, Trace, Origins], Iterator[Finding]]


def _unit(dtype: torch.dtype) -> float:
    """Returns the unit roundoff: half the distance of 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def _error(found: list[Tensor] | None, reference: list[Tensor] | None) -> float | None:
    """Returns the largest relative L2 error of the results; None where there is nothing to compare."""
    if not found or not reference:
        return None
    errors = []
    for low, exact in zip(found, reference, strict=False):
        one, right = low.detach().double(), exact.detach().double()
        is_finite = one.isfinite() & right.isfinite()
        norm = right[is_finite].norm().item()
        if one.shape == right.shape and norm:
            errors.append((one - right)[is_finite].norm().item() / norm)
    return max(errors, default=None)


def _with_gradients(seen: LintedCall, values: Mapping[int, Tensor]) -> list[Tensor] | None:
    """Returns the call's results in float64, and the gradients of the inputs that are replaced.

    Args:
        seen: The call.
        values: ``id`` of an input -> the values that replace it.
    """
    inputs = {
        key: each.detach().double().requires_grad_(torch.is_grad_enabled())
        for key, each in values.items()
    }
    found = seen.run(lambda each: inputs.get(id(each), each.detach().double()))
    if found is None:
        return None
    generator = torch.Generator().manual_seed(0)
    pulled = [
        (
            each * torch.randn(each.shape, generator=generator, dtype=each.dtype).to(each.device)
        ).sum()
        for each in found
        if each.requires_grad
    ]
    if not pulled:
        return found
    gradients = torch.autograd.grad(
        torch.stack(pulled).sum(), [*inputs.values()], allow_unused=True
    )
    return [*found, *[each for each in gradients if each is not None]]


# --- HP101 and HP103: precision lost before the call ---------------------------------------------


def _lost_before(
    seen: LintedCall, trace: Trace, lows: list[Tensor], where: Tensor | None = None
) -> tuple[float, float, str] | None:
    """Measures a call on inputs that were rounded, and on those that their makers could give.

    Args:
        seen: The call.
        trace: The calls before it.
        lows: Its inputs that have makers.
        where: Which of the first rows of the result to compare; default: all, and gradients.

    Returns:
        Its error, the error with the remedy, and the remedy; None if the error is what one rounding explains, or if
        the remedy gains little.
    """
    makers = [*dict.fromkeys(maker for each in lows for maker in trace.makers(each))]
    units = [
        _unit(each.dtype) for made in makers for each in made.outputs if each.dtype in LOW_DTYPES
    ]
    given = {id(each): each for each in lows}

    def results(values: Mapping[int, Tensor]) -> list[Tensor] | None:
        if where is None:
            return _with_gradients(seen, values)
        found = seen.run(lambda each: values.get(id(each), each.detach()).double())
        return found and [first_rows(found[0])[where]]

    # A sum whose terms are equal after rounding shows the error of all calls before it.
    is_whole = where is not None and where.double().mean().item() > 0.5
    least = _UNITS * max(units, default=0.0) if where is None or is_whole else _LEAST_OF_PART
    ways = [("exact", "kept")] + ([("deep", "wide")] if is_whole else [])
    for reference, remedy in ways:
        exact, kept = (
            {id(each): trace.values(each, way) for each in lows} for way in (reference, remedy)
        )
        if not units or any(each is None for each in (*exact.values(), *kept.values())):
            return None
        right = results(exact)  # type: ignore[arg-type]
        error, remedied = _error(results(given), right), _error(results(kept), right)  # type: ignore[arg-type]
        if error is None or remedied is None:
            continue
        before = _error(lows, [each for each in exact.values() if each is not None]) or 0.0
        is_grown = where is not None or error > _GROWS * before  # else it was lost before
        if error > least and is_grown and error > _TIMES * remedied:
            return (
                error,
                remedied,
                makers[-1].kept_line
                if remedy == "kept"
                else f"{makers[-1].line()} and the calls before it in the fp32 list",
            )
    return None


def late_upcast(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP101: an fp32 op on low contents whose maker could return fp32."""
    if seen.low is not None or seen.moves or seen.call.op in DIFFERENCES:
        return
    lows = [each for each in seen.inputs if trace.makers(each)]
    if not lows or (found := _lost_before(seen, trace, lows)) is None or seen.picks:
        return
    error, remedied, remedy = found
    maker = trace.makers(lows[-1])[-1]
    kind = "float32 input" if lows[-1].dtype is torch.float32 else "input"
    evidence = (
        f"its {kind} holds {short_name(maker.outputs[0].dtype)} values, rounded in "
        f"{maker.call.op} ({located(maker.call.location)})"
    )
    yield Finding("HP101", *seen.place, evidence, error, remedied, remedy)


def cancellation(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP103: a difference of rounded values, many bits smaller than they are."""
    if seen.call.op not in DIFFERENCES:
        return
    lows = [each for each in seen.inputs if trace.makers(each)]
    if not lows or (where := seen.cancels) is None:
        return
    if (found := _lost_before(seen, trace, lows, where)) is None:
        return
    count, size = where.sum().item(), where.numel()
    share = "" if 2 * count > size else f" in {count:,} of {size:,} values"
    is_zero = not first_rows(seen.outputs[0])[where].any()
    bits = "zero, unlike" if is_zero else "over 3 bits smaller than"
    evidence = f"the result is {bits} its rounded inputs{share}"
    yield Finding("HP103", *seen.place, evidence, *found)


# --- HP104: long sums ------------------------------------------------------------------------------


def long_sum(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP104: a reduction whose low result is worse than one rounding."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if low is None or not seen.inputs:
        return
    terms = seen.inputs[0].numel() / max(1, seen.outputs[0].numel())
    is_running = seen.call.op.startswith(("cumsum", "cumprod", "logcumsumexp"))
    if len(seen.inputs) > 1 or (terms < 2 / torch.finfo(low).eps and not is_running):
        return
    if (found := _worse_than_fp32(seen, low)) is None:
        return
    length = seen.inputs[0].numel() if is_running else terms
    evidence = f"{length:,.0f} terms are added in {short_name(low)}"
    yield Finding("HP104", *seen.place, evidence, *found, f"{seen.line()} in the fp32 list")


# --- HP105, HP106 and HP108: dtypes ------------------------------------------------------------------


def silent_fp32(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP105: a low stream that a scalar, a buffer or a parameter made fp32."""
    if (
        seen.call.op in CONVERTING
        or len(seen.outputs) != 1
        or seen.outputs[0].dtype is not torch.float32
    ):
        return
    output = seen.outputs[0]

    def is_constant(tensor: Tensor) -> bool:
        return tensor.numel() < output.numel() or isinstance(tensor, nn.Parameter)

    lows = [each for each in seen.inputs if each.dtype in LOW_DTYPES and each.shape == output.shape]
    wide = [each for each in seen.inputs if each.dtype is torch.float32]
    if not lows or not wide or not all(map(is_constant, wide)):
        return
    if output.numel() < _FEW:
        return
    what = (
        "a parameter"
        if isinstance(wide[0], nn.Parameter)
        else f"a tensor of shape {tuple(wide[0].shape)}"
    )
    evidence = (
        f"{what} in float32 made a {short_name(lows[0].dtype)} stream of shape {tuple(output.shape)} float32: "
        f"{output.numel() * 2:,} bytes more"
    )
    found = _low_run(seen, lows[0].dtype)
    error = _error(found, seen.run(lambda each: each.detach().double()))
    if error is not None:
        evidence += f"; in {short_name(lows[0].dtype)} its error is {error:.1g}"
    remedied = None if found is None else 0.0
    yield Finding("HP105", *seen.place, evidence, 1.0, remedied, f"{seen.line()} in the bf16 list")


def useless_island(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP106: fp32 ops whose inputs and result are rounded, and that give the low ops' bits."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if seen.call.op not in CONVERTING or low is None or seen.inputs[0].dtype is not torch.float32:
        return
    found, calls = trace.in_low(seen.inputs[0], low, origins) or (seen.inputs[0], [])
    if not calls:
        return
    if found.shape == seen.outputs[0].shape and torch.equal(found, seen.outputs[0]):
        saved = sum(each.numel() * 2 for made in calls for each in [*made.inputs, *made.outputs])
        evidence = f"{short_name(low)} inputs and a result rounded to it at {seen.call.location.rpartition('/')[2]}"
        lines = ", ".join(dict.fromkeys(made.line() for made in calls))
        remedy = f"{lines} in no fp32 list: the same bits"
        yield Finding(
            "HP106", *calls[0].place, f"{evidence}; {saved:,} bytes more", 1.0, 0.0, remedy
        )


def _low_run(seen: LintedCall, low: torch.dtype) -> list[Tensor] | None:
    """Returns the results of the op in ``low``."""
    found: list[Tensor] | None = None
    if not seen.writes and not any(isinstance(each, torch.dtype) for each in seen.kwargs.values()):
        found = seen.run(lambda each: each.detach().to(low))
    return found if found and found[0].dtype is low else None


@functools.cache
def siblings(op: str) -> slice:
    """Returns which floating inputs of an op are of one kind: query, key and value, or a list of tensors."""
    sites = ops.table()[op].sites if op in ops.table() else ()
    names = [ops.parameters(site).names for site in sites]
    if any(each[:3] == ("query", "key", "value") for each in names):
        return slice(3)
    is_list = any(each[:1] == ("tensors",) for each in names)
    return slice(None if is_list else 2 if op == "where" else 0)


def mixed_siblings(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP108: parts of one thing in two dtypes."""
    parts = [each for each in seen.inputs[siblings(seen.call.op)] if each.dim()]
    dtypes = dict.fromkeys([each.dtype for each in parts])
    low = next((each for each in dtypes if each in LOW_DTYPES), None)
    if len(dtypes) < 2 or low is None:
        return
    stray = [each for each in parts if each.dtype is not low]
    maker, remedied, remedy = trace.producer(stray[0]), None, "cast where the stray one is made"
    if maker is not None and maker.call.op in CONVERTING:
        remedy = f"no cast at {located(maker.call.location)}"
    elif maker is not None and _low_run(maker, low):
        remedied, remedy = 0.0, f"{maker.line()} in the bf16 list"
    evidence = f"its inputs are {' and '.join(map(short_name, dtypes))}"
    share = sum(each.nbytes for each in stray) / sum(each.nbytes for each in parts)
    yield Finding("HP108", *seen.place, evidence, share, remedied, remedy)


# --- HP109: range ----------------------------------------------------------------------------------


def out_of_range(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP109: infinite results, results close to it, and those below the normal numbers that cost accuracy."""
    result = next((each for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if result is None or not result.numel():
        return
    limits, name = torch.finfo(result.dtype), short_name(result.dtype)
    remedy = "no cast" if seen.moves else f"{seen.line()} in the fp32 list"
    values, given = _magnitudes(result), [*map(_magnitudes, seen.inputs)]
    largest, least = _range(values, limits.max)
    if values.isinf().any():
        exact = None if any(each.isinf().any() for each in given) else _exact(seen)
        if exact is not None and (
            share := (values.isinf() & (exact < _MASK)).double().mean().item()
        ):
            evidence = (
                f"{share:.0%} of the results are infinite in {name}, which ends at {limits.max:.3g}"
            )
            yield Finding("HP109", *seen.place, evidence, share, 0.0, remedy)
        return
    same = [each for each, of in zip(given, seen.inputs, strict=True) if of.dtype is result.dtype]
    before = max([_range(each, limits.max)[0] for each in same], default=0.0)
    if largest > limits.max / 4 >= before:
        evidence = f"the largest value is {largest:.3g}; {name} ends at {limits.max:.3g}"
        effects = largest / limits.max, largest / torch.finfo(torch.float32).max
        yield Finding("HP109", *seen.place, evidence, *effects, remedy)
    elif least < limits.tiny and (values < limits.tiny).double().mean() > 0.01:
        exact, found = _exact(seen), _worse_than_fp32(seen, result.dtype)
        share = (
            0.0 if exact is None else ((values < limits.tiny) & (exact > 0)).double().mean().item()
        )
        if found is not None and share > 0.01:
            evidence = f"{share:.0%} of the values are subnormal or zero in {name}"
            yield Finding("HP109", *seen.place, evidence, *found, f"{remedy}, or a loss scaler")


def _magnitudes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:SAMPLE].double().abs()


def _exact(seen: LintedCall) -> Tensor | None:
    """Returns the magnitudes of the first result in float64."""
    found = seen.run(lambda each: each.detach().double())
    return _magnitudes(found[0]) if found else None


def _range(values: Tensor, end: float) -> tuple[float, float]:
    """Returns the largest magnitude without masks, which are the largest number, and the least that is not zero."""
    values = values[values < end]
    if not values.numel():
        return 0.0, 0.0
    is_some = values[values > 0]
    return values.max().item(), is_some.min().item() if is_some.numel() else 0.0


def _worse_than_fp32(seen: LintedCall, low: torch.dtype) -> tuple[float, float] | None:
    """Returns the errors of the result and of one in float32; None if the remedy gains little."""
    reference = seen.run(lambda each: each.detach().double())
    error = _error(seen.outputs, reference)
    remedied = _error(seen.run(lambda each: each.detach().float()), reference)
    if error is None or remedied is None:
        return None
    return (error, remedied) if error > _UNITS * _unit(low) and error > _TIMES * remedied else None


RULES_OF_CALLS: Final[tuple[Rule, ...]] = (
    late_upcast,
    rounded_integers,
    cancellation,
    long_sum,
    silent_fp32,
    useless_island,
    mixed_siblings,
    out_of_range,
)


def findings_of(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """Yields the findings of all rules about one call."""
    for rule in RULES_OF_CALLS:
        for found in rule(seen, trace, origins):
            seen.is_reported |= found.code in {"HP101", "HP103"}
            yield found
