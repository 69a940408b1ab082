"""`compare`: which op's rounding hurts the result most."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import arguments, phases
from ..errors import FreezeError, OptionError, noted, raised_here, said_by, shown
from ..freezing import is_sealed
from ..inputs import Steps
from ..renames import renamed
from ..session import about_run, check_names, convert, current, refuse_where_off, restoring
from ..tensors import long_name
from ..torch_internals import DisableAutocast, uncompiled
from ..torch_state import reached_by, unchanged, without_casts
from .calls import LowRun, ShadowRun, SiteNumbers
from .comparison import Comparison
from .rows import compared_gradients, compared_sites
from .runs import PROJECTIONS, Done, Runs, different, norm_of, relative


@restoring
@renamed()
def compare(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    forward_step: Callable[[Any, Any], Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    reference: torch.dtype = torch.float32,
    passes: int = 1,
    seed: int = 0,
    **conversion: Any,
) -> Comparison:
    """Compares each call of a model in low precision with float32, and ranks ops by their effect.

    The model runs in low precision, then in float32. There each call also runs in low precision on
    the same inputs, and one backward gives the effect of each difference on the loss. Model, inputs
    and RNG state are restored.

    Args:
        model: The model, or any function. A compiled one runs uncompiled.
        inputs: Its arguments ([inputs](#inputs)), or with ``forward_step`` any batch.
        forward_step: Takes the model and the batch, and returns the output.
        loss_fn: Takes the output, upcast to float32, and the batch, or the output alone; returns a
            tensor of one element. Its own ops run in float32. None: effects are relative to the
            outputs.
        reference: ``torch.float32``, or ``torch.float64`` to compare each call with itself in float64.
        passes: Number of runs over which the comparison is spread. More take longer but need less
            memory.
        seed: Seed of the random projections.
        **conversion: Arguments of `convert`. None given: the conversion in force, else the default.

    Returns:
        The rows, by effect.

    Raises:
        OptionError: An argument has an invalid value, casts are off, ``loss_fn`` returns no such
            tensor, the model rejects the inputs, or it returns a generator or a coroutine.
        FreezeError: The model, or one that the function or an input holds, is frozen.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> def shifted(x):  # a sum that loses its digits, and half of a pair that cancels
        ...     return torch.tanh(x) + ((x + 256.0) - 256.0)
        >>> found = hmpx.compare(shifted, torch.randn(4, 8), policy={"low": ["tanh", "add", "sub"]})
        >>> [row.op for row in found.worst(2)]
        ['add', 'sub']
    """
    steps = Steps("compare", model, forward_step, loss_fn)
    if reference not in (torch.float32, torch.float64):
        raise OptionError(
            f"reference must be torch.float32 or torch.float64, not {shown(reference)}"
        )
    arguments.whole("passes", passes, 1)
    arguments.whole("seed", seed, 0)
    check_names(compare, conversion)
    reached = reached_by(model, inputs, forward_step).modules
    if sealed := next((m for outer in reached for m in outer.modules() if is_sealed(m)), None):
        raise FreezeError(
            f"{type(sealed).__name__} is frozen: the weights that are stored low can't be compared "
            "with float32; compare it before hmpx.freeze, or call undo() on what that returned"
        )
    refuse_where_off("compare")
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(unchanged(model, inputs, forward_step, loss_fn))
        runs = Runs(steps, inputs, seed, state)
        stack.enter_context(runs.observed())  # before wrappers are made: they are made once
        session = current()  # the one that `watch` makes if there is none decides on no op
        is_deciding = session and (session.policy.decisions or session.policy.sections)
        if conversion or not is_deciding:
            stack.enter_context(convert(**{"device_types": runs.device_types, **conversion}))
        stack.enter_context(uncompiled())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(DisableAutocast())
        return _compared(runs, reference, passes, has_loss=loss_fn is not None)


def _compared(runs: Runs, reference: torch.dtype, passes: int, *, has_loss: bool) -> Comparison:
    low_run, low, low_gradients = _low(runs)
    parts = _parts(low_run, passes)

    def exact_runs(*, draws_gradients: bool) -> tuple[Any, Done, Any, ShadowRun]:
        """Returns the numbers by site, and the first run's result, gradients and observer."""
        kept: dict[tuple[str, str, str], SiteNumbers] = {}
        found = []
        for number, part in enumerate(parts, 1):
            phases.enter(f"{long_name(reference)}, run {number} of {len(parts)}")
            shadow = ShadowRun(low_run, reference, part, kept, draws_gradients=draws_gradients)
            try:
                found.append((*runs.exact(shadow, low_gradients), shadow))
            finally:
                shadow.end()
        return kept, *found[0]

    try:
        kept, exact, gradients, shadow = exact_runs(draws_gradients=True)
        fails = exact.error is not None
    except raised_here(RuntimeError):
        fails = True
    if fails:
        kept, exact, gradients, shadow = exact_runs(draws_gradients=False)
    error = low.error or exact.error
    with without_casts():
        norm = math.sqrt(PROJECTIONS) * norm_of(exact.outputs.values())
        scale = math.nan if error else 1.0 if has_loss else 1 / (norm or 1.0)
        return Comparison(
            rows=compared_sites(kept, runs.recorder.rows(), scale),
            gradients=compared_gradients(gradients),
            loss=exact.loss,
            low_loss=low.loss,
            output_error=relative(low.outputs, exact.outputs),
            output_notes=different(low, exact),
            unmatched=shadow.unmatched,
            backward_error=error,
            about=about_run(),
        )


def _low(runs: Runs) -> tuple[LowRun, Done, dict[str, Tensor]]:
    """Runs a model in low precision; without gradients if its backward fails."""
    phases.enter("low precision")
    run = LowRun()
    try:
        return (run, *runs.low(run))
    except raised_here(RuntimeError) as error:
        if not runs.is_calling:
            raise
        run, runs.gradients_error = LowRun(), said_by(error)
        try:
            return (run, *runs.low(run))
        except raised_here(RuntimeError):
            note = (
                "If the model runs without hmpx, keep the op that fails in fp32, by a list or a policy, "
                "and compare again"
            )
            raise noted(error, note) from None


def _parts(low_run: LowRun, passes: int) -> list[set[int]]:
    """Returns the calls that each run compares, by their ``id``, split so that runs keep equal amounts."""
    calls = [call for several in low_run.calls.values() for call in several]
    total, before = sum(call.bytes for call in calls), 0
    found: list[set[int]] = [set() for _ in range(passes)]
    for call in calls:
        found[min(passes - 1, before * passes // (total or 1))].add(id(call))
        before += call.bytes
    return found
