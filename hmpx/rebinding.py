"""Names taken before `convert`: finds them in loaded modules, and says how to rebind them.

``from torch.nn.functional import gelu`` above `convert` holds the builtin itself, which no patch of
torch reaches. Looks at module globals, and one level into the dicts, lists and partials that they
name; torch's own modules are left alone. Patches nothing itself.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from .patching import ItemPatch, Patch

#: Their tables describe torch's functions, and must go on doing so.
_LEFT_ALONE = ("torch", "hmpx", "functorch")

#: Not their subclasses, whose methods may do more than get and set; and no data.
_CONTAINERS = (dict, list, collections.OrderedDict)
_LONGEST = 1000


def patches(replacements: Mapping[int, Any]) -> Iterator[Patch | ItemPatch]:
    """Yields what rebinds each name to its wrapper.

    Args:
        replacements: ``id`` of a function of torch -> its wrapper.
    """
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LEFT_ALONE or not isinstance(module, types.ModuleType):
            continue
        if id(module) in seen:  # one module may stand under two names
            continue
        seen.add(id(module))
        for key, value in list(vars(module).items()):
            if (wrapper := _wrapper_of(value, replacements)) is not None:
                yield Patch(module, key, wrapper)
            elif type(value) is functools.partial:
                wrapper = _wrapper_of(value.func, replacements)
                if wrapper is not None:
                    yield Patch(
                        module, key, functools.partial(wrapper, *value.args, **value.keywords)
                    )
            elif type(value) in _CONTAINERS and len(value) <= _LONGEST and id(value) not in seen:
                seen.add(id(value))
                yield from _item_patches(value, replacements)


def _item_patches(
    container: dict[Any, Any] | list[Any], replacements: Mapping[int, Any]
) -> Iterator[ItemPatch]:
    items = list(container.items() if isinstance(container, dict) else enumerate(container))
    for key, value in items:
        wrapper = _wrapper_of(value, replacements)
        if wrapper is not None:
            yield ItemPatch(container, key, wrapper)


def _wrapper_of(value: Any, replacements: Mapping[int, Any]) -> Any:
    """Returns what ``value`` is to be replaced with; None if it is no function of torch.

    A name taken during an earlier conversion holds that one's wrapper, which casts no more.
    """
    found = replacements.get(id(value))
    if found is None and type(value) is types.FunctionType and "__hmpx_site__" in vars(value):
        found = replacements.get(id(vars(value)["__wrapped__"]))
    return found if found is not value else None
