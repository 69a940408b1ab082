"""What is to happen as soon as a module of torch's is imported, which may take seconds or never come."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder for `sys.meta_path` that runs an action once a module has been executed."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of that module; None for any other."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
