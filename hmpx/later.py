"""A package's public names, each imported on its first use.

Otherwise programs import them before their first op, and most never use them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def shown_later(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package.

    Args:
        package: Its name.
        names: Module in it -> the names that it defines, with blanks between. The module's own name
            works too.

    Example:
        >>> getattr_ = shown_later("hmpx", {"freezing": "freeze Frozen", "formats": ""})
        >>> getattr_("freeze").__module__
        'hmpx.freezing.freezing'
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}
    own = {module.partition(".")[0] for module in names}

    def getattr_(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        elif name in own:
            value = importlib.import_module(f".{name}", package)
        else:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])  # with Python's hint
        setattr(sys.modules[package], name, value)
        return value

    return getattr_
