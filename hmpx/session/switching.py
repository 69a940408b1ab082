"""The session in force, and the atomic change to another."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .. import compute, torch_state
from ..casting import RULES, Registered, in_use, references, references_of_others, retirements
from ..errors import warn
from ..observers import ATTACHED, Attached
from ..patches import (
    early_name_patches,
    forget_compiled,
    forget_overrides,
    function_in,
    retired,
    standing_for,
    taken_name_patches,
)
from ..patching import Applied, Draft, Patch, Swap
from ..registry import exclusive
from .policy_patches import originals, replacements

if TYPE_CHECKING:
    from .session import Session

_current: Session | None = None

#: The last session left, kept in case an equal one follows.
_left: Session | None = None


@dataclass(frozen=True, slots=True)
class Installation:
    """A session's changes to torch."""

    applied: tuple[Applied, ...] = ()  # The patches, in the order applied
    wrappers: tuple[Callable[..., Any], ...] = ()  # The wrappers in them
    rules: tuple[Registered, ...] = ()  # The rules that the wrappers apply
    notes_modules: bool = False  # Running modules are tracked
    observers: tuple[Attached, ...] = ()  # They get calls


#: Whether reference counts show who holds an object.
IS_COUNTED: Final = getattr(sys, "_is_gil_enabled", lambda: True)()

_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


class Kept:
    """A conversion that a block has left, and that an equal block can restore.

    It is restored only if everything it was made from is unchanged. Reference counts of torch's functions and
    of the wrappers show whether other code has stored one of them. Only then are modules searched.
    """

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self._swap = Swap(installation.applied)
        values = [function_in(done.patch.value) for done in installation.applied]
        found = {id(f): f for f in values if type(f) is types.FunctionType}
        own = {id(w): w for w in installation.wrappers}
        self._functions: tuple[Any, ...] = tuple({**own, **found}.values())
        self._alone: tuple[int, ...] = ()  # reference counts if nobody else holds any
        self._counts: tuple[int, ...] = ()  # when it was left last
        self._has_news = False  # whether other code had taken a function since
        self._held: list[Callable[..., Any]] = []  # by other code: retired meanwhile
        self._originals: tuple[Any, ...] = ()
        self._as_left: tuple[object, ...] = ()

    def note_entered(self) -> None:
        """Records the references to the conversion's functions, once it is in force for the first time."""
        if not self._alone:
            earlier = itertools.chain(
                references_of_others(self.installation.wrappers), itertools.repeat(0)
            )
            self._alone = tuple(map(operator.sub, references(self._functions), earlier))
            self._counts = self._alone

    def take_away(self, draft: Draft, installation: Installation) -> bool:
        """Drafts leaving the conversion; False if other code has patched on top of it."""
        self._held = []
        counts = references(self._functions)
        if installation is not self.installation:
            self.installation, self._originals = installation, ()
            self._swap = Swap(installation.applied)
        if not self._swap.is_in_force():
            return False
        self._has_news, self._counts = counts != self._counts, counts
        if self._has_news:
            draft.undo(installation.applied)
            draft.put(*list(taken_name_patches(draft, [*retired(), *installation.wrappers])))
        else:
            draft.put(self._swap.to(False))
        if counts != self._alone:  # of wrappers first, and the others are not retired
            found = zip(installation.wrappers, counts, self._alone, strict=False)
            self._held = [each for each, count, alone in found if count > alone]
        draft.put(*retirements(self._held))
        return True

    def note_left(self) -> None:
        """Records the state of torch and the loaded modules after the conversion is left."""
        self._originals = self._originals or self._patched()
        self._as_left = _newest_module(), references(self._originals)

    def _patched(self) -> tuple[Any, ...]:
        before = [function_in(done.previous) for done in self.installation.applied]
        before = [each for each in before if isinstance(each, _FUNCTIONS)]
        found = {id(each): each for each in [*before, *originals(self.installation.wrappers)]}
        own = set(map(id, self._functions))  # where slots are patched twice
        return tuple([each for key, each in found.items() if key not in own])

    def put_back(self, draft: Draft) -> bool:
        """Drafts restoring the conversion; False if it would differ from before."""
        modules, counts = self._as_left
        if _newest_module() != modules or self._swap.is_in_force() is not False:
            return False
        wrappers = self.installation.wrappers
        if self._has_news or references(self._originals) != counts:
            earlier = [*retired(), *wrappers]
            applied = self.installation.applied
            wanted = standing_for(applied) | replacements(wrappers, earlier)
            known = {done.patch.key for done in applied}
            if not all(patch.key in known for patch in early_name_patches(wanted)):
                return False
        draft.put(*in_use(self._held))  # before calls can find a wrapper
        draft.put(self._swap.to(True))
        return True


def _newest_module() -> tuple[int, str, int]:
    """Returns a value that each import changes."""
    name = next(reversed(sys.modules))
    return len(sys.modules), name, id(sys.modules[name])


def current() -> Session | None:
    """Returns the session in force, or None."""
    return _current


def left_one(session: Session) -> Session | None:
    """Returns the last session left, as a new one, if it equals ``session`` and can be reused."""
    found = _left
    if _current is not None or found is None or not session.equals(found):
        return None
    found._is_entered = found._is_left = False
    found._previous, found.converts = None, 1
    return found


@exclusive
def forget_left() -> None:
    """Drops the last session left."""
    if _left is not None:
        draft = Draft()
        draft.put(*_ended(_left, ()), Patch(sys.modules[__name__], "_left", None))
        draft.make()


def _ended(session: Session, kept: Sequence[Callable[..., Any]]) -> list[Patch]:
    """Returns the changes that remove a session, apart from the wrappers in ``kept``."""
    installed = session._installation if session.kept is None else session.kept.installation
    return [*retirements(installed.wrappers, kept), Patch(session, "kept", None)]


def switch_to(session: Session | None, *, is_kept: bool = False) -> None:
    """Puts ``session`` in force instead of the current one, which may be the same; or changes nothing."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()  # the many small objects of a conversion would trigger full garbage collections
        covered = _change(_current, session, is_kept=is_kept)
    finally:
        if was_enabled: gc.enable()  # fmt: skip  # noqa: E701
    gc.collect(0)  # it is due, and `convert` could not undo itself if a signal came during it later
    if session is not None and session.kept is not None:
        session.kept.note_entered()
    if session is None:
        torch_state.end_conversion()
        if _left is not None and _left.kept is not None:
            _left.kept.note_left()
        if covered:  # last: the change stands, even if this becomes an error
            warn(covered)


def _change(old: Session | None, session: Session | None, *, is_kept: bool) -> str:
    """Makes the change, and returns the warning after a `revert`.

    All changes are drafted first. The previous session's wrappers are retired last, so that calls in other
    threads find the old ones or the new ones, never torch without any.
    """
    left, draft, covered = _left, Draft(), list[Patch]()
    replaced = Installation() if old is None else old._installation
    kept = None if old is None or session is not None or not is_kept else old.kept
    back = None if session is None or session is not left or old is not None else session.kept
    if kept is not None:
        _forget_caches(keeps_graphs=True)  # which refer to the wrappers
    stays = kept is not None and kept.take_away(draft, replaced)
    returns = back is not None and back.put_back(draft)
    installation = Installation()
    if back is not None and returns:
        installation = back.installation
    elif not stays:
        draft = Draft()
        covered = draft.undo(replaced.applied)
        if session is None:
            draft.put(*list(taken_name_patches(draft, [*retired(), *replaced.wrappers])))
        else:
            installation, back = session._draft(draft, replaced)
    if session is not None:
        draft.put(Patch(session, "_installation", installation))
    if old is not None and old is not session:
        draft.put(Patch(old, "_installation", Installation(rules=replaced.rules)))
        if not old._is_entered:  # no block will return to the one before it
            draft.put(Patch(old, "_previous", None))
    epoch = torch_state.in_force()
    if (old is None) != (session is None):
        epoch = None if session is None else object()
    decides = None if session is None else session._decides(installation.rules)
    device_types = frozenset() if session is None else session.device_types
    torch_state.reserve_marks(device_types | {torch_state.TO_LOW})
    draft.put(*torch_state.conversion_patches(epoch, decides, device_types))
    this = sys.modules[__name__]
    draft.put(Patch(this, "_current", session), Patch(this, "_left", old if stays else None))
    if not (stays or returns):
        for each in filter(None, (old, left)):
            draft.put(*_ended(each, installation.wrappers))
    if session is not None:
        draft.put(Patch(session, "kept", back))
    said = _said_of(covered)

    def finish() -> None:
        _forget_caches(keeps_graphs=stays or returns)
        if said and session is not None:  # if this becomes an error, the change is undone
            warn(said)
        if session is not None and session is not old and not returns:
            session.announce()

    try:
        draft.make(finish)
    except BaseException:
        _forget_caches(keeps_graphs=stays or returns)
        raise
    return said


def _forget_caches(*, keeps_graphs: bool) -> None:
    """Clears torch's caches of its functions; graphs stay if an equal conversion may follow."""
    torch_state.forget_modules()
    forget_compiled(stays=keeps_graphs)
    forget_overrides()


def _said_of(covered: Iterable[Patch]) -> str:
    """Returns the warning about slots that other code has patched since; ``""`` for none."""
    names = {patch.where for patch in covered if not (patch.is_foreign or patch.stays_idle)}
    if not names:
        return ""
    return (
        f"{', '.join(sorted(names))}: patched by somebody else after hmpx.convert(); their patch was "
        "left in place, without hmpx's casts beneath it. Undo theirs first, then hmpx.revert()"
    )


def say(messages: list[str]) -> None:
    """Warns about names in the lists."""
    if messages:
        warn("left out of the op lists:\n  " + "\n  ".join(messages))


@exclusive
def _rules_changed() -> None:
    forget_left()
    if _current is not None:
        switch_to(_current)


RULES.followed_by(_rules_changed)
compute.LOWERINGS.followed_by(_rules_changed)
ATTACHED.followed_by(_rules_changed)
