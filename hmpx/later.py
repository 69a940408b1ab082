"""Code that runs later: a package's public names, imported on first use, and actions after imports."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import OptionError, said_by
from .forks import new_lock


def shown_later(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package, most of whose names few programs need: module -> its names."""
    modules = {name: module for module, listed in names.items() for name in listed.split()}
    own = {module.partition(".")[0] for module in names}

    def getattr_(name: str) -> Any:
        if name in modules or name in own:
            with new_lock():  # for which a fork waits
                module = importlib.import_module(f".{modules.get(name, name)}", package)
            value = getattr(module, name) if name in modules else module
        else:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])  # with Python's hint
        setattr(sys.modules[package], name, value)
        return value

    return getattr_


def imported(name: str, tool: str, extra: str = "onnx") -> types.ModuleType:
    """Imports a package of an extra of hmpx.

    Raises:
        OptionError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"{tool} needs {name}, which can't be imported: {said_by(error)}; pip install 'hmpx[{extra}]'"
        ) from error


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder for `sys.meta_path` that runs actions after modules have been executed."""

    def __init__(self, actions: Mapping[str, Callable[[Any], object]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of such a module from the finders after this one; None for others."""
        action = self._actions.get(fullname)
        if action is None:
            return None
        for finder in list(itertools.dropwhile(lambda each: each is not self, sys.meta_path))[1:]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type):
                    _act_after(spec.loader, action)
                return spec  # type: ignore[no-any-return]
        return None


def _act_after(loader: Any, action: Callable[[Any], object]) -> None:
    """Makes a loader run an action after the module that it executes next."""
    execute = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        action(module)

    loader.exec_module = exec_module
