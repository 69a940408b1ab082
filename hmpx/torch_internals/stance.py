"""Runs code after imports of torch's modules; runs compiled functions uncompiled."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ..blocks import Block
from .compiler import is_dynamo_loaded


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder for `sys.meta_path` that runs actions after modules have been executed."""

    def __init__(self, actions: Mapping[str, Callable[[Any], object]]) -> None:
        """Takes actions by module name; an action gets the module."""
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


_DYNAMO: Final = "torch._dynamo"


class _Uncompiled:
    """The open blocks without compilation: torch has one stance for the whole process.

    Blocks may end in any order, so the first one sets the stance, and the last one restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asking: set[object] = set()
        self._stances: list[Any] = []  # at most one
        self._finder = AfterImport({_DYNAMO: lambda module: self.set()})

    def begin(self, block: object) -> None:
        """Sets the stance; if torch.compile is not imported, waits for its import, which takes seconds."""
        with self._lock:
            self._asking.add(block)
            if is_dynamo_loaded():
                self.set()
            elif self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)

    def end(self, block: object) -> None:
        """Restores the stance after the last block. An interrupted call can be repeated."""
        with self._lock:
            self._asking.discard(block)
            if self._asking:
                return
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for stance in self._stances:
                stance.__exit__(None, None, None)
            self._stances.clear()

    def set(self) -> None:
        """Sets the stance if a block is still open."""
        with self._lock:
            if self._asking and not self._stances:
                # In C from the call on to the list, so that no signal comes between.
                self._stances.extend(map(torch.compiler.set_stance, ["force_eager"]))


_uncompiled: Final = _Uncompiled()


class uncompiled(Block):  # noqa: N801  # a block
    """Runs compiled functions uncompiled, in all threads, until the end of the block."""

    def _begin(self) -> None:
        _uncompiled.begin(self)

    def _end(self) -> None:
        _uncompiled.end(self)
