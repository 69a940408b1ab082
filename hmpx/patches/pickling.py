"""Lets pickle store torch's functions and wrappers that models hold.

Pickle stores a function by name, and rejects it if that name means another object. This affects wrappers
that models kept after `revert`, which get names here, and builtins of torch that models kept from before
`convert`, which are stored by their slot.
"""

from __future__ import annotations

import copyreg
import itertools
import pkgutil
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from ..patching import ABSENT, Draft, ItemPatch

_retired: Final[weakref.WeakValueDictionary[str, Callable[..., Any]]] = (
    weakref.WeakValueDictionary()
)
_numbers: Final = itertools.count(1)


def retired_name(wrapper: Callable[..., Any], site: str) -> tuple[str, str]:
    """Returns this module and a name in it for ``wrapper``, which was in the slot ``site``.

    In another process, that name means the function in that slot.
    """
    name = f"{site.replace('.', ':')}#{next(_numbers)}"
    _retired[name] = wrapper
    return __name__, name


def retired() -> list[Callable[..., Any]]:
    """Returns the still referenced wrappers of earlier conversions."""
    return list(_retired.values())


def __getattr__(name: str) -> Any:
    if name in _retired:
        return _retired[name]
    site, separator, _ = name.partition("#")
    if not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(site.replace(":", "."))


def pickle_patch(originals: Iterable[Callable[..., Any]], draft: Draft) -> ItemPatch:
    """Returns the patch that lets pickle store those ``originals`` that are builtins of a module."""
    names = {
        id(original): f"{original.__module__}:{original.__qualname__}"
        for original in originals
        if isinstance(getattr(original, "__self__", None), types.ModuleType)
    }
    slot = ItemPatch(copyreg.dispatch_table, types.BuiltinFunctionType, None)
    before = draft.read(slot)

    def reduce(function: types.BuiltinFunctionType) -> Any:
        if id(function) in names:
            return pkgutil.resolve_name, (names[id(function)],)
        return function.__reduce__() if before is ABSENT else before(function)

    # Under somebody else's patch, its names stay correct.
    return slot._replace(value=reduce, stays_idle=True)
