"""Scores of candidates: the effects that a comparison finds, and their record in a journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..comparing import ComparedSite, compare
from ..errors import OptionError
from ..torch_state import unchanged
from .assignment import FP32, policy_of
from .batches import Batch
from .candidates import Candidate, Score, Seconds, Spot, effects
from .evaluating import TUNING
from .journal import Journal
from .metrics import loss_of
from .profiling import seconds_of
from .request import Request
from .runner import outcome_from_record
from .seeding import seed_all

#: How many batches effects are summed over.
_MOST_BATCHES: Final = 4

#: The squared error of what leaves a type's range.
_OUT_OF_RANGE: Final = 1e30

Costs = dict[Spot, tuple[int, int]]
Scores = dict[Spot, Score]


def scores_of(request: Request, spots: Costs, low_type: str) -> Scores | None:
    """Returns the effect of each spot in a type, and whether its values leave that type's range.

    None where no effect is known: what the model returns has no gradients.
    """
    low = dict.fromkeys(spots, low_type)
    rows: list[ComparedSite] = []
    for index, batch in enumerate(request.inputs[TUNING][:_MOST_BATCHES]):
        with unchanged(request.model):
            seed_all(request.seed + index)
            rows += compare(
                request.model,
                *((batch.kwargs,) if batch.kwargs else batch.args),
                loss_fn=_loss(request, batch),
                policy=policy_of(low, low_type),
                device_types=request.device_types,
                legalize=request.options.legalize,
                seed=request.seed,
            ).rows
    found = {spot: each for spot, each in effects(rows).items() if spot in spots}
    return found if any(each.effect for each in found.values()) else None


def seconds_of_spots(request: Request, spots: Costs, journal: Journal) -> dict[Spot, Seconds]:
    """Returns how long each spot takes in either type: as the journal has it, else measured."""
    for known in journal.parsed("seconds", _seconds_from_record):
        if known.keys() >= spots.keys():
            return known
    found = seconds_of(
        request.model,
        request.inputs[TUNING],
        request.device_types,
        request.options,
        request.seed,
        spots=spots,
        low_type=request.low_type,
    )
    journal.write({"seconds": [[*spot, *each] for spot, each in found.items()]})
    return found


def errors_of(
    request: Request, spots: Costs, found: Sequence[Candidate], journal: Journal
) -> dict[str, dict[str, float]]:
    """Returns each type -> each candidate -> the square of what computing it in that type does.

    Raises:
        OptionError: No effect is known.
    """
    names = {each.name for each in found}
    for known in journal.parsed("errors", _errors_from_record):
        if known.keys() >= {FP32, *request.types} and all(
            each.keys() >= names for each in known.values()
        ):
            return known
    errors = {FP32: dict.fromkeys((each.name for each in found), 0.0)}
    for name in request.types:
        if name == FP32:
            continue
        scores = scores_of(request, spots, name)
        if scores is None:
            raise OptionError(
                "to choose among several types effects are needed, but what the model returns has no "
                "gradients; tune one low_precision_type instead"
            )
        errors[name] = {each.name: _squared(each, scores) for each in found}
    journal.write({"errors": errors})
    return errors


def _squared(candidate: Candidate, scores: Scores) -> float:
    known = [scores.get(spot, Score()) for spot in candidate.spots]
    if any(each.is_hard for each in known):
        return _OUT_OF_RANGE
    return sum(each.effect**2 for each in known)


def _loss(request: Request, batch: Batch) -> Callable[[Any], Any] | None:
    """Returns the loss whose gradients effects are made of; None for projections of the outputs."""
    if request.loss_fn is None and request.metric != "loss":
        return None
    return lambda output: loss_of(request.loss_fn, output, batch)


def to_record(spots: Costs, scores: Scores | None) -> dict[str, Any]:
    """Returns a profile as a journal has it."""
    return {
        "spots": [[*spot, *cost] for spot, cost in spots.items()],
        "scores": None if scores is None else [[*spot, *score] for spot, score in scores.items()],
    }


def from_record(record: Mapping[str, Any]) -> tuple[Costs, Scores | None]:
    """Returns the profile of a record."""
    spots = {
        (str(op), str(module)): (int(flops), int(count))
        for op, module, flops, count in record["spots"]
    }
    if not spots:
        raise ValueError("no spots")
    scores = record["scores"]
    if scores is None:
        return spots, None
    return spots, {
        (str(op), str(module)): Score(float(effect), bool(is_hard), bool(is_unseen))
        for op, module, effect, is_hard, is_unseen in scores
    }


def _seconds_from_record(record: Mapping[str, Any]) -> dict[Spot, Seconds]:
    return {
        (str(op), str(module)): Seconds(float(fp32), float(low))
        for op, module, fp32, low in record["seconds"]
    }


def _errors_from_record(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        low_type: {name: float(error) for name, error in errors.items()}
        for low_type, errors in record["errors"].items()
    }


#: A key -> what parses the records of a journal that have it.
RECORDS: Final[Mapping[str, Callable[[Any], object]]] = {
    "spots": from_record,
    "seconds": _seconds_from_record,
    "errors": _errors_from_record,
    "kept": outcome_from_record,
}
