"""Compiled rounding on GPUs, where Triton is installed: elsewhere torch ops do the same.

``HMPX_KERNELS=off`` switches it off, as it does the kernels on the CPU. A kernel that Triton can't compile
costs one line in the log, and torch ops go on.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import torch
from torch import Tensor

from ..bits import FP32
from ..plans import Plan
from . import library

_LOGGER: Final = logging.getLogger("hmpx")

#: The module `triton_kernels`; None without Triton, or once it has failed. Unset until it is asked for.
_found: list[Any] = []


def has_kernel(plan: Plan) -> bool:
    """Whether a kernel rounds float32 on GPUs as the plan does."""
    if plan.binary is not FP32 or plan.is_by_row:
        return False
    kernels = _kernels()
    return kernels is not None and plan.kernel in kernels.KINDS


def rounded(x: Tensor, plan: Plan, keys: Tensor | None) -> Tensor | None:
    """Returns ``x`` rounded; None if that has failed, for all of the process.

    Args:
        x: float32, on a GPU, without memory between its elements.
        plan: One that `has_kernel` says yes to.
        keys: Two numbers of noise, in a tensor on the same device.
    """
    result = torch.empty_like(x)
    if not x.numel():
        return result
    try:
        (kernels,) = _found
        kernels.launch(plan.kernel, plan.mode_number, numbers_of(plan), x, result, keys)
    except Exception as error:  # whatever a compiler of somebody else's raises
        _found[:] = [None]
        _LOGGER.warning(
            "number formats are rounded by torch ops on GPUs, since Triton can't compile or run the "
            "kernels: %s; HMPX_KERNELS=off hides this",
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
        return None
    return result


def numbers_of(plan: Plan) -> tuple[Any, ...]:
    """Returns the numbers of the plan's spec, without the mode."""
    spec = plan.kernel_spec()
    fields = getattr(spec, "_fields_", None)
    found = list(spec) if fields is None else [getattr(spec, name) for name, _ in fields]
    return tuple(found[1:])


def _kernels() -> Any:
    if not _found:
        _found.append(_imported())
    return _found[0]


def _imported() -> Any:
    if library.is_off():
        return None
    try:
        return importlib.import_module(f"{__package__}.triton_kernels")
    except Exception:  # not installed, or not for this machine
        return None
