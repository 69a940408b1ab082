"""Which session is in force, and the change from one to another: all of it, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import compute, torch_state
from ..observers import ATTACHED
from ..patches import retired, taken_name_patches
from ..patching import Change, Draft, Patch
from ..registry import exclusive
from ..rules import RULES
from ..warning import warn
from ..wrappers import retirements
from .changing import alone, forget_what_is_cached, paused_gc
from .installation import Installation
from .kept import put_by
from .messages import log_what_models_keep, said_of, say
from .policy_patches import cast_originals

if TYPE_CHECKING:
    from .session import Session

_current: Session | None = None

#: The session that was left last, if an equal one may be the same.
_left: Session | None = None


def current() -> Session | None:
    """Returns the session in force, or None."""
    return _current


def left_one(is_equal: Callable[[Session], bool]) -> Session | None:
    """Returns the session that was left last, as a new one, if an equal one may be the same."""
    found = _left
    if _current is not None or found is None or not is_equal(found):
        return None
    found._is_entered = found._is_left = False
    found._previous, found._converts = None, 1
    return found


@exclusive
def forget_left() -> None:
    """Lets go of the session that was left last."""
    draft = Draft()
    draft.apply(retirements(_prepared(_left), ()))
    draft.apply([Patch(_left, name, None) for name in ("kept", "_put") if _left is not None])
    draft.apply([Patch(sys.modules[__name__], "_left", None)])
    draft.make()


def _prepared(left: Session | None) -> Sequence[Callable[..., Any]]:
    """Returns the wrappers of a conversion that stays prepared."""
    return () if left is None or left.kept is None else left.kept.installation.wrappers


@alone
def switch_to(session: Session | None, *, is_kept: bool = False) -> None:
    """Puts ``session`` in force instead of the current one, which may be the same; or changes nothing.

    All that changes is drafted first. Wrappers of the session before are retired last, so that calls
    in other threads find the old ones or the new ones, and never torch without any.

    Args:
        session: None for no conversion.
        is_kept: The one in force stays prepared, where that can be: an equal one may follow soon.
    """
    old = _current
    replaced = Installation() if old is None else old._installation
    with paused_gc():
        draft, covered = Draft(), list[Change]()
        back = session.kept if session is not None and session is _left and old is None else None
        back = back if back is not None and back.is_as_left() else None
        left = old.to_keep() if old is not None and session is None and is_kept else None
        counts = () if left is None else left.counts()
        if back is not None:
            installation = back.put_back(draft)
        elif left is None or left.has_taken_names(counts):
            covered = draft.undo(replaced.applied)
            if session is not None:
                installation = session._draft(draft, replaced)
                put = (
                    put_by(installation)
                    if old is None and session._can_be_kept(installation)
                    else None
                )
            else:
                draft.apply(taken_name_patches(draft, [*retired(), *replaced.wrappers]))
        if left is not None:
            left.take_away(draft, counts)
        if session is not None:
            draft.apply([Patch(session, "_installation", installation)])
        if old is not None and old is not session:
            draft.apply([Patch(old, "_installation", Installation(rules=replaced.rules))])
            if not old._is_entered:  # nobody will go back to what was before it
                draft.apply([Patch(old, "_previous", None)])
        epoch = torch_state.in_force()
        if (old is None) != (session is None):
            torch_state.forget_lost_regions()
            epoch = None if session is None else object()
        decides = None if session is None else session._decides(installation.rules)
        device_types = frozenset() if session is None else session.device_types
        torch_state.reserve_marks(device_types | {torch_state.TO_LOW})
        draft.apply(torch_state.conversion_patches(epoch, decides, device_types))
        this = sys.modules[__name__]
        draft.apply([Patch(this, "_current", session), Patch(this, "_left", left and old)])
        if left is None and back is None:
            kept = () if session is None else installation.wrappers
            draft.apply(retirements([*replaced.wrappers, *_prepared(_left)], kept))
            ended = [each for each in (old, _left) if each is not None]
            draft.apply([Patch(each, name, None) for each in ended for name in ("kept", "_put")])
            if session is not None:
                draft.apply([Patch(session, "_put", put)])
        said = said_of(covered)
        is_prepared = back is not None or left is not None

        def finish() -> None:
            forget_what_is_cached(stays=is_prepared)
            if said and session is not None:  # an error that this is made into undoes the change
                warn(said)
            if session is not None and session is not old and back is None:
                say(session._said)
                if session._verbose:
                    log_what_models_keep(cast_originals(session._installation.wrappers))

        try:
            draft.make(finish)
        except BaseException:
            forget_what_is_cached(stays=is_prepared)
            raise
    if session is None:
        torch_state.end_conversion()
        if left is not None:
            left.note_left(counts)
        if said:  # last: the change holds, even if this is made into an error
            warn(said)


@exclusive
def _rules_changed() -> None:
    forget_left()
    if _current is not None:
        switch_to(_current)


RULES.followed_by(_rules_changed)
compute.LOWERINGS.followed_by(_rules_changed)
ATTACHED.followed_by(_rules_changed)
