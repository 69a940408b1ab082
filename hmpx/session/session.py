"""A session: one conversion of torch. Wires policy, patches and observers together, and owns undo.

All changes to torch are drafted first and then written at once, so calls in other threads find the old
conversion or the new one.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from .. import compute, torch_state
from ..casting import Options, Registered, all_rules, in_force, in_use
from ..errors import HmpxWarning, to_the_end
from ..observers import ATTACHED, LOGGER, Attached, announcing, log_observer
from ..patches import (
    compile_patches,
    early_name_patches,
    following,
    held_by_models,
    held_function_patches,
    is_renewed,
    kept_value_patches,
    missed,
    note_torchs_modules,
    pickle_patch,
    region_patches,
    retired,
    standing_for,
    value_patches,
)
from ..patching import Draft, ItemPatch, Patch
from ..policy import Policy
from ..registry import eventually, exclusive
from ..torch_internals import STEP_HOOKS
from .policy_patches import (
    Conversion,
    foreign_names,
    foreign_patches,
    originals,
    patches,
    replacements,
)
from .switching import Installation, Kept, current, say, switch_to


class Session:
    """One conversion of torch, in force until it is reverted or replaced.

    As a context manager it restores the previous state on exit.

    Attributes:
        policy: The decision for every op.
        device_types: The device types whose tensors are cast.
        options: How ops compute.
        histories: The amaxes that formats with a history have seen in earlier training steps.
        kept: Its patches, for equal blocks; None if these must be drafted again.

    Example:
        >>> session = hmpx.convert(device_types={"cpu"})
        >>> session.policy["linear"].cast_policy
        <CastPolicy.LOW: 'low'>
        >>> session.revert()
    """

    def __init__(
        self,
        policy: Policy,
        device_types: frozenset[str],
        options: Options,
        verbose: bool | str,
        previous: Session | None,
    ) -> None:
        self.policy = policy
        self.device_types = device_types
        self.options = options
        self._verbose = verbose
        self.histories = compute.Histories()
        self._installation = Installation(rules=all_rules())
        self._has_warned = False
        self._log: Attached | None = None
        self._said: list[str] = []  # about ops of other libraries
        self._previous = previous
        self._is_entered = self._is_left = False
        self.converts = 1  # `convert` calls that this session answers
        self._decided: tuple[object, ...] = ()
        self.kept: Kept | None = None

    @property
    def rules(self) -> tuple[Registered, ...]:
        """The registered rules, in the order of their registration."""
        return self._installation.rules

    @exclusive
    def revert(self) -> None:
        """Undoes the conversion; does nothing if it is not in force."""
        if self is current():
            switch_to(None)

    def missed(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yields where loaded modules hold torch functions from before `convert`, which stay uncast.

        Yields:
            A dotted path such as ``package.module.Block.forward(activation=)``, and the function.
        """
        return missed(originals(self._installation.wrappers) if self is current() else [])

    def __enter__(self) -> Session:
        self._is_entered, self._is_left = True, False
        return self

    def __exit__(self, *exc_info: object) -> None:
        to_the_end(self._leave)

    @exclusive
    def _leave(self) -> None:
        if self.converts > 1:
            self.converts -= 1
            return
        self._is_left = True
        previous = self._previous
        while previous is not None and previous._is_left:  # blocks of tasks may overlap
            previous = previous._previous
        if self is current():
            switch_to(previous, is_kept=previous is None)

    def __repr__(self) -> str:
        state = "in force" if self is current() else "not in force"
        from ..policy import policy_line  # only needed for display

        made = policy_line(self.policy)
        devices = sorted(self.device_types)
        more = f" and {len(devices) - 3} more" if len(devices) > 3 else ""
        return f"<hmpx.Session {state}: {made} on {', '.join(devices[:3])}{more}>"

    def equals(self, other: Session) -> bool:
        """Whether both convert alike."""
        mine, others = self._decides(self.rules), other._decides(other.rules)
        return mine == others and self._verbose == other._verbose

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `restore` for a conversion like this one."""
        return {
            "policy": self.policy,
            "device_types": self.device_types,
            "options": self.options,
            "verbose": self._verbose,
        }

    def announce(self) -> None:
        """Logs what the user should know about this session, which has just come into force."""
        if self._said:
            say(self._said)
        found = held_by_models(originals(self._installation.wrappers)) if self._verbose else ()
        for path, function in found:
            LOGGER.warning("not cast  %r  kept since before convert() by %s", function, path)

    def _decides(self, asked: tuple[Registered, ...]) -> tuple[object, ...]:
        """Returns everything that the results of calls depend on with these rules."""
        functions = asked, compute.LOWERINGS.value
        now = self.policy, self.device_types, self.options, *functions
        if now != self._decided:  # else the same object, which graphs compare
            self._decided = now
        return self._decided

    def _draft(self, draft: Draft, replaced: Installation) -> Installation:
        asked = all_rules()
        if self._verbose and (self._log is None or asked != self.rules):
            self._log = Attached(log_observer(self._verbose))  # other rules may decide otherwise
        logs = () if self._log is None else (self._log,)
        conversion = Conversion(
            self.policy, self.device_types, self.options, (*logs, *ATTACHED.value)
        )
        installed, self._said = _draft_steps(self, conversion, draft, replaced)
        # An equal conversion that follows would have to get all of these again.
        is_told = self._verbose or installed.observers or installed.rules
        may_return = not (is_told or _has_history(self.policy, self.options))
        return dataclasses.replace(installed, may_return=may_return)

    def _extend(
        self,
        draft: Draft,
        patches: Iterable[Patch],
        *,
        notes_modules: bool = False,
        made: Iterable[Callable[..., Any]] = (),
    ) -> None:
        """Applies more patches, with the wrappers ``made`` in them, while the session is in force."""
        installed = self._installation
        kept = [done for done in installed.applied if not is_renewed(done.patch)]
        extended = dataclasses.replace(
            installed,
            applied=(*kept, *draft.apply(patches)),
            wrappers=(*installed.wrappers, *made),
            notes_modules=installed.notes_modules or notes_modules,
        )
        draft.put(Patch(self, "_installation", extended), Patch(self, "kept", None))
        draft.make()

    @eventually
    def add(self, patch: Patch) -> None:
        """Applies one more patch while the session is in force."""
        if self is current():
            self._extend(Draft(), [patch])

    @eventually
    def follow(self, names: Collection[str], module: object) -> None:
        """Wraps the ops of other libraries that ``module`` has added."""
        if self is not current():
            return
        draft, installed = Draft(), self._installation
        conversion = Conversion(self.policy, self.device_types, self.options, installed.observers)
        foreign = foreign_patches(conversion, draft, names, module, installed.wrappers)
        if foreign.made:
            patches: list[Patch] = [*foreign.patches]
            earlier = [*retired(), *installed.wrappers]
            patches += early_name_patches(replacements(foreign.made, earlier))
            patches.append(in_force([*installed.wrappers, *foreign.made]))
            self._extend(draft, patches, made=foreign.made)
        if new := [each for each in foreign.said if each not in self._said]:
            say(new)
        self._said += foreign.said

    @exclusive
    def note_modules(self) -> None:
        """Applies the patches that track running modules."""
        if self is current() and not self._installation.notes_modules:
            draft = Draft()
            patches = torch_state.module_patches(draft, self.warn_of_unmatched)
            self._extend(draft, patches, notes_modules=True)

    @exclusive
    def run_suspended(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function`` with all patches removed, in the whole process."""
        applied, draft = self._installation.applied, Draft()
        covered = set(map(id, draft.undo(applied)))  # these stay beneath other code's patches
        taken = [done.patch for done in applied if id(done.patch) not in covered]
        kept = tuple(done for done in applied if id(done.patch) in covered)
        emptied = dataclasses.replace(self._installation, applied=kept)
        draft.put(Patch(self, "_installation", emptied))
        try:
            draft.make()
            return function(*args, **kwargs)
        finally:
            if self._installation is emptied:
                self._extend(Draft(), taken)

    def warn_of_unmatched(self, root: torch.nn.Module) -> None:
        """Warns, once, of section patterns that match no module in ``root``, which was called."""
        if self._has_warned:
            return
        self._has_warned = True
        unmatched = self.policy.unmatched([name for name, _ in torch_state.named_modules(root)])
        if unmatched:
            patterns = "\n  ".join(unmatched)
            warnings.warn(
                f"these patterns match no module of {type(root).__name__}:\n  {patterns}",
                HmpxWarning,
                stacklevel=4,  # the call of ``root``
            )


# --- the steps of a conversion: their order, and when each is skipped --------------------------


def _has_history(policy: Policy, options: Options) -> bool:
    lists = [policy.decisions, *[section.decisions for section in policy.sections]]
    decided = {id(d): d for each in lists for d in each.values()}  # ops of one line share one
    formats: set[object] = {policy.low_precision_type, options.round_gradients}
    for decision in decided.values():
        formats |= {decision.dtype, decision.weights, decision.activations, decision.gradients}
    return any(map(compute.has_history, formats))


def _draft_steps(
    session: Session, conversion: Conversion, draft: Draft, replaced: Installation
) -> tuple[Installation, list[str]]:
    """Drafts all changes of a conversion to torch; returns problems with names in the lists, too."""
    policy, options, rules = conversion.policy, conversion.options, all_rules()
    is_historical = _has_history(policy, options)
    wrapping, made = patches(conversion, draft)
    others = foreign_patches(conversion, draft, foreign_names(policy))
    wrapping += others.patches
    made += others.made
    draft.put(*in_use(made), first=True)  # before calls can find one in a slot
    installed = Installation(
        wrappers=tuple(made),
        rules=rules,
        # Otherwise modules are tracked from the first request on.
        notes_modules=bool(conversion.observers)
        or is_historical
        or options.within is not None
        or any(section.is_placed for section in policy.sections)
        or any(rule.names_modules() for rule in rules),
        observers=conversion.observers,
    )
    applied = draft.apply(wrapping)

    def step(patches: Iterable[Patch]) -> None:
        """Drafts more patches; if two patch the same slot, the later one calls the earlier one."""
        applied.extend(draft.apply(patches))

    may_have_history = is_historical or bool(rules)
    low = policy.low_precision_type
    low_dtype = low if isinstance(low, torch.dtype) else None
    step(region_patches(draft, session.add, session.run_suspended, low_dtype))
    if conversion.device_types:  # else observers see a program that is not converted
        step(value_patches(draft))
        step(kept_value_patches(draft))
    if session._verbose == "hmp":
        step(announcing(draft))
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
            # Graphs name the model whose amaxes they count, or inside of which they are cast.
            is_cached=not may_have_history and options.within is None,
        )
    )
    return dataclasses.replace(installed, applied=tuple(applied)), others.said
