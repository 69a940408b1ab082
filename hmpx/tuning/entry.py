"""`tune`: finds the smallest set of ops to keep in fp32, and proves that each is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from .. import arguments
from ..policy import LowType
from ..renames import renamed
from ..session import restoring
from ..torch_state import unchanged
from .candidates import Score, candidates_of
from .journal import Journal
from .result import Tuned
from .search import Search, shipped_sets
from .task import Task


@restoring
@renamed(inputs="batches", fresh_inputs="fresh_batches")
def tune(
    model: Callable[..., Any],
    batches: Any,
    loss_fn: Callable[..., Any] | None = None,
    metric: str | Callable[..., Any] | None = None,
    tolerance: float = 1e-2,
    *,
    forward_step: Callable[[Any, Any], Any] | None = None,
    by: str = "op",
    fresh_batches: Any = None,
    measure: Callable[..., Any] | None = None,
    samples: int = 1,
    low_precision_type: LowType | str | None = None,
    device_types: Iterable[str] | None = None,
    legalize: str | None = None,
    seed: int = 0,
    budget: int = 200,
    journal: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[str], object] = True,
) -> Tuned:
    """Finds the smallest set of ops to keep in fp32 for a model to keep its accuracy.

    All other ops that may run in low precision do so. One forward and backward ranks the ops by
    their effect on the result. With the set the error is within the tolerance, without any of its
    members it is not; both are measured.

    Model, inputs, RNG state and conversion are restored.

    Args:
        model: The model: a module, or a function that calls some.
        batches: An iterable of [inputs](#inputs), or of batches for ``forward_step``, also with
            ``measure``: they show which ops the model calls. A tensor, tuple or mapping is one
            batch. Of several the last quarter only checks the set. If the others are five or more,
            the error is a limit for 95 % of further batches, else the largest of theirs.
        loss_fn: As for ``compare``. Effects are then those on the loss, and ``metric="loss"``
            compares it.
        metric: The error of a batch: ``"relative_l2"`` of the outputs (the default); ``"loss"`` for
            its relative change; ``"kl"`` for the divergence of softmaxed logits, in nats; or a
            function ``metric(output, fp32_output)``, 0 for no error. All compute in fp32 or wider.
        tolerance: The largest error allowed.
        forward_step: As for ``compare``.
        by: ``"op"`` decides for each op by name; ``"module"`` for each op in each module that matters.
        fresh_batches: Batches on which the set must pass at the end.
        measure: Replaces the metric: ``measure(model, seed)`` gets a copy of the model and returns
            a number that should be small. The error is its mean increase over fp32 with the same
            seed.
        samples: Most seeds per set for ``measure``: 1, 2, 4, ... until it is clear whether the set passes.
            An undecided set fails.
        low_precision_type: As for `hmpx.convert`; None: that of the conversion in force, else bfloat16.
        device_types: As for `hmpx.convert`; None: those of the conversion in force, else of the
            model and the inputs.
        legalize: As for `hmpx.convert`; None: that of the conversion in force, else ``"always"`` on
            a CPU.
        seed: Seed of random numbers in the model.
        budget: Most evaluations. Once spent, the best set so far is returned.
        journal: A file from which an interrupted search continues.
        progress: As for ``bench``.

    Returns:
        The set and the evidence; after Ctrl-C the best set so far.

    Raises:
        OptionError: An argument has an invalid value, fp32 does not pass, the tolerance is within the
            noise of fp32, or the model calls no op that may be in low precision.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(16, 16)
        ...     def forward(self, x):
        ...         return (self.linear(x) + 256) - 256
        >>> _ = torch.manual_seed(0)
        >>> best = hmpx.tune(Model(), torch.randn(8, 16), device_types={"cpu"}, progress=False)
        >>> sorted(best.keep_fp32), best.low_precision_flops_share
        (['add', 'sub'], 1.0)
    """
    given = dict(locals())
    show = arguments.progress(given.pop("progress"))
    with unchanged(None):  # data loaders draw random numbers
        task = Task(**given)
    with unchanged(model, task.batches, forward_step, loss_fn) as task.state:
        task.measure_noise()
        results = Journal(task.journal, task.header() if task.journal else {})
        task.costs = results.by_spot("spots", task.spots, int, int)
        known = results.by_spot(["scores", task.low_type], task.scores, float, bool, bool)
        scores = known and {spot: Score(*each) for spot, each in known.items()}
        task.candidates = candidates_of(task.costs, scores, task.by, follow=task.may_follow)
        if task.may_follow:
            task.shipped = shipped_sets(task.candidates, task.low_type)
        return Search(task, results, show).run()
