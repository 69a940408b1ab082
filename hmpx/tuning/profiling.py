"""What may run in low precision, what that costs and saves, and what rounding does; and their records in a journal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from .. import ops, session
from ..casting import Options
from ..comparing import ComparedSite, compare
from ..errors import OptionError
from ..policy import DENY, Decision, Policy
from ..recording import record
from ..reports import Row
from ..torch_state import unchanged
from .assignment import FP32, policy_of
from .batches import TUNING, Batch, seed_all
from .candidates import Candidate, Score, Seconds, Spot
from .journal import Journal
from .metrics import loss_of
from .request import Request
from .runner import outcome_from_record

#: How often the model is timed in either type, in turns; once more before, unmeasured.
_ROUNDS: Final = 5


def spots_of(
    model: Any, batches: Sequence[Batch], device_types: frozenset[str], options: Options, seed: int
) -> dict[Spot, tuple[int, int]]:
    """Returns each op and module that may run in low precision -> FLOPs and bytes of its calls."""
    recording = record()
    with (
        unchanged(model),
        torch.no_grad(),
        recording,  # first: wrappers are made once, with it
        session.restore(observing_policy(), device_types, options, False),
    ):
        for index, batch in enumerate(batches):
            seed_all(seed + index)
            batch.run(model)
    return called_spots(recording.rows)


def called_spots(rows: Iterable[Row]) -> dict[Spot, tuple[int, int]]:
    """Returns each spot whose op may run in low precision -> FLOPs and bytes of its calls.

    The rows are those of a forward in fp32 that is converted by a policy without decisions. Left out are
    ops that write to their first argument, whose dtype decides, those that only move, convert or make
    tensors, and those without a floating-point result, such as comparisons.
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


def effects(rows: Iterable[ComparedSite]) -> dict[Spot, Score]:
    """Returns the score of each spot."""
    found: dict[Spot, Score] = {}
    for row in rows:
        before = found.get((row.op, row.module), Score())
        found[row.op, row.module] = Score(
            math.hypot(before.effect, row.effect if math.isfinite(row.effect) else 0.0),
            before.is_hard or not row.fits or math.isinf(row.effect),
            before.is_unseen or row.unseen > 0 or (math.isnan(row.effect) and row.rel != 0),
        )
    return found


def seconds_of(
    model: Any,
    batches: Sequence[Batch],
    device_types: frozenset[str],
    options: Options,
    seed: int,
    *,
    spots: Collection[Spot],
    low_type: str,
) -> dict[Spot, Seconds]:
    """Returns how long the calls of each op and module take, with their casts: medians of some forwards.

    fp32 and low precision take turns, so that what slows the machine down for a while slows both.
    """
    policies = observing_policy(), policy_of(dict.fromkeys(spots, low_type), low_type)
    rounds: tuple[list[dict[Spot, float]], list[dict[Spot, float]]] = ([], [])
    for number in range(_ROUNDS + 1):
        for policy, found in zip(policies, rounds, strict=True):
            recording = record(times=True)
            with (
                unchanged(model),
                torch.no_grad(),
                recording,
                session.restore(policy, device_types, options, False),
            ):
                for index, batch in enumerate(batches):
                    seed_all(seed + index)
                    batch.run(model)
            if number:
                found.append(_seconds(recording, spots))
    return {
        spot: Seconds(*[statistics.median([each[spot] for each in found]) for found in rounds])
        for spot in spots
    }


def _seconds(recording: record, spots: Collection[Spot]) -> dict[Spot, float]:
    found = dict.fromkeys(spots, 0.0)
    for row in recording.rows:
        spot = (row.op, row.module)
        if row.phase != "backward" and spot in found:
            found[spot] += row.seconds or 0.0
    return found


def observing_policy() -> Policy:
    """Returns the policy under which each op of a program in fp32 is seen, and nothing changes.

    Functions written in Python are seen by the ops that they call, unless they call what can't be
    patched, as ``Tensor.__rsub__`` does: such ones are listed, so that they are seen themselves.
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
