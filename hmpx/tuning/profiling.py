"""Profiles a model: ops that may run in low precision, their cost, and their effect on the result."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

import torch

from .. import ops, session
from ..comparing import compare
from ..errors import OptionError
from ..policy import DENY, Decision, Policy
from ..recording import record
from ..reports import Row
from ..torch_state import seed_all
from .candidates import Costs, Score, Scores, Spot, policy_of
from .metrics import loss_of
from .request import TUNING, Request

#: Most batches over which effects are summed.
_MOST_BATCHES: Final = 4


def spots_of(request: Request) -> Costs:
    """Maps each op and module that may run in low precision to FLOPs and bytes of its calls."""
    request.state.restore()
    with (
        torch.no_grad(),
        record() as recording,  # first: wrappers are made once and include it
        session.restore(observing_policy(), request.device_types, request.options, False),
    ):
        for index, batch in enumerate(request.batches[TUNING]):
            seed_all(request.seed + index)
            request.steps.forward(batch)
    found = called_spots(recording.rows)
    if not found:
        raise OptionError(
            "the model calls no op on fp32 tensors that may run in low precision; are its inputs and "
            f"parameters fp32, and on {' or '.join(sorted(request.device_types))}?"
        )
    return found


def called_spots(rows: Iterable[Row]) -> Costs:
    """Maps each spot whose op may run in low precision to FLOPs and bytes of its calls.

    The rows come from an fp32 forward, converted by a policy without decisions. Excludes ops that write to
    their first argument, whose dtype decides; ops that only move, convert or make tensors; and those without a
    floating-point result, such as comparisons.
    """
    may_run_low = ops.computing()
    found: dict[Spot, tuple[int, int]] = {}
    for row in rows:
        if (
            row.phase == "backward"
            or row.cast_policy == "TARGET"
            or not (row.op in may_run_low or ops.is_foreign(row.op))
            or "float32" not in row.input_dtypes
            or "float32" not in row.output_dtypes
        ):
            continue
        spot = (row.op, row.module)
        flops, count = found.get(spot, (0, 0))
        found[spot] = flops + row.flops, count + row.bytes
    return found


def observing_policy() -> Policy:
    """Returns a policy that shows each op of an fp32 program and changes nothing.

    Python functions are seen by the ops that they call. Those that call something that can't be patched, as
    ``Tensor.__rsub__`` does, are listed themselves.
    """
    is_listed = ops.facts("python_level")
    listed = [
        name
        for name in ops.computing()
        if any(
            site.is_python
            and (
                site.attribute.startswith("__") or f"{site.namespace}.{site.attribute}" in is_listed
            )
            for site in ops.table()[name].sites
        )
    ]
    return Policy({name: Decision(DENY) for name in sorted(listed)})


def scores_of(request: Request, spots: Collection[Spot]) -> Scores | None:
    """Returns the effect of each spot in low precision, and whether its values leave that type's range.

    None if no effect is known because the model's output has no gradients.
    """
    policy = policy_of(dict.fromkeys(spots, request.low_type), request.low_type)
    found: dict[Spot, Score] = {}
    loss_fn = request.steps.loss_fn or (loss_of if request.metric == "loss" else None)
    for index, batch in enumerate(request.batches[TUNING][:_MOST_BATCHES]):
        request.state.restore()
        seed_all(request.seed + index)
        rows = compare(
            request.model,
            batch,
            forward_step=request.steps.forward_step,
            loss_fn=loss_fn,
            policy=policy,
            device_types=request.device_types,
            legalize=request.options.legalize,
            seed=request.seed,
        ).rows
        for row in rows:
            if (spot := (row.op, row.module)) in spots:
                known = found.get(spot, Score())
                found[spot] = Score(
                    math.hypot(known.effect, row.effect if math.isfinite(row.effect) else 0.0),
                    known.is_hard or not row.fits or math.isinf(row.effect),
                    known.is_unseen
                    or row.unseen > 0
                    or (math.isnan(row.effect) and row.error != 0),
                )
    return found if any(each.effect for each in found.values()) else None
