"""Keeps the conversion that a block has left, so that an equal block starts faster.

It is put back only if nothing that it was made from has changed. Reference counts of torch's functions and
of the wrappers show whether other code has stored one of them. Modules are searched only then.
"""

from __future__ import annotations

import itertools
import operator
import sys
import types
from typing import Any, Final

from ..patches import early_name_patches, function_in, retired, standing_for, taken_name_patches
from ..patching import Change, Draft
from ..wrappers import references, references_of_others, retirements, used_as_now
from .policy_patches import originals, replacements
from .switching import Installation

#: Whether the number of references says who holds an object.
IS_COUNTED: Final = getattr(sys, "_is_gil_enabled", lambda: True)()

_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


class Kept:
    """A conversion that can be taken away and put back.

    Attributes:
        installation: What it has put into torch.
    """

    def __init__(self, installation: Installation) -> None:
        """Is called once it is drafted: the draft holds as many references as the slots will."""
        self.installation, wrappers = installation, installation.wrappers
        values = [function_in(done.patch.value) for done in installation.applied]
        found = {id(f): f for f in values if type(f) is types.FunctionType}
        self._functions: tuple[Any, ...] = tuple({**{id(w): w for w in wrappers}, **found}.values())
        del values, found  # they hold references, too
        earlier = itertools.chain(references_of_others(wrappers), itertools.repeat(0))
        self._alone = tuple(map(operator.sub, references(self._functions), earlier))
        self._in_use: list[
            Change
        ] = []  # of wrappers that others hold, or held: they are retired meanwhile
        self._originals: tuple[Any, ...] = ()
        self._as_left: tuple[object, ...] = ()

    def take_away(self, draft: Draft, installation: Installation) -> bool:
        """Drafts that the conversion is left; False if somebody has patched on top of it."""
        counts = references(self._functions)
        if draft.undo(installation.applied):
            return False
        if installation is not self.installation:
            self.installation, self._originals = installation, ()
        if counts != self._alone:
            draft.apply(taken_name_patches(draft, [*retired(), *installation.wrappers]))
        # The wrappers are first, and the others are not retired.
        found = zip(installation.wrappers, counts, self._alone, strict=False)
        held = [each for each, count, alone in found if count > alone]
        self._in_use = [used_as_now(each) for each in held]
        draft.apply(retirements(held, ()))
        return True

    def note_left(self) -> None:
        """Notes how torch and the loaded modules are now that the conversion is left."""
        if not self._originals:
            self._originals = self._patched()
        self._as_left = _newest_module(), references(self._originals)

    def _patched(self) -> tuple[Any, ...]:
        """Returns the functions that the conversion stands for."""
        before = [function_in(done.previous) for done in self.installation.applied]
        before = [each for each in before if isinstance(each, _FUNCTIONS)]
        found = {id(each): each for each in [*before, *originals(self.installation.wrappers)]}
        own = set(map(id, self._functions))  # where slots are patched twice
        return tuple([each for key, each in found.items() if key not in own])

    def put_back(self, draft: Draft) -> bool:
        """Drafts that the conversion is in force again; False if it would not be as it was."""
        modules, counts = self._as_left
        if _newest_module() != modules:
            return False
        applied, wrappers = self.installation.applied, self.installation.wrappers
        if self._in_use or references(self._originals) != counts:
            earlier = [*retired(), *wrappers]
            wanted = standing_for(applied) | replacements(wrappers, earlier)
            known = {done.patch.key for done in applied}
            if not all(patch.key in known for patch in early_name_patches(wanted)):
                return False
        draft.apply(self._in_use)  # before a wrapper is where calls find it
        again = draft.apply([done.patch for done in applied])
        return all(now.previous is then.previous for now, then in zip(again, applied, strict=True))


def _newest_module() -> tuple[int, str, int]:
    """Returns a value that each import changes."""
    name = next(reversed(sys.modules))
    return len(sys.modules), name, id(sys.modules[name])
