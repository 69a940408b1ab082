"""The session in force, and the atomic change to another."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .. import compute, torch_state
from ..casting import RULES, Registered, held_by_others, in_use, retirements
from ..errors import warn
from ..observers import ATTACHED, Attached
from ..patches import (
    forget_compiled,
    forget_overrides,
    function_in,
    retired,
    taken_name_patches,
)
from ..patching import Applied, Draft, Patch, sides, swap
from ..registry import exclusive
from .policy_patches import originals

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
    may_return: bool = False  # An equal session may follow its end


class Kept:
    """The patches of a conversion, for equal blocks: undone and applied again while nobody else changes torch.

    Nobody has patched torch, taken or dropped one of the functions, which reference counts show, or imported a
    module. Otherwise names are searched and all patches drafted again.
    """

    def __init__(self, installation: Installation) -> None:
        self._held = held_by_others(installation.wrappers)  # they are retired between blocks
        self._sides = sides(installation.applied)
        self._originals = _functions([*self._sides[0].values, *originals(installation.wrappers)])
        self._functions = _functions(
            [*installation.wrappers, *[each.patch.value for each in installation.applied]]
        )
        self._counts = [*_references(self._functions)]  # in the conversion
        self._as_left: tuple[object, ...] = ()

    def leave(self, draft: Draft) -> bool:
        """Drafts the end of the conversion; False if other code has changed something meanwhile."""
        is_as_entered = [*_references(self._functions)] == self._counts
        if not (is_as_entered and self._sides[1].are_there()):
            return False
        draft.put(swap(self._sides, 0), *retirements(self._held))
        return True

    def note_left(self) -> None:
        """Records the state of the process after the first block."""
        self._as_left = self._as_left or self._now()

    def enter(self, draft: Draft) -> bool:
        """Drafts the conversion again; False if other code has changed something meanwhile."""
        if not (self._now() == self._as_left and self._sides[0].are_there()):
            return False
        draft.put(*in_use(self._held), swap(self._sides, 1))  # in use before calls can find them
        return True

    def _now(self) -> tuple[object, ...]:
        newest = next(reversed(sys.modules))  # with the number of modules, it shows each import
        return len(sys.modules), newest, id(sys.modules[newest]), *_references(self._originals)


def _functions(values: Iterable[Any]) -> tuple[Any, ...]:
    found = [function_in(value) for value in values]
    return tuple({id(each): each for each in found if isinstance(each, _KINDS)}.values())


_KINDS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


#: The reference counts of functions.
_references: Final = functools.partial(map, sys.getrefcount)

#: Whether reference counts show who holds an object.
_IS_COUNTED: Final = getattr(sys, "_is_gil_enabled", lambda: True)()


def current() -> Session | None:
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
    """Drops the last session left, with its references to wrappers."""
    global _left
    if _left is not None:
        _left.kept, _left._installation = None, Installation(rules=_left.rules)
    _left = None


_F = TypeVar("_F", bound=Callable[..., Any])


def without_collections(function: _F) -> _F:
    """Makes ``function`` run without collections of garbage: a conversion makes many objects, and little garbage."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        was_enabled = gc.isenabled()
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            if was_enabled: gc.enable()  # fmt: skip  # noqa: E701

    return wrapper  # type: ignore[return-value]


def switch_to(session: Session | None, *, is_kept: bool = False) -> None:
    """Puts ``session`` in force instead of the current one, which may be the same; or changes nothing.

    With ``is_kept`` an equal one may follow the current one.
    """
    old = _current
    covered = _change(old, session, is_kept=is_kept)
    gc.collect(0)  # it is due, and `convert` could not undo itself if a signal came during it later
    if session is None:
        torch_state.end_conversion()
        if _left is not None and _left.kept is not None:
            _left.kept.note_left()
        if covered:  # last: the change stands, even if this becomes an error
            warn(covered)
    elif old is None and session.kept is None and session._installation.may_return and _IS_COUNTED:
        session.kept = Kept(session._installation)


@without_collections
def _change(old: Session | None, session: Session | None, *, is_kept: bool) -> str:
    """Makes the change, and returns the warning after a `revert`.

    All changes are drafted first. The previous session's wrappers are retired last, so that calls in other
    threads find the old ones or the new ones, never torch without any.
    """
    draft, covered = Draft(), list[Patch]()
    replaced = Installation() if old is None else old._installation
    installation = Installation() if session is None else session._installation
    may_return = is_kept and replaced.may_return
    returns = session is not None and session is _left
    equal = old if may_return else session if returns else None
    kept = None if equal is None else equal.kept
    if kept is not None:
        _forget_caches(keeps_graphs=True)  # which refer to functions
    is_quick = kept is not None and (kept.enter if returns else kept.leave)(draft)
    if not is_quick:
        kept, installation = None, Installation()  # their references would count as other code's
        if _left is not None:
            forget_left()  # and these
        covered = draft.undo(replaced.applied)
        if session is None:
            draft.put(*list(taken_name_patches(draft, [*retired(), *replaced.wrappers])))
        else:
            installation = session._draft(draft, replaced)
        for each in filter(None, (old, session)):
            new = installation if each is session else Installation(rules=replaced.rules)
            draft.put(Patch(each, "_installation", new), Patch(each, "kept", None))
    if old is not None and old is not session and not old._is_entered:
        draft.put(Patch(old, "_previous", None))  # no block will return to it
    epoch = torch_state.in_force()
    if (old is None) != (session is None):
        epoch = None if session is None else object()
    decides = None if session is None else session._decides(installation.rules)
    device_types = frozenset() if session is None else session.device_types
    torch_state.reserve_marks(device_types | {torch_state.TO_LOW})
    within = None if session is None else session.options.within
    draft.put(*torch_state.conversion_patches(epoch, decides, device_types, within))
    draft.put(*compute.looking_up(device_types))
    this = sys.modules[__name__]
    draft.put(Patch(this, "_current", session), Patch(this, "_left", old if may_return else None))
    if replaced.wrappers and not is_quick:
        draft.put(*retirements(replaced.wrappers, installation.wrappers))
    said = _said_of(covered) if old is not None and old.device_types else ""

    def finish() -> None:
        _forget_caches(keeps_graphs=may_return or returns)
        if said and session is not None:  # if this becomes an error, the change is undone
            warn(said)
        if session is not None and session is not old and not is_quick:
            session.announce()

    try:
        draft.make(finish)
    except BaseException:
        _forget_caches(keeps_graphs=may_return or returns)
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
    warn("left out of the op lists:\n  " + "\n  ".join(messages))


@exclusive
def _rules_changed() -> None:
    forget_left()
    if _current is not None:
        switch_to(_current)


RULES.followed_by(_rules_changed)
compute.LOWERINGS.followed_by(_rules_changed)
ATTACHED.followed_by(_rules_changed)
