"""Scores of candidates: the effects that a comparison finds, and their record in a journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..comparing import ComparedSite, compare
from .assignment import policy_of
from .batches import Batch
from .candidates import Spot, effects
from .evaluating import TUNING
from .keeping import seed_all, unchanged
from .metrics import loss_of
from .request import Request

#: How many batches effects are summed over.
_MOST_BATCHES: Final = 4

Costs = dict[Spot, tuple[int, int]]
Scores = dict[Spot, tuple[float, bool]]


def scores_of(request: Request, spots: Costs) -> Scores | None:
    """Returns the effect of each spot, and whether its values leave the low type's range.

    None where no effect is known: what the model returns has no gradients.
    """
    low = dict.fromkeys(spots, request.low_type)
    rows: list[ComparedSite] = []
    for index, batch in enumerate(request.inputs[TUNING][:_MOST_BATCHES]):
        with unchanged(request.model):
            seed_all(request.seed + index)
            rows += compare(
                request.model,
                *((batch.kwargs,) if batch.kwargs else batch.args),
                loss_fn=_loss(request, batch),
                policy=policy_of(low, request.low_type),
                device_types=request.device_types,
                legalize=request.options.legalize,
                seed=request.seed,
            ).rows
    found = {spot: each for spot, each in effects(rows).items() if spot in spots}
    return found if any(effect or is_hard for effect, is_hard in found.values()) else None


def _loss(request: Request, batch: Batch) -> Callable[[Any], Any] | None:
    """Returns the loss whose gradients effects are made of; None for projections of the outputs."""
    if request.loss_fn is None and request.metric != "loss":
        return None
    return lambda output: loss_of(request.loss_fn, output, batch)


def to_record(spots: Costs, scores: Scores | None) -> dict[str, Any]:
    """Returns a profile as a journal has it."""
    return {
        "spots": [[*spot, *cost] for spot, cost in spots.items()],
        "scores": None
        if scores is None
        else [[*spot, effect, is_hard] for spot, (effect, is_hard) in scores.items()],
    }


def from_record(record: Mapping[str, Any]) -> tuple[Costs, Scores | None]:
    """Returns the profile of a record."""
    spots = {(op, module): (flops, count) for op, module, flops, count in record["spots"]}
    scores = record["scores"]
    if scores is None:
        return spots, None
    return spots, {(op, module): (effect, hard) for op, module, effect, hard in scores}
