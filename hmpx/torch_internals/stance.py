"""`uncompiled`: compiled functions run as they are written, those compiled meanwhile too."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

from .after_import import AfterImport
from .compiler import is_dynamo_loaded

_DYNAMO: Final = "torch._dynamo"


class _Uncompiled:
    """Who asked that nothing runs compiled: torch has one stance for the whole process.

    Those who ask may end in any order, so the first sets it, and the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asking = 0
        self._stance: Any = None
        self._finder = AfterImport(_DYNAMO, lambda module: self.set())

    def begin(self) -> None:
        """Sets the stance; where torch.compile isn't imported, as soon as it is: that takes seconds."""
        with self._lock:
            self._asking += 1
            if self._asking > 1:
                return
            if is_dynamo_loaded():
                self.set()
            else:
                sys.meta_path.insert(0, self._finder)

    def end(self) -> None:
        """Restores the stance, if nobody asks any more."""
        with self._lock:
            self._asking -= 1
            if self._asking:
                return
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            stance, self._stance = self._stance, None
            if stance is not None:
                stance.__exit__(None, None, None)

    def set(self) -> None:
        """Sets the stance, if somebody still asks for it."""
        with self._lock:
            if self._asking and self._stance is None:
                stance: Any = torch.compiler.set_stance("force_eager")
                stance.__enter__()
                self._stance = stance


_uncompiled: Final = _Uncompiled()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled functions as they are written, in all threads, until the end of the block."""
    _uncompiled.begin()
    try:
        yield
    finally:
        _uncompiled.end()
