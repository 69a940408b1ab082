"""A session: one conversion of torch. Wires policy, patches and observers together, and owns undo."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from .. import casting, compute, torch_state
from ..casting import Options
from ..errors import HmpxWarning
from ..observers import (
    ATTACHED,
    LOGGER,
    Attached,
    announcing,
    log_observer,
)
from ..patches import (
    compile_patches,
    early_name_patches,
    following,
    held_by_models,
    is_renewed,
    missed,
    numpy_patches,
    pickle_patch,
    region_patches,
    retired,
)
from ..patching import Change, Draft, Patch
from ..policy import Policy, policy_line
from ..registry import exclusive
from ..rules import RULES, Registered, all_rules
from ..wrappers import in_force, retirement
from . import policy_patches
from .changing import forget_what_is_cached, paused_gc, said_of, say
from .installation import Installation, asks_for_modules
from .policy_patches import Conversion

_current: Session | None = None


class Session:
    """One conversion of torch, in force until it is reverted or replaced.

    As a context manager it restores on exit what was in force before its `convert`.

    Attributes:
        policy: The decision for every op.
        device_types: The device types whose tensors are cast.
        options: How ops compute.

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
        """Is called by `convert` only."""
        self.policy = policy
        self.device_types = device_types
        self.options = options
        self._verbose = verbose
        self._installation = Installation(rules=all_rules())
        self._has_warned = False
        self._log: Attached | None = None
        self._said: list[str] = []  # of ops of other libraries
        self._previous = previous
        self._is_entered = self._is_left = False
        self._converts = 1  # `convert` calls that this session answers

    @property
    def rules(self) -> tuple[Registered, ...]:
        """The rules that are asked, in the order of their registration."""
        return self._installation.rules

    @exclusive
    def revert(self) -> None:
        """Undoes the conversion; does nothing if it is no longer in force."""
        self._leave_to(None)

    def missed(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yields where loaded modules keep functions of torch from before `convert`, uncast.

        Yields:
            A dotted path such as ``package.module.Block.forward(activation=)``, and the function.
        """
        return missed(self._originals())

    def _originals(self) -> list[Callable[..., Any]]:
        return [vars(wrapper)["__wrapped__"] for wrapper in self._installation.wrappers]

    def _log_what_models_keep(self) -> None:
        if self._verbose:
            for path, function in held_by_models(self._originals()):
                LOGGER.warning("not cast  %r  kept since before convert() by %s", function, path)

    def __enter__(self) -> Session:
        self._is_entered, self._is_left = True, False
        return self

    @exclusive
    def __exit__(self, *exc_info: object) -> None:
        if self._converts > 1:
            self._converts -= 1
            return
        self._is_left = True
        previous = self._previous
        while (
            previous is not None and previous._is_left
        ):  # blocks may overlap, as those of tasks do
            previous = previous._previous
        self._leave_to(previous)

    def _leave_to(self, session: Session | None) -> None:
        """Puts ``session`` in force instead of this one; what interrupts that is raised afterwards."""
        try:
            if self is _current:
                switch_to(session)
        except BaseException:
            if self is _current:
                switch_to(session)
            raise

    def __repr__(self) -> str:
        state = "in force" if self is _current else "not in force"
        made = policy_line(
            self.policy.decisions, self.policy.low_precision_type, self.policy.sections
        )
        devices = sorted(self.device_types)
        more = f" and {len(devices) - 3} more" if len(devices) > 3 else ""
        return f"<hmpx.Session {state}: {made} on {', '.join(devices[:3])}{more}>"

    def answers(self, other: Session) -> bool:
        """Whether this session does what ``other`` would; if so it is left once more often."""
        is_equal = self._settings() == other._settings()
        self._converts += is_equal
        return is_equal

    def _settings(self) -> tuple[object, ...]:
        return self.policy, self.device_types, self.options, self._verbose, self.rules

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `restore` for a conversion like this one."""
        return {
            "policy": self.policy,
            "device_types": self.device_types,
            "options": self.options,
            "verbose": self._verbose,
        }

    def _conversion(self, observers: tuple[Attached, ...]) -> Conversion:
        return Conversion(self.policy, self.device_types, self.options, observers)

    def _decides(self, installed: Installation) -> tuple[object, ...]:
        """Returns everything that results of calls depend on while ``installed`` is in torch."""
        functions = installed.rules, compute.LOWERINGS.value
        return self.policy, self.device_types, self.options, *functions

    def _draft(self, draft: Draft, replaced: Installation) -> Installation:
        """Drafts all patches of this session; changes nothing.

        Args:
            draft: Where torch is as it would be without a conversion.
            replaced: What the session before has put into torch.
        """
        observers: tuple[Attached, ...] = ()
        asked = all_rules()
        if self._verbose:
            if self._log is None or asked != self.rules:  # which may decide otherwise
                self._log = Attached(log_observer(self._verbose))
            observers = (self._log,)
        observers += ATTACHED.value
        conversion = self._conversion(observers)
        patches, made = policy_patches.patches(conversion, draft)
        foreign = policy_patches.Foreign(conversion, draft)
        foreign.take(policy_patches.foreign_names(self.policy))
        patches += foreign.patches
        made += foreign.made
        self._said = foreign.said
        applied = draft.apply(patches)
        low = self.policy.low_precision_type
        low_dtype = low if isinstance(low, torch.dtype) else None
        applied += draft.apply(region_patches(draft, self._add, self._run_suspended, low_dtype))
        applied += draft.apply(numpy_patches(draft))
        if self._verbose == "hmp":
            applied += draft.apply(announcing(draft))
        if self.options.reuse_casts:
            applied += draft.apply(casting.cache_patches(draft))
        originals = [vars(wrapper)["__wrapped__"] for wrapper in made]
        applied += draft.apply([pickle_patch(originals, draft)])
        # Names may also have been taken during a conversion: this list keeps those wrappers' ids.
        earlier = [*retired(), *replaced.wrappers]
        replacements = policy_patches.replacements(made, earlier)
        applied += draft.apply(early_name_patches(replacements))
        applied += draft.apply(
            following(policy_patches.foreign_names(self.policy), draft, self._follow)
        )
        applied += draft.apply([torch_state.asked_by(self._note_modules), in_force(made)])
        notes_modules = bool(observers) or asks_for_modules(self.policy, asked)
        if notes_modules:  # on top of the patch of the same slot for reused casts
            applied += draft.apply(torch_state.module_patches(draft, self._warn_of_unmatched))
        applied += draft.apply(
            compile_patches(
                draft,
                self.policy,
                self.device_types,
                self.options,
                asked,
                self.options.legalize,
                self._add,
            )
        )
        return Installation(tuple(applied), tuple(made), asked, notes_modules, observers)

    def _extend(
        self,
        draft: Draft,
        patches: Iterable[Change],
        *,
        notes_modules: bool,
        made: Iterable[Callable[..., Any]] = (),
    ) -> None:
        """Applies more patches, with the wrappers ``made`` in them, while the session is in force."""
        installed = self._installation
        kept = [done for done in installed.applied if not is_renewed(done.patch)]
        extended = dataclasses.replace(
            installed,
            applied=(*kept, *draft.apply(patches)),
            wrappers=(*installed.wrappers, *made),
            notes_modules=notes_modules,
        )
        draft.apply([Patch(self, "_installation", extended)])
        draft.make()

    @exclusive
    def _add(self, patch: Patch) -> None:
        if self is _current:
            self._extend(Draft(), [patch], notes_modules=self._installation.notes_modules)

    @exclusive
    def _follow(self, names: Collection[str], module: object) -> None:
        """Wraps those ops of other libraries that have come with ``module``."""
        if self is not _current:
            return
        draft, installed = Draft(), self._installation
        conversion = self._conversion(installed.observers)
        foreign = policy_patches.Foreign(conversion, draft, installed.wrappers)
        foreign.take(names, module)
        if foreign.made:
            patches: list[Change] = [*foreign.patches]
            earlier = [*retired(), *installed.wrappers]
            patches += early_name_patches(policy_patches.replacements(foreign.made, earlier))
            patches.append(in_force([*installed.wrappers, *foreign.made]))
            made = foreign.made
            self._extend(draft, patches, notes_modules=installed.notes_modules, made=made)
        say([each for each in foreign.said if each not in self._said])
        self._said += foreign.said

    @exclusive
    def _note_modules(self) -> None:
        if self is _current and not self._installation.notes_modules:
            draft = Draft()
            patches = torch_state.module_patches(draft, self._warn_of_unmatched)
            self._extend(draft, patches, notes_modules=True)

    @exclusive
    def _run_suspended(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function`` while all patches are taken away, in the whole process."""
        applied, draft = self._installation.applied, Draft()
        covered = set(map(id, draft.undo(applied)))  # these stay beneath somebody else's
        taken = [done.patch for done in applied if id(done.patch) not in covered]
        kept = tuple(done for done in applied if id(done.patch) in covered)
        emptied = dataclasses.replace(self._installation, applied=kept)
        draft.apply([Patch(self, "_installation", emptied)])

        def put_back() -> None:
            if self._installation is emptied:
                self._extend(Draft(), taken, notes_modules=emptied.notes_modules)

        try:
            try:
                draft.make()
                return function(*args, **kwargs)
            finally:
                put_back()
        finally:  # in case that an exception came right before
            put_back()

    def _warn_of_unmatched(self, root: torch.nn.Module) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        unmatched = self.policy.unmatched([name for name, _ in torch_state.named_modules(root)])
        if unmatched:
            warnings.warn(
                f"these patterns match no module of {type(root).__name__}:\n  "
                + "\n  ".join(unmatched),
                HmpxWarning,
                stacklevel=4,
            )


def current() -> Session | None:
    """Returns the session in force, or None."""
    return _current


def switch_to(session: Session | None) -> None:
    """Puts ``session`` in force instead of the current one, which may be the same; or changes nothing.

    All that changes is drafted first. Wrappers of the session before are retired last, so that calls
    in other threads find the old ones or the new ones, and never torch without any.
    """
    old = _current
    replaced = Installation() if old is None else old._installation
    with paused_gc():
        draft = Draft()
        covered = draft.undo(replaced.applied)
        if session is not None:
            installation = session._draft(draft, replaced)
            draft.apply([Patch(session, "_installation", installation)])
        if old is not None and old is not session:
            draft.apply([Patch(old, "_installation", Installation(rules=replaced.rules))])
            if not old._is_entered:  # nobody will go back to what was before it
                draft.apply([Patch(old, "_previous", None)])
        epoch = torch_state.in_force()
        if (old is None) != (session is None):
            torch_state.begin_to_end()
            epoch = None if session is None else torch_state.begin_conversion()
        decides = None if session is None else session._decides(installation)
        device_types = frozenset() if session is None else session.device_types
        torch_state.reserve_marks(device_types)
        draft.apply(torch_state.conversion_patches(epoch, decides, device_types))
        draft.apply([Patch(sys.modules[__name__], "_current", session)])
        draft.apply(map(retirement, replaced.wrappers))
        said = said_of(covered)

        def finish() -> None:
            forget_what_is_cached()
            if said and session is not None:  # an error that this is made into undoes the change
                warnings.warn(said, HmpxWarning, stacklevel=6)
            if session is not None and session is not old:
                say(session._said)
                session._log_what_models_keep()

        try:
            draft.make(finish)
        except BaseException:
            forget_what_is_cached()
            raise
    if session is None:
        torch_state.end_conversion()
        if said:  # last: the change holds, even if this is made into an error
            warnings.warn(said, HmpxWarning, stacklevel=5)


@exclusive
def _rules_changed() -> None:
    if _current is not None:
        switch_to(_current)


RULES.followed_by(_rules_changed)
compute.LOWERINGS.followed_by(_rules_changed)
ATTACHED.followed_by(_rules_changed)
