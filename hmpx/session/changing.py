"""What a change of the conversion in force needs beside its patches: quiet, and fresh caches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .. import torch_state
from ..patches import forget_compiled, forget_overrides


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps the thousands of small objects of a conversion from setting off full collections.

    With torch loaded each takes as long as the whole conversion.
    """
    restore = gc.enable if gc.isenabled() else gc.disable
    try:
        try:
            gc.disable()
            yield
        finally:
            restore()
    finally:  # in case that an exception came right before
        restore()


def forget_what_is_cached() -> None:
    """Makes torch look anew at its functions, which have changed."""
    torch_state.forget_modules()
    forget_compiled()
    forget_overrides()
