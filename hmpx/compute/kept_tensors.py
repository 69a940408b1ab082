"""What autograd keeps instead of an fp32 tensor, and how the tensor is made again.

Independent of which tensors are kept this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import edges_of, node_of
from ..torch_internals import TELLS_SAVED
from .composition import widen

# Taken before anything is patched: op lists may name any of them.
_add_, _clamp_, _masked_fill_ = Tensor.add_, Tensor.clamp_, Tensor.masked_fill_
_as_strided, _copy_, _detach = Tensor.as_strided, Tensor.copy_, Tensor.detach
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_abs, _gt, _sub, _to, _view = torch.abs, torch.gt, torch.sub, Tensor.to, Tensor.view


class Kept:
    """What is kept for autograd instead of an fp32 tensor.

    Attributes:
        tensor: The low-precision tensor, or parameter, that the fp32 tensor is made from; with outer
            hooks, whatever those packed it into.
        version: The tensor's version, so that a write to it in the meantime is noticed.
        raise_again: Makes the fp32 tensor again; None if ``tensor`` already is it.
        rest: What to add to its bits afterwards, see `remainder`; None for nothing.
        layout: The strides of the tensor that ``raise_again`` first made, then the shape and strides
            of the view of it to return, and where that begins in it; None for the tensor itself.
    """

    __slots__ = ("layout", "raise_again", "rest", "tensor", "version")

    def __init__(
        self,
        tensor: Any,
        raise_again: Callable[[Tensor], Tensor] | None = None,
        layout: tuple[Any, Any, Any, Any] | None = None,
    ) -> None:
        self.tensor, self.raise_again, self.layout = tensor, raise_again, layout
        self.rest: Any = None
        self.version = tensor._version


def unpack(kept: Kept, unpack_outer: Callable[[Any], Tensor] | None = None) -> Tensor:
    """Returns the tensor that ``kept`` stands for.

    Under compiled autograd writes are not noticed, as torch notices none to what hooks keep.

    Raises:
        RuntimeError: The tensor that it is made from was written to.
    """
    tensor: Tensor = kept.tensor
    if unpack_outer is not None:
        tensor = unpack_outer(tensor)
    elif not is_dynamo_compiling() and tensor._version != kept.version:  # it would trace its own
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{tensor.dtype}, {list(tensor.shape)}] is at version "
            f"{tensor._version}; expected version {kept.version} instead"
        )
    if kept.raise_again is None:
        return tensor
    tensor = kept.raise_again(tensor)
    if kept.rest is not None:
        rest = kept.rest if unpack_outer is None else unpack_outer(kept.rest)
        _add_(_view(tensor, torch.int32), rest)
    return tensor if kept.layout is None else _laid_out(tensor, *kept.layout)


def _laid_out(tensor: Tensor, strides: Any, shape: Any, view_strides: Any, offset: Any) -> Tensor:
    """Returns a view of ``tensor``, which must have these strides, as it had when it was packed."""
    if tensor.stride() != strides:  # outer hooks gave back another layout
        same = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = _copy_(same, tensor)
    if tensor.shape == shape and strides == view_strides:
        return tensor
    return _as_strided(tensor, shape, view_strides, tensor.storage_offset() + offset)


def is_read_alone(kept: Kept, result: Tensor) -> bool:
    """Whether the backward formula that an output is saved for reads no other tensor."""
    node = node_of(result)
    while node is not None:
        saved = saved_by(node)
        if saved:
            is_it = not TELLS_SAVED or saved[0].data is kept
            return len(saved) == 1 and is_it
        before = [each for each, _ in edges_of(node) if each is not None]
        node = before[0] if len(before) == 1 else None  # as of views
    return False


def saved_by(node: Any) -> list[Any]:
    """Returns what autograd has saved in one node: objects of torch's, without any that are None."""
    found: list[Any] = []
    for name in _saved_names(node.__class__):
        value = getattr(node, name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [each for each in found if not TELLS_SAVED or each.data is not None]


@functools.cache
def _saved_names(node: type) -> list[str]:
    """Returns the attributes of this class of autograd nodes that stand for saved tensors."""
    return [name for name in dir(node) if name.startswith("_raw_saved_")]


def keep_output(kept: Kept, result: Tensor, low_result: Tensor, *, splits: bool) -> None:
    """Keeps the rounded output instead of ``kept.tensor``, if that holds the output's elements.

    With ``splits``, the remainder that rounding takes away is kept, too.
    """
    tensor = kept.tensor
    if tensor.shape != result.shape:
        if tensor.numel() != result.numel():
            return
        if not (tensor.is_contiguous() and result.is_contiguous()):
            return
        kept.layout = (result.stride(), tensor.shape, tensor.stride(), 0)
    elif tensor.stride() != result.stride():
        return
    low = _detach(low_result)
    kept.tensor, kept.raise_again, kept.version = low, widen, low._version
    if splits:
        kept.rest = remainder(_detach(result), low)


def remainder(exact: Tensor, low: Tensor) -> Tensor:
    """Returns the int16 to add to the fp32 bits of ``low`` to get ``exact`` again.

    Halfway between two bfloat16 numbers, one unit in fp32's last place may be missing. Nothing is
    added to float16 values that are NaN, subnormal or infinite, where the difference does not fit.

    Args:
        exact: float32.
        low: The same values, rounded to low precision.
    """
    rest = _sub(_view(exact, torch.int32), _view(widen(low), torch.int32))
    if low.dtype is torch.bfloat16:
        return _to(_clamp_(rest, -0x8000, 0x7FFF), torch.int16)
    return _to(_masked_fill_(rest, _gt(_abs(rest), 0x1000), 0), torch.int16)
