"""The steps of a conversion: what each patches, in which order, and when it is left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from .. import casting, compute, torch_state
from ..compute import Histories
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
from ..patching import Applied, Change, Draft, ItemPatch, Patch
from ..rules import Registered
from ..torch_internals import STEP_HOOKS
from ..warning import relocating
from ..wrappers import in_force
from .installation import Installation, asks_for_modules, has_history
from .policy_patches import Conversion, Foreign, foreign_names, originals, patches, replacements


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What patches call in the session that is in force.

    Attributes:
        add: Applies one more patch.
        run_suspended: Calls a function without any of the patches.
        follow: Wraps the ops of these names that came with a module.
        note_modules: Applies the patches that note running modules.
        first_call_ended: Takes the first outermost module with parameters whose call has ended.
    """

    add: Callable[[Patch], None]
    run_suspended: Callable[..., Any]
    follow: Callable[[Collection[str], object], None]
    note_modules: Callable[[], None]
    first_call_ended: Callable[[torch.nn.Module], None]


class StepContext:
    """What the steps of one conversion work with.

    Attributes:
        conversion: The settings that wrappers follow.
        draft: Where torch is as it would be without a conversion.
        callbacks: Those of the session.
        verbose: Whether calls are logged, and how.
        rules: The rules that are asked.
        replaced: Wrappers of the conversion that this one replaces.
        histories: The amaxes that the conversion has seen.
        decides: Everything that results of calls depend on.
        foreign: The names of ops of other libraries.
        wrapping: The patches that install the wrappers.
        made: The wrappers.
        applied: What the steps have drafted so far.
        said: Problems with names in the lists.
        may_have_history: Whether ops may round to formats that scale by earlier steps.
        notes_modules: Whether running modules are noted from the start.
    """

    def __init__(  # noqa: PLR0917  # all that a conversion is
        self,
        conversion: Conversion,
        draft: Draft,
        callbacks: Callbacks,
        verbose: bool | str,
        rules: tuple[Registered, ...],
        replaced: tuple[Callable[..., Any], ...],
        histories: Histories,
        decides: object,
    ) -> None:
        """Makes the wrappers; changes nothing."""
        self.conversion, self.draft, self.callbacks = conversion, draft, callbacks
        self.histories, self.decides = histories, decides
        self.verbose, self.rules, self.replaced = verbose, rules, replaced
        self.foreign = foreign_names(conversion.policy)
        self.wrapping, self.made = patches(conversion, draft)
        others = Foreign(conversion, draft)
        others.take(self.foreign)
        self.wrapping += others.patches
        self.made += others.made
        self.applied: list[Applied] = []
        self.said = others.said
        needs_history = has_history(conversion.policy, conversion.options)
        self.may_have_history = needs_history or bool(rules)
        self.notes_modules = (
            bool(conversion.observers)
            or needs_history
            or asks_for_modules(conversion.policy, rules)
        )


def draft_steps(context: StepContext) -> Installation:
    """Drafts all steps that the conversion needs, and returns what they put into torch."""
    applied = context.applied
    for step in STEPS:
        if step.is_needed(context):
            applied += context.draft.apply(step.patches(context))
    return Installation(
        tuple(applied),
        tuple(context.made),
        context.rules,
        context.notes_modules,
        context.conversion.observers,
    )


def _wrappers(context: StepContext) -> Iterable[Change]:
    """The functions of torch and of other libraries that the policy decides about."""
    return context.wrapping


def _regions(context: StepContext) -> Iterable[Change]:
    """Optimizers, loss scalers, checkpoints, `torch.autocast`, scripting, printing."""
    low = context.conversion.policy.low_precision_type
    low_dtype = low if isinstance(low, torch.dtype) else None
    callbacks = context.callbacks
    return region_patches(context.draft, callbacks.add, callbacks.run_suspended, low_dtype)


def _numpy(context: StepContext) -> Iterable[Change]:
    """Values that numpy gets."""
    return numpy_patches(context.draft)


def _filled(context: StepContext) -> Iterable[Change]:
    """Tensors that are made full of a number."""
    return filled_patches(context.draft)


def _control_flow(context: StepContext) -> Iterable[Change]:
    """Branches and loops that torch traces."""
    return control_flow_patches(context.draft)


def _kept_values(context: StepContext) -> Iterable[Change]:
    """Requests for low precision, and what keeps tensors: parameters and buffers."""
    return kept_value_patches(context.draft)


def _operators(context: StepContext) -> Iterable[Change]:
    """How operators of `torch.ops` are called."""
    return operator_patches(context.draft)


def _gradients(context: StepContext) -> Iterable[Change]:
    """Gradients that a program computes in hooks, or sets."""
    return gradient_patches(context.draft)


def _hmp_messages(context: StepContext) -> Iterable[Change]:
    """`disable_casts`, which prints what HMP printed."""
    return announcing(context.draft)


def _reused_casts(context: StepContext) -> Iterable[Change]:
    """Calls of modules, and writes to tensors, at which reused casts end."""
    return casting.cache_patches(context.draft)


def _pickling(context: StepContext) -> Iterable[Change]:
    """How pickle stores torch's builtins, under whose names wrappers are."""
    return [pickle_patch(originals(context.made), context.draft)]


def _warnings(context: StepContext) -> Iterable[Change]:
    """Warnings of torch, whose lines are those without wrappers."""
    name = "_showwarnmsg"
    return [Patch(warnings, name, relocating(context.draft.attribute(warnings, name)))]


def _early_names(context: StepContext) -> Iterable[Change]:
    """Names that modules took from torch before the conversion, or during an earlier one."""
    # The list keeps the earlier wrappers alive, which are found by their ids.
    earlier = [*retired(), *context.replaced]
    if not context.replaced:
        note_torchs_modules()
    others = standing_for(context.applied)
    yield from early_name_patches(others | replacements(context.made, earlier))


def _held_functions(context: StepContext) -> Iterable[Change]:
    """Functions that graphs of torch.fx hold, and classes."""
    return held_function_patches(context.draft, replacements(context.made, ()))


def _later_ops(context: StepContext) -> Iterable[Change]:
    """Imports of modules, and definitions of operators, that bring ops of other libraries."""
    return following(context.foreign, context.draft, context.callbacks.follow)


def _hmpx_itself(context: StepContext) -> Iterable[Change]:
    """Where hmpx notes which wrappers are in force, and who is asked for running modules."""
    return [torch_state.asked_by(context.callbacks.note_modules), in_force(context.made)]


def _delayed_scaling(context: StepContext) -> Iterable[Change]:
    """Where hmpx notes the amaxes of earlier steps, and optimizers' steps, which end one."""
    yield compute.histories_patch(context.histories)
    yield ItemPatch(STEP_HOOKS, "hmpx amaxes", compute.end_step)


def _running_modules(context: StepContext) -> Iterable[Change]:
    """Calls of modules, which are noted."""
    return torch_state.module_patches(context.draft, context.callbacks.first_call_ended)


def _compiling(context: StepContext) -> Iterable[Change]:
    """Inductor's kernels, caches and settings."""
    settings = context.conversion
    return compile_patches(
        context.draft,
        settings.policy,
        settings.device_types,
        context.decides,
        settings.options.legalize,
        settings.options.keep_weight_casts,
        context.callbacks.add,
        is_cached=not context.may_have_history,  # graphs name the model whose amaxes they count
    )


class Step(NamedTuple):
    """One step of a conversion.

    Attributes:
        patches: Returns what to patch; the draft holds the steps before this one.
        is_needed: Whether the conversion takes this step.
    """

    patches: Callable[[StepContext], Iterable[Change]]
    is_needed: Callable[[StepContext], bool] = lambda context: True


#: In this order: where two patch the same slot, the later one's patch calls the earlier one's.
STEPS: Final = (
    Step(_wrappers),
    Step(_regions),
    Step(_numpy),
    Step(_filled),
    Step(_control_flow),
    Step(_kept_values),
    Step(_gradients),
    Step(_operators),
    Step(_hmp_messages, lambda context: context.verbose == "hmp"),
    Step(_reused_casts, lambda context: context.conversion.options.reuse_casts),
    Step(_pickling),
    Step(_warnings),
    Step(_early_names),
    Step(_held_functions),
    Step(_later_ops),
    Step(_hmpx_itself),
    Step(_delayed_scaling, lambda context: context.may_have_history),
    Step(_running_modules, lambda context: context.notes_modules),
    Step(_compiling),
)
