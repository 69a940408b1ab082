"""The rules about single calls. Each yields findings for a call, with the effect measured in float64."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import ops
from ..comparing import Origins, is_readable
from ..observers import spared
from ..ops import kind
from ..places import located
from ..tensors import LOW_DTYPES, short_name
from ..torch_state import named_modules
from .findings import LEAST, MOST, TIMES, Finding, function_of
from .lint_integers import rounded_integers, whole_numbers
from .lint_trace import (
    CONVERTING,
    DIFFERENCES,
    PRODUCTS,
    SAMPLE,
    LintedCall,
    Trace,
    first_rows,
    integers_in,
    moved,
)

#: A call must make the error of its inputs that much larger.
_GROWS: Final = 2.5

#: Differences near zero, as of a loss that is nearly learnt, must have lost so much.
_LEAST_CANCELLED: Final = 0.06

#: A function changes so much by a rounding of its input.
_LEAST_STEEP: Final = 0.1

#: Differences in fp32 must be that many bits smaller than their terms, and keep less than two bits.
_FP32_BITS: Final = 12
_LEAST_LOST: Final = 0.25

#: Choices of which fewer fall on other elements are those of close values.
_LEAST_CHOSEN: Final = 0.1
_FEWEST_CHOSEN: Final = 4

#: Numbers beyond this are masks.
_MASK: Final = 1e30

#: Streams of fewer values cost neither bytes nor time; and values that show how a function behaves.
_FEW: Final = 64


def _error(found: list[Tensor] | None, reference: list[Tensor] | None) -> float | None:
    """Returns the largest relative L2 error of the results; None where there is nothing to compare."""
    if not found or not reference:
        return None
    errors = []
    for low, exact in zip(found, reference, strict=False):
        if low.shape == exact.shape:
            right = exact.detach().double()
            off = low.detach().double() - right
            if not off.isfinite().all():
                off, right = off[off.isfinite()], right[off.isfinite()]
            if norm := right.norm().item():
                errors.append(min(off.norm().item() / norm, MOST))
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
    with saved_tensors_hooks(lambda each: each, lambda each: each):  # not the program's
        found = seen.run(lambda each: inputs.get(id(each), each.detach().double()))
        if found is None:
            return None
        learning = [each for each in found if each.requires_grad]
        if not learning:
            return found
        is_small = sum(each.numel() for each in learning) <= 4 * SAMPLE  # and gradients are kept
        pulls = (_pulls if is_small else _pulls.__wrapped__)(*[each.shape for each in learning])
        pulls = [pull.to(each.device) for each, pull in zip(learning, pulls, strict=True)]
        gradients = torch.autograd.grad(learning, [*inputs.values()], pulls, allow_unused=True)
    return [*found, *[each for each in gradients if each is not None]]


@functools.lru_cache(maxsize=16)
def _pulls(*shapes: torch.Size) -> list[Tensor]:
    """Returns random gradients, in float64; layers have the same shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


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

    def results(way: str, of: Sequence[Tensor] = lows) -> tuple[list[Tensor], list[Tensor] | None]:
        """Returns the inputs, of which some are made another way, and the call's results."""
        changed: set[int] = set() if way == "given" else set(map(id, of))
        made = [trace.values(each, way) if id(each) in changed else each for each in lows]
        inputs = [each for each in made if each is not None]
        values = dict(zip(map(id, lows), inputs, strict=False))
        if len(inputs) < len(made):
            return [], None
        if where is None:
            return inputs, _with_gradients(seen, values)
        found = seen.run(lambda each: values.get(id(each), each.detach()).double())
        return inputs, found and [first_rows(found[0])[where]]

    # A sum whose terms are equal after rounding shows the error of all calls before it.
    is_whole = where is not None and where.double().mean().item() > 0.5
    is_low = where is None or any(map(trace.makers, lows))
    ways = [("exact", "kept")] + ([("deep", "wide")] if is_whole else [])
    for reference, remedy in ways if is_low else [("double", "double")]:
        exact, right = results(reference)
        error = _error(results("given")[1], right) or 0.0
        if error <= (LEAST if is_low else _LEAST_LOST):
            continue
        if where is not None and not (is_low and error > _LEAST_CANCELLED):
            # roundings of the inputs have that effect near the end of a training
            moved = _error(results(f"{reference} moved")[1], right) if is_whole else None
            if moved is None or error <= TIMES * moved:
                continue
        # else it was lost before
        is_grown = where is not None or error > _GROWS * (_error(lows, exact) or 0.0)
        remedied = _error(results(remedy)[1], right)
        if remedied is not None and is_grown and error > TIMES * remedied:
            needed = lows
            for each in lows:  # one that gains little is left as it is
                fewer = [one for one in needed if one is not each]
                left = _error(results(remedy, fewer)[1], right) if fewer else None
                if left is not None and left <= max(2 * remedied, LEAST / TIMES):
                    needed, remedied = fewer, left
            if not is_low:
                return error, remedied, "compute them in float64, or use a function such as expm1"
            makers = [maker for each in needed for maker in trace.makers(each)]
            is_kept = remedy == "kept"
            lines = dict.fromkeys(each.kept_line if is_kept else each.line() for each in makers)
            more = "" if is_kept else " and the calls before it in the fp32 list"
            return error, remedied, f"{', '.join(lines)}{more}"
    return None


def _rounded_in(trace: Trace, lows: list[Tensor]) -> str:
    makers = [maker for each in lows for maker in trace.makers(each) or trace.back(each, bool, 1)]
    places = dict.fromkeys(f"{each.call.op} ({located(each.call.location)})" for each in makers)
    return f"rounded in {', '.join(places)}"


def late_upcast(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP101: an op on low contents whose maker could return fp32: one in fp32, or a function that is steep there."""
    if seen.moves or seen.call.op in DIFFERENCES or (seen.low is not None and not _is_steep(seen)):
        return
    lows = [each for each in seen.inputs if trace.makers(each)]
    if not lows or (found := _lost_before(seen, trace, lows)) is None or seen.picks:
        return
    low = short_name(trace.makers(lows[-1])[-1].outputs[0].dtype)
    kind = "float32 input" if lows[-1].dtype is torch.float32 else "input"
    evidence = f"its {kind} holds {low} values, {_rounded_in(trace, lows)}"
    yield Finding("HP101", *seen.place, evidence, *found)


def _is_steep(seen: LintedCall) -> bool:
    """Whether a function of one tensor makes roundings of some values grow, as `log` does close to 1."""
    if len(seen.inputs) != 1 or not is_pointwise(seen.call.op):
        return False
    few = seen.inputs[0].detach().reshape(-1)[:_FEW]
    error = _error(seen.run(lambda _: moved(few)), seen.run(lambda _: few.double()))
    return error is not None and error > _LEAST_STEEP


def other_choice(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP101: a choice among rounded values that falls on other elements than before the rounding."""
    if (chosen := seen.chosen) is None:
        return
    if not (lows := [each for each in seen.inputs if trace.makers(each)]):
        return

    def choice(way: str) -> Tensor | None:
        values = {id(each): trace.values(each, way) for each in lows}
        given = {key: each.double() for key, each in values.items() if each is not None}
        found = seen.run(lambda each: given.get(id(each), each.detach()), integers_in)
        return found[0] if found and len(given) == len(lows) else None

    right, wide = choice("deep"), choice("wide")
    if right is None or wide is None or not right.shape == wide.shape == chosen.shape:
        return
    count, remedied = (_others(each, right, seen.inputs[0].shape) for each in (chosen, wide))
    if count < _FEWEST_CHOSEN or count <= max(_LEAST_CHOSEN * chosen.numel(), TIMES * remedied):
        return
    evidence = (
        f"it chooses {count:,} of {chosen.numel():,} elements otherwise, {_rounded_in(trace, lows)}"
    )
    makers = dict.fromkeys(maker.line() for each in lows for maker in trace.makers(each))
    remedy = f"{', '.join(makers)} and the calls before it in the fp32 list"
    effects = count / chosen.numel(), remedied / chosen.numel()
    yield Finding("HP101", *seen.place, evidence, *effects, remedy)


def _others(chosen: Tensor, right: Tensor, shape: torch.Size) -> int:
    """Returns how many elements of a tensor of ``shape`` are in one choice only, in any order."""
    if chosen.dim() != len(shape):
        return int((chosen != right).sum().item())
    dim = next((n for n, size in enumerate(shape) if size != chosen.shape[n]), None)
    if dim is None:  # all, sorted
        return 0
    taken = torch.zeros(shape, dtype=torch.bool, device=chosen.device)
    return int((taken.scatter(dim, chosen, True) & ~taken.scatter(dim, right, True)).sum().item())


def cancellation(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP103: a difference of rounded values, many bits smaller than they are."""
    where = seen.cancels()
    is_undoing = any(made and made.undone for made in map(trace.producer, seen.inputs))
    if (where is not None or is_undoing) and trace.undoes(seen):  # as compensated sums do
        return
    if where is None:
        return
    lows, bits = [each for each in seen.inputs if trace.makers(each)], 3
    if not lows and seen.outputs[0].dtype is torch.float32:
        lows, bits = [each for each in seen.inputs if trace.producer(each)], _FP32_BITS
        where = None if trace.is_update(seen) else seen.cancels(bits)
    if not lows or where is None or (bits > 3 and where.double().mean().item() <= 0.5):
        return
    if (found := _lost_before(seen, trace, lows, where)) is None:
        return
    count, size = where.sum().item(), where.numel()
    share = "" if 2 * count > size else f" in {count:,} of {size:,} values"
    is_zero = not first_rows(seen.outputs[0])[where].any()
    how = "zero, unlike" if is_zero else f"over {bits} bits smaller than"
    evidence = f"the result is {how} its inputs{share}, {_rounded_in(trace, lows)}"
    yield Finding("HP103", *seen.place, evidence, *found)


# --- HP111: tables made low ------------------------------------------------------------------------


def merged_steps(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP111: a table of equal steps, as of bin edges, whose numbers a cast makes equal."""
    if seen.call.op not in CONVERTING or not seen.outputs or not seen.inputs:
        return
    given, found = seen.inputs[0].detach(), seen.outputs[0].detach()
    if found.dtype not in LOW_DTYPES or given.dim() != 1 or len(given) < 3:
        return
    steps = given[:SAMPLE].double().diff() * (given[-1] - given[0]).sign()
    lost = (found[:SAMPLE].double().diff() == 0).double().mean().item()
    if lost and 0 < steps.max() < 2 * steps.min() and whole_numbers(given) is None:
        evidence = f"{lost:.0%} of the steps of a table are zero in {short_name(found.dtype)}"
        yield Finding("HP111", *seen.place, evidence, lost, 0.0, "keep the table in float32")


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
    if (found := _worse_than_fp32(seen)) is None:
        return
    evidence = f"{seen.inputs[0].numel() if is_running else terms:,.0f} terms are added in {short_name(low)}"
    yield Finding("HP104", *seen.place, evidence, *found, f"{seen.line()} in the fp32 list")


# --- HP105, HP106 and HP108: dtypes ------------------------------------------------------------------


def silent_fp32(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP105: a low stream that a scalar, a buffer or a parameter made fp32."""
    dtypes = [each.dtype for each in seen.outputs]
    if seen.call.op in CONVERTING and dtypes and dtypes[0] in LOW_DTYPES:
        trace.note_cast(seen.inputs[0])
    if seen.low is None and dtypes == [torch.float32] and kind(seen.call.op)[0] in PRODUCTS:
        trace.note_product(seen)
    if seen.call.op in CONVERTING or dtypes != [torch.float32]:
        return
    trace.note_sum(seen)
    (output,) = seen.outputs
    lows = [each for each in seen.inputs if each.dtype in LOW_DTYPES and each.shape == output.shape]
    wide = [each for each in seen.inputs if each.dtype is torch.float32]
    if not lows or not wide or output.numel() < _FEW or output.dim() < 2:
        return
    if any(e.numel() >= output.numel() and not isinstance(e, nn.Parameter) for e in wide):
        return
    is_parameter, name = isinstance(wide[0], nn.Parameter), short_name(lows[0].dtype)
    what = "a parameter" if is_parameter else f"a tensor of shape {tuple(wide[0].shape)}"
    evidence = (
        f"{what} in float32 made a {name} stream of shape {tuple(output.shape)} float32: "
        f"{output.numel() * 2:,} bytes more"
    )
    found = _low_run(seen, lows[0].dtype)
    error = _error(found, seen.run(lambda each: each.detach().double()))
    if error is not None:
        evidence += f"; in {name} its error is {error:.1g}"
    effects = 1.0, None if found is None else 0.0
    trace.promoted.add(seen)
    yield Finding("HP105", *seen.place, evidence, *effects, f"{seen.line()} in the bf16 list")


def wide_product(seen: LintedCall, low: torch.dtype) -> Finding | None:
    """HP105: a product in fp32, which no list asks for, and which would lose little in ``low``."""
    dtypes = [each.dtype for each in seen.outputs]
    if seen.low is not None or dtypes != [torch.float32] or seen.call.cast_policy == "FP32":
        return None
    found = _low_run(seen, low)
    error = _error(found, seen.run(lambda each: each.detach().double()))
    if error is not None and error > LEAST:
        return None
    name = short_name(low)
    evidence = "" if error is None else f"; in {name} its error is {error:.1g}"
    remedy = f"write to {name} tensors" if seen.writes else f"{seen.line()} in the bf16 list"
    return Finding("HP105", *seen.place, evidence, 1.0, None if error is None else 0.0, remedy)


def useless_island(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP106: fp32 ops whose inputs and result are rounded, and that give the low ops' bits."""
    trace.note_uses(seen)
    yield from _round_trip(seen, trace)
    yield from _rounded_again(seen, trace, origins)
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if seen.call.op not in CONVERTING or low is None or seen.inputs[0].dtype is not torch.float32:
        return
    found, calls = trace.in_low(seen.inputs[0], low, origins) or (seen.inputs[0], [])
    if not calls:
        return
    # The order of sums, as in softmax, is a kernel's own: other devices may give other bits.
    is_exact = torch.equal(seen.inputs[0], seen.outputs[0].float())
    if not is_exact and not all(is_pointwise(each.call.op) for each in calls):
        return
    if found.shape == seen.outputs[0].shape and torch.equal(found, seen.outputs[0]):
        saved = sum(each.numel() * 2 for made in calls for each in [*made.inputs, *made.outputs])
        evidence = (
            f"{short_name(low)} inputs and a result rounded to it at {located(seen.call.location)}; "
            f"{saved:,} bytes more"
        )
        lines = ", ".join(dict.fromkeys(made.line() for made in calls))
        remedy = f"{lines} in no fp32 list: the same bits"
        yield Finding("HP106", *calls[0].place, evidence, 1.0, 0.0, remedy)


def _round_trip(seen: LintedCall, trace: Trace) -> Iterator[Finding]:
    """HP106: values that are upcast only to be rounded again, or rounded only to be upcast."""
    for each in seen.inputs if not seen.moves else ():
        made = trace.producer(each)
        if each.dtype is not torch.float32 or made is None or made.call.op not in CONVERTING:
            continue
        if seen.low is None or made.inputs[0].dtype is not seen.low:
            trace.note_use(made, seen)
        else:
            evidence = f"{seen.call.op} rounds them to {short_name(seen.low)} again; {each.nbytes:,} bytes more"
            yield Finding("HP106", *made.place, evidence, 1.0, 0.0, "no cast: the same bits")
    if seen.call.op in CONVERTING and seen.outputs and seen.outputs[0].dtype is torch.float32:
        made, place = trace.just_rounded(seen.inputs[0]), seen.call.location
        error = made and _error(seen.inputs[:1], made.inputs[:1])
        # In one line it rounds on purpose; a function may take or return low values.
        lines = set() if made is None else {made.call.location, place}
        if made and error and len(lines) > 1 and len({*map(function_of, lines)}) == 1:
            seen.rounding = made
            trace.reported.add(made)
            low = short_name(seen.inputs[0].dtype)
            evidence = f"float32 values are rounded to {low}, and upcast at once at {located(seen.call.location)}"
            yield Finding("HP106", *made.place, evidence, error, 0.0, "neither cast")


def _rounded_again(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP106: fp32 ops on upcast values, whose results a low call rounds, as under torch.autocast."""
    low = None if seen.moves else seen.low
    for each in seen.inputs if low is not None else ():
        made = trace.producer(each) if each.dtype is torch.float32 else None
        if low is None or made is None or made.moves or trace.has_wide_use(each):
            continue
        given = [of for call in trace.wide(each) for of in call.inputs]
        if low not in map(trace.upcast_from, given):
            continue
        found, calls = trace.in_low(each, low, origins) or (each, [])
        is_exact = all(is_pointwise(of.call.op) for of in calls)
        if calls and is_exact and torch.equal(found, each.to(low)):
            name, place = short_name(low), located(seen.call.location)
            evidence = (
                f"upcast {name} values, which {seen.call.op} ({place}) rounds to {name} again"
            )
            trace.reported.add(made)
            remedy = "no upcast before it: the same bits"
            yield Finding("HP106", *made.place, evidence, 1.0, 0.0, remedy)


@functools.cache
def is_pointwise(op: str) -> bool:
    """Whether each element of the result has its own inputs."""
    packet = getattr(torch.ops.aten, op, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads()
    )


def _low_run(seen: LintedCall, low: torch.dtype) -> list[Tensor] | None:
    """Returns the results of the op in ``low``."""
    takes_dtype = any(isinstance(each, torch.dtype) for each in seen.kwargs.values())
    found = None if takes_dtype or seen.writes else seen.run(lambda each: each.detach().to(low))
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


def mixed_modules(
    root: nn.Module, products: Mapping[str, set[torch.dtype]], lines: Mapping[int, str]
) -> Iterator[Finding]:
    """HP108: one of several equal modules whose parameters, or products, have another dtype.

    Args:
        root: The model.
        products: The dtypes in which modules computed products, by path.
        lines: The lines that called modules, by ``id``.
    """
    for path, parent in named_modules(root):
        kinds: dict[Any, dict[str, nn.Module]] = {}
        for name, child in parent.named_children():
            shapes = (type(child), *[each.shape for each in child.parameters()])
            kinds.setdefault(shapes, {})[f"{path}.{name}" if path else name] = child
        for equal in kinds.values():
            own = {
                where: {of.dtype for of in filter(is_readable, each.parameters())}
                for where, each in equal.items()
            }
            done = {where: products.get(where, set()) for where in equal}
            strays = [*_strays("parameters are", own)] or [*_strays("products are", done)]
            for where, evidence, usual in strays:
                place, remedy = (
                    (where, "", lines.get(id(equal[where]), "")),
                    f"make them {usual}, too",
                )
                yield Finding("HP108", *place, evidence, 1 / len(equal), None, remedy)


def _strays(what: str, found: Mapping[str, set[torch.dtype]]) -> Iterator[tuple[str, str, str]]:
    """Yields the names that have other dtypes than most, the evidence, and the dtypes of most."""
    texts = {k: " and ".join(sorted(map(short_name, each))) for k, each in found.items() if each}
    usual, count = Counter(texts.values()).most_common(1)[0] if texts else ("", 0)
    if 2 * count > len(texts) and set(LOW_DTYPES) & set().union(*found.values()):
        for name, text in texts.items():
            if text != usual:
                yield (
                    name,
                    f"its {what} {text}; those of {count} modules of its kind {usual}",
                    usual,
                )


# --- HP109: range ----------------------------------------------------------------------------------


def out_of_range(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP109: infinite results, results close to it, and those below the normal numbers that cost accuracy."""
    result = next((each for each in seen.outputs if each.dtype in LOW_DTYPES), None)
    if result is None or not result.numel():
        yield from _vanished(seen, trace)
        return
    limits, name = torch.finfo(result.dtype), short_name(result.dtype)
    remedy = "no cast" if seen.moves else f"{seen.line()} in the fp32 list"
    values = _magnitudes(result)
    if values.isnan().any():
        yield from _undefined(seen, trace, result)
    if values.isinf().any():
        exact = None if any(_magnitudes(e).isinf().any() for e in seen.inputs) else _exact(seen)
        if exact is not None and (count := (values.isinf() & (exact < _MASK)).sum().item()):
            evidence = f"{count:,} of {len(values):,} results are infinite in {name}, which ends at {limits.max:.3g}"
            yield Finding("HP109", *seen.place, evidence, count / len(values), 0.0, remedy)
        return
    largest, same = _largest(result), [e for e in seen.inputs if e.dtype is result.dtype]
    if largest > limits.max / 4 >= max(map(_largest, same), default=0.0):
        evidence = f"the largest value is {largest:.3g}; {name} ends at {limits.max:.3g}"
        effects = largest / limits.max, largest / torch.finfo(torch.float32).max
        yield Finding("HP109", *seen.place, evidence, *effects, remedy)
        return
    numbers = [abs(e) for e in (*seen.args, *seen.kwargs.values()) if isinstance(e, float)]
    tiny, lost = values < limits.tiny, [each for each in numbers if 0 < each < limits.tiny]
    is_near = tiny.all() or (tiny & (values > 0)).any()  # else zeros have other reasons
    if lost or (is_near and tiny.double().mean() > 0.01):
        exact, found = _exact(seen), _worse_than_fp32(seen)
        if exact is None:
            return
        share, off = (
            (tiny & each).double().mean().item()
            for each in (exact > 0, (exact - values).abs() > exact / 8)  # 3 bits
        )
        if lost and off and (values == 0).any():
            evidence = (
                f"{off:.1%} of the values are lost: {lost[0]:.3g} is subnormal or zero in {name}"
            )
            yield Finding("HP109", *seen.place, evidence, off, 0.0, remedy)
        elif share > 0.01 and found is not None and not (lost and _is_mask(values)):
            evidence = f"{share:.0%} of the values are subnormal or zero in {name}"
            yield Finding("HP109", *seen.place, evidence, *found, f"{remedy}, or a loss scaler")


def _undefined(seen: LintedCall, trace: Trace, result: Tensor) -> Iterator[Finding]:
    """HP109: NaN from values that a low dtype has made infinite, as a softmax gives in a row of masks."""
    given = {id(each): trace.values(each, "exact") for each in seen.inputs if each.isinf().any()}
    wide = {key: each for key, each in given.items() if each is not None and each.isfinite().all()}
    found = seen.run(lambda each: wide.get(id(each), each.detach()).double()) if wide else None
    if found and len(wide) == len(given) and not found[0].isnan().any():
        makers = [of for each in seen.inputs if id(each) in wide for of in trace.makers(each)]
        name, share = short_name(result.dtype), result.isnan().double().mean().item()
        evidence = f"{share:.0%} of the results of {seen.call.op} ({located(seen.call.location)}) are NaN, since these are infinite in {name}"
        remedy = f"{makers[0].kept_line}, or numbers within {name}"
        yield Finding("HP109", *makers[0].place, evidence, share, 0.0, remedy)


def _vanished(seen: LintedCall, trace: Trace) -> Iterator[Finding]:
    """HP109: a comparison with zero of values that a low dtype has made zero."""
    is_compared = isinstance(seen.result, Tensor) and seen.result.dtype is torch.bool
    if not is_compared or not any(type(each) in (int, float) and each == 0 for each in seen.args):
        return
    for each in seen.inputs:
        exact, kept = (trace.values(each, way) for way in ("exact", "kept"))
        if exact is None or kept is None or not (makers := trace.makers(each)):
            continue
        zero, remedied = (
            ((of == 0) & (exact != 0)).double().mean().item() for of in (each, kept.float())
        )
        if zero > max(LEAST, TIMES * remedied):
            evidence = f"{zero:.0%} of the values are zero in {short_name(makers[0].outputs[0].dtype)}, as {seen.call.op} finds at {located(seen.call.location)}"
            yield Finding("HP109", *makers[0].place, evidence, zero, remedied, makers[0].kept_line)


def _is_mask(values: Tensor) -> bool:
    """Whether all values are zero or the same number."""
    return len(torch.unique(values[values > 0])) <= 1


def _magnitudes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:SAMPLE].double().abs()


def _exact(seen: LintedCall) -> Tensor | None:
    """Returns the magnitudes of the first result in float64."""
    found = seen.run(lambda each: each.detach().double())
    return _magnitudes(found[0]) if found else None


def _largest(tensor: Tensor) -> float:
    """Returns the largest magnitude, without masks, which are the largest number."""
    values, end = _magnitudes(tensor), torch.finfo(tensor.dtype).max
    if values.numel() and not values.max() < end:
        values = values[values < end]
    return values.max().item() if values.numel() else 0.0


def _worse_than_fp32(seen: LintedCall) -> tuple[float, float] | None:
    """Returns the errors of the result and of one in float32; None if the remedy gains little."""
    reference = seen.run(lambda each: each.detach().double())
    results = seen.outputs, seen.run(lambda each: each.detach().float())
    error, remedied = (_error(each, reference) for each in results)
    if error is None or remedied is None or error <= max(LEAST, TIMES * remedied):
        return None
    return error, remedied


_Rule = Callable[[LintedCall, Trace, Origins], Iterator[Finding]]

RULES_OF_CALLS: Final[tuple[_Rule, ...]] = (
    late_upcast, other_choice, rounded_integers, merged_steps, cancellation, long_sum, silent_fp32, useless_island,
    mixed_siblings, out_of_range,
)  # fmt: skip


@spared
def _findings_by(
    rule: _Rule, seen: LintedCall, trace: Trace, origins: Origins
) -> list[Finding] | None:
    return list(rule(seen, trace, origins))


def findings_of(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """Yields the findings of all rules about one call."""
    for rule in RULES_OF_CALLS:
        for found in _findings_by(rule, seen, trace, origins) or ():
            seen.is_reported |= found.code in {"HP101", "HP103"}
            yield found
