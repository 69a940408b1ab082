"""The steps of a conversion: their patches, their order, and when each is skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import casting, compute, torch_state
from ..casting import Options
from ..observers import announcing
from ..patches import (
    compile_patches,
    control_flow_patches,
    early_name_patches,
    filled_patches,
    following,
    gradient_patches,
    held_function_patches,
    kept_value_patches,
    note_torchs_modules,
    numpy_patches,
    operator_patches,
    pickle_patch,
    region_patches,
    retired,
    standing_for,
)
from ..patching import Applied, Draft, ItemPatch, Patch
from ..policy import Policy
from ..rules import all_rules
from ..torch_internals import STEP_HOOKS
from ..wrappers import in_force, in_use
from .policy_patches import (
    Conversion,
    foreign_names,
    foreign_patches,
    originals,
    patches,
    replacements,
)
from .switching import Installation

if TYPE_CHECKING:
    from .session import Session


def has_history(policy: Policy, options: Options) -> bool:
    """Whether an op rounds to a format with amaxes per module."""
    lists = [policy.decisions, *[section.decisions for section in policy.sections]]
    decided = {id(d): d for each in lists for d in each.values()}  # ops of one line share one
    formats: list[object] = [policy.low_precision_type, options.round_gradients]
    for decision in decided.values():
        formats += (decision.dtype, decision.weights, decision.activations, decision.gradients)
    return any(map(compute.has_history, formats))


def draft_steps(
    session: Session, conversion: Conversion, draft: Draft, replaced: Installation
) -> tuple[Installation, list[str]]:
    """Drafts all changes of a conversion to torch.

    Returns:
        The installation, and problems with names in the lists.
    """
    policy, rules = conversion.policy, all_rules()
    wrapping, made = patches(conversion, draft)
    others = foreign_patches(conversion, draft, foreign_names(policy))
    wrapping += others.patches
    made += others.made
    draft.begin_with(in_use(made))  # before calls can find one in a slot
    installed = Installation(
        wrappers=tuple(made),
        rules=rules,
        # Otherwise modules are tracked from the first request on.
        notes_modules=bool(conversion.observers)
        or has_history(policy, conversion.options)
        or any(section.is_placed for section in policy.sections)
        or any(rule.names_modules() for rule in rules),
        observers=conversion.observers,
    )
    applied = draft.apply(wrapping)
    for step in _steps(session, conversion, draft, installed, applied, replaced.wrappers):
        applied += draft.apply(step)
    return dataclasses.replace(installed, applied=tuple(applied)), others.said


def _steps(  # noqa: PLR0917  # all that a conversion is
    session: Session,
    conversion: Conversion,
    draft: Draft,
    installed: Installation,
    applied: Sequence[Applied],
    replaced: Sequence[Callable[..., Any]],
) -> Iterator[Iterable[Patch]]:
    """Yields the patches of each step after the wrappers; ``applied`` are those of the steps before.

    If two patch the same slot, the later patch calls the earlier one.
    """
    policy, options, made = conversion.policy, conversion.options, installed.wrappers
    may_have_history = has_history(policy, options) or bool(installed.rules)
    low = policy.low_precision_type
    low_dtype = low if isinstance(low, torch.dtype) else None
    yield region_patches(draft, session.add, session.run_suspended, low_dtype)
    yield numpy_patches(draft)
    yield filled_patches(draft)
    yield control_flow_patches(draft)
    yield kept_value_patches(draft)
    yield gradient_patches(draft)
    yield operator_patches(draft)
    if session._verbose == "hmp":
        yield announcing(draft)
    if options.reuse_casts:
        yield casting.cache_patches(draft)
    yield [pickle_patch(originals(made), draft)]
    # The list keeps the earlier wrappers alive, since they are found by id.
    earlier = [*retired(), *replaced]
    if not replaced:
        note_torchs_modules()
    yield early_name_patches(standing_for(applied) | replacements(made, earlier))
    yield held_function_patches(draft, replacements(made, ()))
    yield following(foreign_names(policy), draft, session.follow)
    yield [torch_state.asked_by(session.note_modules), in_force(made)]
    if may_have_history:
        yield [compute.histories_patch(session.histories)]
        yield [ItemPatch(STEP_HOOKS, "hmpx amaxes", compute.end_step)]
    if installed.notes_modules:
        yield torch_state.module_patches(draft, session.warn_of_unmatched)
    yield compile_patches(
        draft,
        policy,
        conversion.device_types,
        session._decides(installed.rules),
        options.legalize,
        options.keep_weight_casts,
        session.add,
        is_cached=not may_have_history,  # graphs name the model whose amaxes they count
    )
