"""Restores names that modules took from torch or numpy while torch was converted.

``from numpy import *`` and ``apply = Function.apply`` take replacements other than wrappers. Modules of torch
that are imported during a conversion also take wrappers.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ..patching import Applied, Draft, Patch
from .compiled import unwrapped
from .early_names import early_name_patches, in_module, torchs_modules

#: A replacement that is not a wrapper -> the function that it replaced.
_originals: Final[weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)

#: The names of torch's modules that had been imported before torch was converted.
_before: set[str] = set()

_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


def note_torchs_modules() -> None:
    """Records the loaded modules of torch, which hold its own functions: torch is not converted now."""
    _before.update(name for name, _ in torchs_modules())


def standing_for(applied: Iterable[Applied]) -> dict[int, Callable[..., Any]]:
    """Returns ``id`` of a function -> its replacement in ``applied``, if that is not a wrapper.

    The functions include replacements of earlier conversions.
    """
    found: dict[int, Callable[..., Any]] = {}
    for done in applied:
        value, before = function_in(done.patch.value), unwrapped(function_in(done.previous))
        is_name = isinstance(done.patch, Patch) and not done.patch.is_foreign
        is_function = type(value) is types.FunctionType and isinstance(before, _FUNCTIONS)
        if is_name and is_function and "__hmpx_site__" not in vars(value):
            is_ours = type(before) is types.FunctionType  # methods of torch can't be keys
            original = _originals[value] = _originals.get(before, before) if is_ours else before
            found[id(original)] = value
    for earlier, original in list(_originals.items()):
        if id(original) in found:
            found[id(earlier)] = found[id(original)]
    return found


def function_in(value: Any) -> Any:
    """Returns the function in a method or a partial, and any other value unchanged."""
    if isinstance(value, functools.partial):
        return value.func
    return value.__func__ if isinstance(value, _METHODS) else value


_METHODS: Final = (classmethod, staticmethod, types.MethodType)


def taken_name_patches(draft: Draft, wrappers: Iterable[Callable[..., Any]]) -> Iterator[Patch]:
    """Yields the patches that rebind names taken during a conversion to torch's functions.

    A table built meanwhile, with wrappers as keys, gets the functions as additional keys: after a
    conversion, a wrapper calls its function, but is another key.
    """
    functions = {id(function): original for function, original in list(_originals.items())}
    functions |= {id(wrapper): vars(wrapper)["__wrapped__"] for wrapper in wrappers}
    later = [module for name, module in torchs_modules() if name not in _before]
    in_torch = [in_module(module, functions, set()) for module in later]
    for patch in itertools.chain(early_name_patches(functions), *in_torch):
        value = draft.read(patch)
        # Otherwise the draft restores it.
        if value is patch.read() or id(function_in(value)) in functions:
            yield patch
