"""`explain`: looks up ops in the policy in force or the default one, and collects the reasons."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import arguments, casting, compute, ops, torch_state
from ..errors import OptionError, raised_here, shown, suggestion
from ..number_formats import Format
from ..policy import (
    RELATIVE,
    CastPolicy,
    Decision,
    Policy,
    PolicySource,
    leaves_pointwise_einsums,
    load_policy,
)
from ..reports import Row, Views
from ..tensors import LOW_PRECISION, parse_device_types, short_name
from .converting import casts_enabled, is_converted
from .explanation import (
    Explanation,
    Explanations,
    call_sites,
    in_place_sites,
    is_glob,
    listable,
    matching,
    takes_out,
    why_no_match,
)
from .switching import current


def explain(
    op: str | Callable[..., Any],
    record: Views | None = None,
    *,
    policy: Policy | PolicySource | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Explanation | Explanations:
    """Explains how an op is treated, why, and where; `print` shows it.

    Args:
        op: An op name in any spelling that lists accept, a glob such as ``"*norm*"``, or a function
            of torch.
        record: A record of a run: adds the run's call sites of the op, and its dtypes there.
        policy: The policy to explain, in any form that `convert` takes. None: the policy in force, or
            that of ``hmpx.convert()``.

    Returns:
        An `Explanation`; for a glob, `Explanations`.

    Raises:
        OptionError: There is no such op, or ``record`` is not a record.
        PolicyFileError: ``policy`` can't be read, or is not a policy.

    Example:
        >>> policy = hmpx.Policy.from_ops(fp32=["erf"])
        >>> print(hmpx.explain("Tensor.erf", policy=policy))
        erf: FP32, inputs in bf16 or fp16 are cast to fp32
          decided by    <fp32>:1 (policy given)
          call sites    torch.erf, torch.erf_, torch.Tensor.erf, torch.Tensor.erf_,
                        torch.special.erf
          in place      torch.erf_, torch.Tensor.erf_: the dtype of the tensor that is
                        written to decides, not the lists
    """
    if callable(op):
        op = getattr(op, "__name__", op)
    pattern = arguments.text("op", op, "an op name, or a glob such as '*norm*'")
    if record is not None and not isinstance(record, Views):
        raise OptionError(f"record must be an hmpx.record or its report, not {shown(record)}")
    rows = None if record is None else record.report().rows
    given = None if policy is None else load_policy(policy=policy)
    found = explanations(pattern, given, rows)
    return Explanations(found) if is_glob(pattern) else found[0]


def explanations(
    pattern: str, given: Policy | None = None, rows: Iterable[Row] | None = None
) -> list[Explanation]:
    """Returns an explanation for each op that a glob matches, or for the one of that name.

    ``given`` is the policy; None: the one in force, or the default one. ``rows`` are those of a recorded run.
    """
    session = current()
    if given is not None:
        policy, source = given, "policy given"
    elif session is not None:
        policy, source = session.policy, "policy in force"
    else:
        policy, source = load_policy(), "default policy; torch is not converted"
    device_types = parse_device_types(None) if session is None else session.device_types
    legalize = "auto" if session is None else session.options.legalize
    seen = None if rows is None else list(rows)
    by_section = policy.section_rules()
    found = []
    for name in _names(pattern, policy):
        decision = policy[name]
        asked = [*casting.registered(name), *by_section.get(name, ())]
        notes = (
            (device_type, _device_note(name, decision, policy, device_type, legalize))
            for device_type in sorted(device_types)
        )
        found.append(
            Explanation(
                op=name,
                decision=decision,
                policy=source,
                sites=tuple(call_sites(name)),
                in_place=tuple(in_place_sites(name)),
                takes_out=takes_out(name) and decision.cast_policy is not CastPolicy.FP32,
                covers=_also_decided(name, policy),
                asked_first=tuple([_asked(rule) for rule in asked]),
                device_notes=tuple([note for note in notes if note[1]]),
                notes=tuple(_notes(name, policy)),
                # Gradients are not calls of the program.
                calls=tuple(
                    [row for row in seen or () if row.op == name and row.phase != "backward"]
                ),
                is_recorded=seen is not None,
            )
        )
    return found


def _names(pattern: str, policy: Policy) -> list[str]:
    known = listable(policy)
    if is_glob(pattern):
        found = matching(pattern, known)
    else:
        name = ops.resolve(pattern)
        found = [name] if name is not None and name in known else []
        if name is not None and not found and ops.is_foreign(name):
            if why := ops.missing(name) or ops.lacking(name):
                raise OptionError(f"{why}{suggestion(pattern, [*known, *ops.names()])}")
            found = [name]
    if not found:
        raise OptionError(why_no_match(pattern, known, "; `hmpx ops` shows all"))
    return found


def _also_decided(name: str, policy: Policy) -> tuple[str, ...]:
    """Returns the other ops that the line for op ``name`` also decides."""
    if ops.is_foreign(name) or name not in policy.decisions:
        return ()
    decision = policy[name]
    return tuple(
        [
            each
            for each in sorted(ops.covered(name) - {name})
            if policy[each] == decision
            and policy[each].reason == decision.reason
            and _is_decisive(each)
        ]
    )


def _is_decisive(name: str) -> bool:
    """Whether a list decides some calls of op ``name``: not if all write to their first argument."""
    return ops.is_foreign(name) or not all(site.in_place for site in ops.table()[name].sites)


def _asked(rule: Any) -> str:
    """Returns one line on a registered rule, or on a section and its decision."""
    if isinstance(rule, casting.Registered):
        return f"{rule}, level {rule.level}"
    conditions = ", ".join(f"{key} {_said(value)}" for key, value in rule.section.conditions)
    said = rule.decision.cast_policy.name
    return f"{rule}: {said} where {conditions}" if conditions else f"{rule}: {said}"


def _said(value: Any) -> str:
    values = value if isinstance(value, (tuple, list, frozenset)) else (value,)
    return " or ".join(str(each).removeprefix("torch.") for each in values)


def _notes(name: str, policy: Policy) -> Iterable[str]:
    """Yields other facts that affect an op's calls."""
    decision = policy[name]
    if ops.is_foreign(name):
        why = ops.missing(name) or ops.lacking(name)
        yield why or "another library's function: patched when its module is imported"
        return
    if not _is_decisive(name):
        yield "the in-place rule outranks that line: each call writes to its first argument"
        return
    facts = casting.facts_of(name)
    above = ops.covering(name)
    if above is not None and name in policy.decisions:
        own = policy[above]
        if own == decision and own.reason == decision.reason:
            yield f"the line of {above} covers it; a line of its own would outrank that one"
    if casting.is_promotion(decision, facts):
        yield "torch promotes to that type by itself, so calls are patched for observers only"
    if decision.cast_policy is CastPolicy.PASS and not facts.promotes and not facts.is_view:
        yield "a list line, a section or a rule may decide otherwise"
    if name == "einsum" and leaves_pointwise_einsums(policy.decisions):
        yield 'calls that sum no products, such as "i,j->ij", are not cast'
    if facts.norm_parameters and decision.cast_policy is CastPolicy.LOW:
        yield (
            "a norm: its weight and bias follow only where the kernel refuses mixed types; running "
            "statistics keep their dtype"
        )
    if is_converted() and not casts_enabled():
        where = "convert(within=...) casts inside of its module only"
        off = "casts are switched off here and now, by disable_casts or a region of autocast"
        yield where if torch_state.is_outside() else off


# --- how calls compute on a device ---------------------------------------------------------------


def _device_note(
    op: str, decision: Decision, policy: Policy, device_type: str, legalize: str
) -> str:
    """Returns how calls compute on a device; ``""`` if torch's kernels follow the decision exactly."""
    dtype = decision.dtype
    if isinstance(dtype, Format):
        return _emulated(op, decision, dtype, device_type)
    said = [_lacking(op, device_type, decision)]
    if decision.cast_policy is CastPolicy.LOW and isinstance(dtype, torch.dtype):
        said.append(_legalized(op, dtype, device_type, legalize))
    low = policy.low_precision_type
    if (
        decision.cast_policy in RELATIVE
        and isinstance(low, torch.dtype)
        and not ops.is_foreign(op)
        and ops.kind(op)[0] in compute.SLOW_KINDS
    ):
        said.append(f"given {short_name(low)}, {_legalized(op, low, device_type, legalize)}")
    return "; ".join(filter(None, said))


def _emulated(op: str, decision: Decision, number_format: Format, device_type: str) -> str:
    if compute.lowerings(op, number_format.name):
        return "computed by a function that formats.register_op registered"
    name = number_format.name
    roles = [
        f"{role} to {format.name}"
        for role in ("weights", "activations")
        if (format := getattr(decision, role)) is not None
    ]
    to = f" ({', '.join(roles)})" if roles else ""
    results = "are rounded" if decision.output_dtype is None else "are not"
    said = f"emulated: inputs are rounded to {name}{to}, fp32 computes, results {results}"
    options = casting.Options() if (session := current()) is None else session.options
    if not compute.has_float8(device_type, options.hardware):
        return said
    formats = casting.formats_of(decision, number_format, options)
    why = compute.why_not(op, formats, decision.output_dtype, decision.accumulate_dtype)
    if why:
        return f"{said}; not by kernels for float8: {why}"
    return f"computed by kernels for float8 where they take a call, else {said}"


def _lacking(op: str, device_type: str, decision: Decision) -> str:
    """Returns a note on missing low-precision kernels, whose calls compute in fp32."""
    lacking = compute.lacking_kernels().get(op)
    if lacking is None or decision.cast_policy is CastPolicy.FP32:
        return ""
    said = []
    for which, when in (
        (lacking.always, " for some calls" if lacking.only else ""),
        (lacking.sometimes, " for some calls"),
        (lacking.backward, " for gradients"),
    ):
        dtypes = [short_name(dtype) for dtype in LOW_PRECISION if (device_type, dtype) in which]
        if dtypes:
            said.append(f"no {' or '.join(dtypes)} kernel{when}")
    if not said:
        return ""
    return f"{' and '.join(said)}: computed in fp32, the result in the first input's type"


def _legalized(op: str, dtype: torch.dtype, device_type: str, legalize: str) -> str:
    low = short_name(dtype)
    if ops.is_foreign(op) and legalize != "always":
        return f"computed in {low} by the library's own function"
    how = f"legalized: inputs are rounded to {low}, fp32 computes, the result is rounded to {low}"
    if legalize == "fast":
        how = f"legalized: fp32 computes on unrounded inputs, the result is rounded to {low}"
    if legalize == "never":
        return f'computed in {low} by torch\'s kernels: legalize is "never"'
    if legalize == "always":
        return f'{how}: legalize is "always"'
    try:
        known = compute.capability(ops.kind(op)[0], device_type, dtype)
    except raised_here(Exception):  # a CUDA graph is being captured, or there is no such device
        return "not measured yet: whether calls are legalized"
    if not known.is_slow:
        return f"computed in {low} by torch's kernels"
    ratio = max(known.inference or 0, known.training or 0)
    why = (
        f"{device_type} has no {low} kernel"
        if math.isinf(ratio)
        else f"{device_type}'s {low} kernels take {ratio:.1f} times as long"
    )
    exempt = ", except small products" if ops.kind(op)[1] is not None else ""
    return f"{how}{exempt}, since {why}"
