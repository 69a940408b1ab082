"""How calls of an op compute on a device: in native kernels, legalized, emulated, or in fp32 for want of one."""

from __future__ import annotations

import math

import torch

from .. import compute, ops
from ..number_formats import Format
from ..policy import RELATIVE, CastPolicy, Decision, Policy
from ..tensors import LOW_PRECISION, short_name


def device_note(
    op: str, decision: Decision, policy: Policy, device_type: str, legalize: str
) -> str:
    """Returns a sentence; ``""`` where torch's kernels do all that the decision says.

    Args:
        op: Op name.
        decision: What the policy says.
        policy: The policy.
        device_type: The device type.
        legalize: One of `compute.LEGALIZE_MODES`.
    """
    dtype = decision.dtype
    if isinstance(dtype, Format):
        return _emulated(op, decision, dtype)
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


def _emulated(op: str, decision: Decision, number_format: Format) -> str:
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
    return f"emulated: inputs are rounded to {name}{to}, fp32 computes, results {results}"


def _lacking(op: str, device_type: str, decision: Decision) -> str:
    """Returns for which low-precision types a call that gets them computes in fp32."""
    lacking = compute.lacking_kernels().get(op)
    if lacking is None or decision.cast_policy is CastPolicy.FP32:
        return ""
    said = []
    for which, when in (
        (lacking.always, ""),
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
    except Exception:  # a CUDA graph is being captured, or there is no such device
        return "not measured yet: whether calls are legalized"
    slow = [known.is_slow(training=training) for training in (False, True)]
    if not any(slow):
        return f"computed in {low} by torch's kernels"
    when = "" if all(slow) else " in training" if slow[1] else " in inference"
    times = [known.inference, known.training]
    ratio = max(time for time in times if time is not None)
    why = (
        f"{device_type} has no {low} kernel"
        if math.isinf(ratio)
        else f"{device_type}'s {low} kernels take {ratio:.1f} times as long"
    )
    exempt = ", except small products" if ops.kind(op)[1] is not None else ""
    return f"{how}{when}{exempt}, since {why}"
