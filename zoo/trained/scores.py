"""What users of trained models judge them by, each from outputs, their truth, and the exact outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .task import Outputs


def _ranks(values: Tensor) -> Tensor:
    """Returns ranks; equal values share the mean of theirs."""
    below = (values[:, None] > values).sum(1)
    return below + ((values[:, None] == values).sum(1) - 1) / 2


def rank_correlation(outputs: Outputs, exact: Outputs) -> float:
    """Returns Spearman's coefficient of similarities and grades, x100."""
    both = torch.stack([_ranks(outputs["similarity"].double()), _ranks(outputs["truth"])]).double()
    return 100 * float(torch.corrcoef(both)[0, 1])


def word_f1(outputs: Outputs, exact: Outputs) -> float:
    """Returns the F1 of positive logits, in percent."""
    found, truth = outputs["logits"] > 0, outputs["truth"] > 0
    return 200 * int((found & truth).sum()) / max(int(found.sum() + truth.sum()), 1)


def cents_off(activations: Tensor, bins: Tensor, truth: Tensor) -> float:
    """Returns the mean error of pitches: the mean of bins near the peak. Errors over 100 cents count as 100.

    Args:
        activations: [frames, bins].
        bins: What each stands for, in cents over 10 Hz.
        truth: Hz, [frames].
    """
    activations = activations.double()
    near = activations.argmax(1)[:, None] + torch.arange(-4, 5)
    near = near.clamp(0, len(bins) - 1)
    weights = activations.gather(1, near)
    found = (weights * bins.double()[near]).sum(1) / weights.sum(1)
    expected = 1200 * torch.log2(truth.double() / 10)
    return float((found - expected).abs().nan_to_num(100.0).clamp_max(100).mean())


def _pairs(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Returns similarities of the same voice, and of different ones."""
    voices, speaker = outputs["voices"].double(), outputs["truth"]
    similar = voices @ voices.T
    above = torch.ones_like(similar, dtype=torch.bool).triu(1)
    same = speaker[:, None] == speaker
    return similar[above & same], similar[above & ~same]


def separation(outputs: Outputs, exact: Outputs) -> float:
    """Returns d': the distance of the two means over their standard deviation."""
    same, other = _pairs(outputs)
    return float((same.mean() - other.mean()) / ((same.var() + other.var()) / 2).sqrt())


def true_over_false(outputs: Outputs, exact: Outputs, *, at_equal: bool = False) -> float:
    """Returns how often what is true scores over what is not, or the error where both errors are equal."""
    if "voices" in outputs:
        true, false = _pairs(outputs)
    else:
        scores = outputs["speech"].double()
        true, false = scores[outputs["truth"] > 0], scores[outputs["truth"] == 0]
    if not at_equal:
        over = (true[:, None] > false).double() + 0.5 * (true[:, None] == false).double()
        return float(over.mean())
    cuts = torch.cat([true, false])
    missed = (true < cuts[:, None]).double().mean(1)
    accepted = (false >= cuts[:, None]).double().mean(1)
    best = (missed - accepted).abs().argmin()
    return float((missed + accepted)[best] / 2)


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Returns intersections over unions: [len(a), len(b)]."""
    if not len(a) or not len(b):
        return torch.zeros(len(a), max(len(b), 1), dtype=torch.float64)
    a, b = a.double()[:, None], b.double()[None]
    size = (
        torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    ).clamp_min(0)
    areas = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (a, b)]
    shared = size.prod(-1)
    return shared / (areas[0] + areas[1] - shared)


def faces_found(outputs: Outputs, exact: Outputs) -> float:
    """Returns the F1 of faces that a box covers at least half of, in percent."""
    truth, boxes = outputs["truth"], outputs["boxes"]
    found = int((_overlap(truth, boxes).amax(1) >= 0.5).sum())
    return 200 * found / (len(truth) + len(boxes))


def box_quality(outputs: Outputs, exact: Outputs) -> float:
    """Returns how well the boxes cover the exact ones, in percent."""
    return 100 * float(_overlap(exact["boxes"], outputs["boxes"]).amax(1).mean())


def negative_log(outputs: Outputs, exact: Outputs) -> float:
    """Returns minus the logarithm of the probability of all true classes together, on average."""
    logs = torch.log_softmax(outputs["logits"].double(), -1)
    return -float(logs.masked_fill(outputs["truth"] == 0, float("-inf")).logsumexp(-1).mean())


def mean_precision(outputs: Outputs, exact: Outputs) -> float:
    """Returns the mean average precision of the views of the same thing among all others, in percent."""
    features = F.normalize(outputs["features"].double(), dim=-1)
    things = outputs["truth"]
    similar = (features @ features.T).fill_diagonal_(-2)
    precisions = []
    for row, thing in zip(similar, things, strict=True):
        right = things[row.argsort(descending=True, stable=True)[:-1]] == thing
        hits = right.cumsum(0) / torch.arange(1, len(right) + 1)
        precisions.append(hits[right].mean())
    return 100 * float(torch.stack(precisions).double().mean())


def error_percent(*names: str) -> Callable[[Outputs, Outputs], float]:
    """Returns the relative L2 error of some outputs, in percent, as a score."""

    def score(outputs: Outputs, exact: Outputs) -> float:
        found, expected = (
            torch.cat([o[name].detach().double().flatten() for name in names])
            for o in (outputs, exact)
        )
        return 100 * float((found - expected).norm() / expected.norm())

    return score


def mean_gap(name: str, scale: float) -> Callable[[Outputs, Outputs], float]:
    """Returns the mean absolute error of an output, times `scale`, as a score."""

    def score(outputs: Outputs, exact: Outputs) -> float:
        gap = outputs[name].detach().double() - exact[name].detach().double()
        return scale * float(gap.abs().mean())

    return score
