"""What a change of the conversion in force needs beside its patches: quiet, fresh caches, warnings."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterable, Iterator

from .. import torch_state
from ..errors import HmpxWarning
from ..frames import is_ours
from ..patches import forget_compiled, forget_overrides
from ..patching import Change


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


def said_of(covered: Iterable[Change]) -> str:
    """Returns the warning about slots that somebody else has patched since; ``""`` for none."""
    names = {patch.where for patch in covered if not (patch.is_foreign or patch.stays_idle)}
    if not names:
        return ""
    return (
        f"{', '.join(sorted(names))}: patched by somebody else after hmpx.convert(); their patch was "
        "left in place, without hmpx's casts beneath it. Undo theirs first, then hmpx.revert()"
    )


def say(messages: list[str]) -> None:
    """Warns of what is wrong with names in the lists, at the first line outside of hmpx."""
    if messages:
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and _is_passing_on(frame.f_globals.get("__name__")):
            level, frame = level + 1, frame.f_back
        lines = "\n  ".join(messages)
        warnings.warn(f"left out of the op lists:\n  {lines}", HmpxWarning, stacklevel=level)


def _is_passing_on(module: object) -> bool:
    return is_ours(module) or str(module).partition(".")[0] in ("importlib", "_frozen_importlib")
