"""The rules about single calls. Each yields findings for a call, with the effect measured in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from ..accuracy import Origins
from ..places import located
from ..tensors import LOW_DTYPES, short_name
from .findings import Finding
from .integers import rounded_integers
from .trace import CONVERTING, DIFFERENCES, Seen, Trace

#: An effect must be this many times the unit roundoff of the low type (one rounding's is 0.4 of it),
_UNITS: Final = 2.0
#: and this many times the remedy's.
_TIMES: Final = 4.0

#: Values read where reading all would be slow.
_SAMPLE: Final = 1 << 16

Rule = Callable[[Seen, Trace, Origins], Iterator[Finding]]


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


def _with_gradients(seen: Seen, values: Mapping[int, Tensor]) -> list[Tensor] | None:
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


def _lost_before(seen: Seen, trace: Trace, lows: list[Tensor]) -> tuple[float, float, Seen] | None:
    """Measures a call on inputs that were rounded, and on those that their makers could give.

    Returns:
        Its error, the error where the makers return float32, and the last maker; None if the error is what one
        rounding explains, or if the remedy gains little.
    """
    makers = [trace.maker(each) for each in lows]
    if None in makers or not makers:
        return None
    exact = {id(each): trace.exact(each) for each in lows}
    kept = {id(each): trace.exact(each, round_inputs=True) for each in lows}
    if any(each is None for each in (*exact.values(), *kept.values())):
        return None
    given = {id(each): each for each in lows}
    reference, now, then = (_with_gradients(seen, each) for each in (exact, given, kept))  # type: ignore[arg-type]
    error, remedied = _error(now, reference), _error(then, reference)
    maker = makers[-1]
    assert maker is not None
    dtypes = [each.dtype for made in makers if made is not None for each in made.outputs]
    units = [_unit(each) for each in dtypes if each in LOW_DTYPES]
    if error is None or remedied is None or not units:
        return None
    is_real = error > _UNITS * max(units) and error > _TIMES * remedied
    return (error, remedied, maker) if is_real else None


def late_upcast(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP101: an fp32 op on low contents whose maker could return fp32."""
    if seen.low is not None or seen.call.op in (*CONVERTING, *DIFFERENCES):
        return
    lows = [
        each
        for each in seen.inputs
        if each.dtype is torch.float32 and origins.contents(each) in LOW_DTYPES
    ]
    if (found := _lost_before(seen, trace, lows)) is None:
        return
    error, remedied, maker = found
    evidence = (
        f"its float32 input holds {short_name(maker.outputs[0].dtype)} values, rounded in "
        f"{maker.call.op} ({located(maker.call.location)})"
    )
    yield Finding("HP101", *seen.place, evidence, error, remedied, maker.line(" output=float32"))


def cancellation(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP103: a difference of rounded values, many bits smaller than they are."""
    if seen.call.op not in DIFFERENCES or len(seen.inputs) < 2 or not seen.outputs:
        return
    lows = [each for each in seen.inputs if origins.contents(each) in LOW_DTYPES]
    least = min(_size(each) for each in seen.inputs)
    size = _size(seen.outputs[0])
    if not lows or not 0 < size < least / 8 or (found := _lost_before(seen, trace, lows)) is None:
        return
    error, remedied, maker = found
    evidence = f"the result is {math.log2(least / size):.0f} bits smaller than its rounded inputs"
    yield Finding("HP103", *seen.place, evidence, error, remedied, maker.line(" output=float32"))


def _size(tensor: Tensor) -> float:
    """Returns the root mean square of the finite values."""
    values = tensor.detach().reshape(-1)[:_SAMPLE].double()
    values = values[values.isfinite()]
    return values.square().mean().sqrt().item() if values.numel() else 0.0


# --- HP104: long sums ------------------------------------------------------------------------------


def long_sum(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP104: a reduction whose low result is worse than one rounding; a running sum that stalls."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if low is None or not seen.inputs:
        return
    yield from _stalled(seen, low)
    if seen.writes:
        return
    terms = seen.inputs[0].numel() / max(1, seen.outputs[0].numel())
    is_running = seen.call.op.startswith(("cumsum", "cumprod", "logcumsumexp"))
    if len(seen.inputs) > 1 or (terms < 2 / torch.finfo(low).eps and not is_running):
        return
    error = _error(seen.outputs, seen.run(lambda each: each.detach().double()))
    remedied = _error(
        seen.run(lambda each: each.detach().float()), seen.run(lambda each: each.detach().double())
    )
    if (
        error is None
        or remedied is None
        or error < _UNITS * _unit(low)
        or error < _TIMES * remedied
    ):
        return
    length = seen.inputs[0].numel() if is_running else terms
    evidence = f"{length:,.0f} terms are added in {short_name(low)}"
    yield Finding(
        "HP104", *seen.place, evidence, error, remedied, f"{seen.line()} in the fp32 list"
    )


def _stalled(seen: Seen, low: torch.dtype) -> Iterator[Finding]:
    """A sum in a low type most of whose terms are too small to change it."""
    if seen.call.op not in ("iadd", "add") or len(seen.inputs) < 2:
        return
    total, term = seen.inputs[0].detach().double(), seen.inputs[1].detach().double()
    half_ulp = 2.0 ** torch.frexp(total)[1].double() * torch.finfo(low).eps / 4
    is_small = (term != 0) & (term.abs() <= half_ulp)
    share = is_small.double().mean().item() if is_small.numel() else 0.0
    if share > 0.5:
        evidence = f"{share:.0%} of the terms are at most half an ulp of the {short_name(low)} sum"
        yield Finding("HP104", *seen.place, evidence, share, None, "keep the sum in float32")


# --- HP105, HP106 and HP108: dtypes ------------------------------------------------------------------


def silent_fp32(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP105: a low stream that a scalar, a buffer or a parameter made fp32."""
    if (
        seen.call.op in CONVERTING
        or len(seen.outputs) != 1
        or seen.outputs[0].dtype is not torch.float32
    ):
        return
    output = seen.outputs[0]
    lows = [each for each in seen.inputs if each.dtype in LOW_DTYPES and each.shape == output.shape]
    wide = [each for each in seen.inputs if each.dtype is torch.float32]
    if not lows or not wide or any(each.numel() >= output.numel() for each in wide):
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
    yield Finding("HP105", *seen.place, evidence, 1.0, None, f"{seen.line()} in the bf16 list")


def useless_island(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP106: an fp32 op whose inputs and result are rounded, and that gives the low op's bits."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if seen.call.op not in CONVERTING or low is None or not seen.inputs:
        return
    source = seen.inputs[0]
    island = trace.maker(source)
    if source.dtype is not torch.float32 or island is None or island.low is not None:
        return
    wide = [each for each in island.inputs if each.dtype is torch.float32]
    if not wide or any(origins.contents(each) is not low for each in island.inputs):
        return
    found = _low_run(island, low)
    if found is None or found[0].shape != seen.outputs[0].shape:
        return
    if torch.equal(found[0], seen.outputs[0]):
        saved = sum(each.numel() * 2 for each in [*wide, *island.outputs])
        evidence = f"{short_name(low)} inputs and a result rounded to it at {seen.call.location.rpartition('/')[2]}"
        remedy = f"{island.line()} in no fp32 list: the same bits"
        yield Finding("HP106", *island.place, f"{evidence}; {saved:,} bytes more", 1.0, 0.0, remedy)


def _low_run(seen: Seen, low: torch.dtype) -> list[Tensor] | None:
    """Returns the results of the op in ``low``."""
    found: list[Tensor] | None = None
    if not seen.writes and not any(isinstance(each, torch.dtype) for each in seen.kwargs.values()):
        found = seen.run(lambda each: each.detach().to(low))
    return found if found and found[0].dtype is low else None


#: Ops whose tensors are of one kind: query, key and value, or the parts of one tensor.
SIBLINGS: Final = frozenset(
    {"scaled_dot_product_attention", "cat", "concat", "stack", "hstack", "vstack"}
)


def mixed_siblings(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP108: parts of one thing in two dtypes."""
    dtypes = dict.fromkeys([each.dtype for each in seen.inputs if each.dim()])
    if seen.call.op not in SIBLINGS or len(dtypes) < 2:
        return
    evidence = f"its inputs are {' and '.join(map(short_name, dtypes))}"
    yield Finding("HP108", *seen.place, evidence, 1.0, None, "cast where the stray one is made")


# --- HP109: range ----------------------------------------------------------------------------------


def out_of_range(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP109: results within four times the largest number, or more than a percent subnormal."""
    for each in seen.outputs:
        if each.dtype not in LOW_DTYPES or not each.numel():
            continue
        limits, values = torch.finfo(each.dtype), each.detach().reshape(-1)[:_SAMPLE].double().abs()
        values = values[(values < limits.max) & (values > 0)]  # masks are the largest number
        if not values.numel():
            continue
        largest, tiny = values.max().item(), (values < limits.tiny).double().mean().item()
        if largest > limits.max / 4:
            evidence = f"the largest value is {largest:.3g}; {short_name(each.dtype)} ends at {limits.max:.3g}"
            yield Finding(
                "HP109",
                *seen.place,
                evidence,
                largest / limits.max,
                None,
                f"{seen.line()} in the fp32 list",
            )
        elif tiny > 0.01:
            evidence = f"{tiny:.0%} of the values are subnormal in {short_name(each.dtype)}"
            yield Finding(
                "HP109",
                *seen.place,
                evidence,
                tiny,
                None,
                f"{seen.line()} in the fp32 list, or a loss scaler",
            )
        return


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


def findings_of(seen: Seen, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """Yields the findings of all rules about one call."""
    for rule in RULES_OF_CALLS:
        yield from rule(seen, trace, origins)
