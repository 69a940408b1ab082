"""Whether the call comes from torch itself, below its dispatcher."""

from __future__ import annotations

import sys
import types

from ..places import PACKAGE
from ..torch_internals import (
    FUNCTION_MODULES,
    KERNEL_MODULES,
    PYTHON,
    SNAPSHOT,
    is_excluded,
    is_included,
    run_when_traced,
)

# Below the dispatcher (in a decomposition, a meta function, a kernel written in Python) the call's
# dtypes were settled above it. This private test is exact, and has existed since torch 2.0.
_is_excluded, _SNAPSHOT = is_excluded, SNAPSHOT
# The exception are decompositions that stand in for composite kernels while AOTAutograd and
# torch.export trace: their state is that of the user's own calls. Only their module tells them apart.
_is_included, _PYTHON = is_included, PYTHON
_BETWEEN = (PACKAGE, *FUNCTION_MODULES)


def is_below_dispatcher() -> bool:
    """Whether the call comes from torch itself, where nothing is cast."""
    return _is_excluded(_SNAPSHOT) or (_is_included(_PYTHON) and _is_called_by_kernel())


def _is_called_by_kernel() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(KERNEL_MODULES):
            return True
        if not module.startswith(_BETWEEN):
            return False
        frame = frame.f_back
    return False


run_when_traced(is_below_dispatcher)
