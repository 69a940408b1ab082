"""Keeps the wrappers and patches of a conversion that a block has left, so that an equal block starts faster.

They are used again only if nothing that they were made from has changed. Reference counts of torch's functions
and of the wrappers show whether other code has stored one of them. Modules are searched only then.
"""

from __future__ import annotations

import itertools
import operator
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

from ..patches import early_name_patches, function_in, retired, standing_for
from ..patching import Change, Draft, Patch
from ..wrappers import references, references_of_others, retirements, used_as_now
from .installation import Installation
from .policy_patches import originals, replacements
from .slots import INSIDE, OUTSIDE, Slots, Values

#: Whether the number of references says who holds an object.
IS_COUNTED: Final = getattr(sys, "_is_gil_enabled", lambda: True)()

_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


class Put(NamedTuple):
    """The functions that a conversion puts into torch: wrappers first, then others.

    Attributes:
        functions: All of them.
        references: How many references there are to each if nobody has taken it.
    """

    functions: tuple[Any, ...]
    references: tuple[int, ...]


def put_by(installed: Installation) -> Put:
    """Returns the functions that a conversion puts into torch. Call it once they are drafted.

    The draft holds as many references as the slots will.
    """
    wrappers = installed.wrappers
    values = [function_in(done.patch.value) for done in installed.applied]
    own = set(map(id, wrappers))
    others = {id(f): f for f in values if type(f) is types.FunctionType and id(f) not in own}
    functions = (*wrappers, *others.values())
    del values, others  # they hold references, too
    earlier = itertools.chain(references_of_others(wrappers), itertools.repeat(0))
    return Put(functions, tuple(map(operator.sub, references(functions), earlier)))


class Kept:
    """What a conversion has put into torch, ready to be taken away and put back.

    Attributes:
        installation: The patches and wrappers.
        slots: The slots of the patches.
    """

    def __init__(self, installation: Installation, put: Put) -> None:
        """Takes the conversion in force."""
        values: dict[Hashable, tuple[Change, Values]] = {}
        for done in installation.applied:
            patch, (outside, _) = values.get(done.patch.key, (done.patch, (done.previous, None)))
            values[done.patch.key] = patch, (outside, done.patch.value)
        self.installation, self.slots = installation, Slots(values.values())
        own = self.slots.references()
        self._functions = put.functions
        self._alone = tuple([n + own[id(f)] for f, n in zip(*put, strict=True)])
        before = [function_in(outside) for _, (outside, _) in values.values()]
        kinds = [each for each in before if isinstance(each, _FUNCTIONS)]
        found = {id(each): each for each in [*originals(installation.wrappers), *kinds]}
        self._originals = tuple(found.values())
        self._held: list[Callable[..., Any]] = []  # by others: they are retired when it is left
        self._in_use: list[Change] = []  # as they are in force
        self._searched_at = self._alone
        self._modules_at: tuple[Any, ...] = ()
        self._originals_at: tuple[int, ...] = ()

    def counts(self) -> tuple[int, ...]:
        """Returns how many references there are to each function, in force."""
        return references(self._functions)

    def has_taken_names(self, counts: tuple[int, ...]) -> bool:
        """Whether somebody may have taken functions since names were searched last."""
        return counts != self._searched_at

    def take_away(self, draft: Draft, counts: tuple[int, ...]) -> None:
        """Drafts that the conversion is left; each slot already is where names were searched."""
        if self.has_taken_names(counts):
            # The wrappers are first, and the others are not retired.
            found = zip(self.installation.wrappers, counts, self._alone, strict=False)
            self._held = [each for each, count, alone in found if count > alone]
            draft.apply([Patch(self.slots, "at", OUTSIDE)])
        else:
            draft.apply([self.slots.to(OUTSIDE)])
        self._in_use = [used_as_now(each) for each in self._held]
        draft.apply(retirements(self._held, ()))

    def put_back(self, draft: Draft) -> Installation:
        """Drafts that the conversion is in force again."""
        draft.apply([*self._in_use, self.slots.to(INSIDE), Patch(self, "_in_use", [])])
        return self.installation

    def note_left(self, counts: tuple[int, ...]) -> None:
        """Notes that the conversion is left, and how torch and the loaded modules are now."""
        self._searched_at = counts
        self._modules_at, self._originals_at = _newest_module(), references(self._originals)

    def is_as_left(self) -> bool:
        """Whether the conversion can be put back as it is."""
        if not self.slots.hold() or _newest_module() != self._modules_at:
            return False
        if references(self._originals) == self._originals_at:
            return True
        installed = self.installation
        earlier = [*retired(), *installed.wrappers]
        wanted = standing_for(installed.applied) | replacements(installed.wrappers, earlier)
        known = {done.patch.key for done in installed.applied}
        return all(patch.key in known for patch in early_name_patches(wanted))


def _newest_module() -> tuple[int, str, int]:
    """Returns a value that each import changes."""
    name = next(reversed(sys.modules))
    return len(sys.modules), name, id(sys.modules[name])
