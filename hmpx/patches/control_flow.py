"""Branches and loops that torch traces: `torch.cond` and `torch.while_loop`.

torch wants the same dtypes from both branches, and from a loop's body those that it is given. A program in
fp32 has them; casts in one branch alone, or in the body, would stop it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..patching import Draft, Patch
from ..tensors import CAST, LOW_DTYPES, SEQUENCES, widened, with_items
from ..torch_state import is_off
from .filled import named_after


def control_flow_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches by which results of branches and bodies have the dtypes that torch expects."""
    for name, settle in (("cond", _cond), ("while_loop", _while_loop)):
        if not hasattr(torch, name):  # both are prototypes
            continue
        original = draft.attribute(torch, name)
        wrapper = named_after(original, settle(original), name)
        package = original.__globals__["__package__"]  # torch imports it from there
        owners = (torch, sys.modules[package])
        yield from (Patch(owner, name, wrapper) for owner in owners)


def _cond(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(
        pred: Any,
        true_fn: Callable[..., Any],
        false_fn: Callable[..., Any],
        operands: Any = (),
    ) -> Any:
        if is_off():
            return original(pred, true_fn, false_fn, operands)

        def if_true(*args: Any) -> Any:
            return widened(true_fn(*args))

        def if_false(*args: Any) -> Any:
            return widened(false_fn(*args))

        return original(pred, if_true, if_false, operands)

    return cond


def _while_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    def while_loop(
        cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any
    ) -> Any:
        def body(*carried: Any) -> Any:
            return _alike(body_fn(*carried), carried)

        return original(cond_fn, body, carried_inputs)

    return while_loop


def _alike(value: Any, given: Any) -> Any:
    """Returns ``value``, where one of two dtypes is low with the dtypes of ``given``, at any depth."""
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        dtypes = value.dtype, given.dtype
        is_cast = dtypes[0] is not dtypes[1] and not LOW_DTYPES.isdisjoint(dtypes)
        return CAST[given.dtype](value) if is_cast and given.dtype in CAST else value
    if isinstance(value, SEQUENCES) and isinstance(given, SEQUENCES):
        items = [_alike(each, part) for each, part in zip(value, given, strict=True)]
        return with_items(value, items)
    if isinstance(value, dict) and isinstance(given, dict):
        return {key: _alike(each, given.get(key)) for key, each in value.items()}
    return value
