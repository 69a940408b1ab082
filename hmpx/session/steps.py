"""The steps of a conversion: their patches, their order, and when each is skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .. import casting, compute, torch_state
from ..casting import Options
from ..observers import announcing
from ..patches import (
    compile_patches,
    early_name_patches,
    following,
    held_function_patches,
    kept_value_patches,
    note_torchs_modules,
    pickle_patch,
    region_patches,
    retired,
    standing_for,
    value_patches,
)
from ..patching import Draft, ItemPatch, Patch
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
    policy, options, rules = conversion.policy, conversion.options, all_rules()
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
        or has_history(policy, options)
        or any(section.is_placed for section in policy.sections)
        or any(rule.names_modules() for rule in rules),
        observers=conversion.observers,
    )
    applied = draft.apply(wrapping)

    def step(patches: Iterable[Patch]) -> None:
        """Drafts more patches; if two patch the same slot, the later one calls the earlier one."""
        applied.extend(draft.apply(patches))

    may_have_history = has_history(policy, options) or bool(rules)
    low = policy.low_precision_type
    low_dtype = low if isinstance(low, torch.dtype) else None
    step(region_patches(draft, session.add, session.run_suspended, low_dtype))
    step(value_patches(draft))
    step(kept_value_patches(draft))
    if session._verbose == "hmp":
        step(announcing(draft))
    if options.reuse_casts:
        step(casting.cache_patches(draft))
    step([pickle_patch(originals(made), draft)])
    # The list keeps the earlier wrappers alive, since they are found by id.
    earlier = [*retired(), *replaced.wrappers]
    if not replaced.wrappers:
        note_torchs_modules()
    step(early_name_patches(standing_for(applied) | replacements(made, earlier)))
    step(held_function_patches(draft, replacements(made, ())))
    step(following(foreign_names(policy), draft, session.follow))
    step([torch_state.asked_by(session.note_modules), in_force(made)])
    if may_have_history:
        step([compute.histories_patch(session.histories)])
        step([ItemPatch(STEP_HOOKS, "hmpx amaxes", compute.end_step)])
    if installed.notes_modules:
        step(torch_state.module_patches(draft, session.warn_of_unmatched))
    step(
        compile_patches(
            draft,
            policy,
            conversion.device_types,
            session._decides(rules),
            options.legalize,
            options.keep_weight_casts,
            session.add,
            is_cached=not may_have_history,  # graphs name the model whose amaxes they count
        )
    )
    return dataclasses.replace(installed, applied=tuple(applied)), others.said
