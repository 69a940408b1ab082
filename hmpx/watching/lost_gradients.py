"""Finds gradients that became zero in low precision, by running a forward and its backward again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import passing_over
from ..tensors import is_floating
from .chains import Chain, fewest
from .records import CallRecord, Cell, GradientRecord, Trial
from .slots import Extremes
from .trials import aside, can_change


def lost_gradient(
    failed: CallRecord,
    records: Sequence[CallRecord | GradientRecord],
    extremes_of: Callable[[Cell], Extremes | None],
) -> Trial | None:
    """Returns the calls that need float32, since their backward made gradients zero that a failed call takes.

    None if zero gradients are not the cause, or the backward can't be repeated.
    """
    with aside([]), passing_over(Exception):
        calls = [each for each in records if isinstance(each, CallRecord)]
        passed, chain = _last_backward(records), Chain(failed, calls)
        given = [each for each in chain.given() if is_floating(each) and not each.count_nonzero()]
        if not (passed and given and chain.is_known):
            return None
        forward = Chain(passed[0].record, calls)
        if not forward.is_known:
            return None
        pairs = [
            (zeros, number)
            for number, each in enumerate(forward.gradients(()))
            for zeros in given
            if (each.shape, each.dtype) == (zeros.shape, zeros.dtype) and torch.equal(each, zeros)
        ]

        def is_enough(exact: Sequence[CallRecord], *, upcasts: bool = False) -> bool:
            found = forward.gradients(exact, upcasts=upcasts)
            chain.replaced = {id(zeros): _laid_out(found[number], zeros) for zeros, number in pairs}
            return not chain.run(exact, None)[0]

        every = [*forward.calls, *chain.calls]
        if not (pairs and is_enough(every, upcasts=True)):
            return None
        low = [each for each in every if can_change(each.call)]
        causes = tuple([each.call for each in fewest(low, is_enough)])

        def loses(record: GradientRecord) -> bool:
            before, after = (
                [extremes_of(each) or (0.0, 0.0) for each in cells]
                for cells in (record.before, record.after)
            )
            return any(map(any, before)) and bool(after) and not any(map(any, after))

        loser = next(filter(loses, passed), None)
        return Trial(
            0, is_underflow=True, causes=causes, loser=None if loser is None else loser.record.call
        )
    return None


def _last_backward(records: Sequence[CallRecord | GradientRecord]) -> list[GradientRecord]:
    """Returns the gradients of the last backward, in order."""
    found: list[GradientRecord] = []
    for is_gradient, group in itertools.groupby(records, lambda e: isinstance(e, GradientRecord)):
        if is_gradient:
            found = [each for each in group if isinstance(each, GradientRecord)]
    return found


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype).copy_(tensor)
