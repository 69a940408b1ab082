"""What autograd saves for an op that is computed in fp32: low-precision tensors.

Saved-tensor hooks store the low-precision sources instead of the fp32 copies that the op saw.
Independent of which ops are computed this way, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors import CAST, LOW_DTYPES, Args, Kwargs
from ..torch_internals import TELLS_SAVED, hide_hook, pop_hooks, push_hooks, top_hooks
from .composition import raised, rounded, widen

# Taken before anything is patched: op lists may name any of them.
_as_strided, _copy_, _data_ptr = Tensor.as_strided, Tensor.copy_, Tensor.data_ptr
_detach, _equal = Tensor.detach, torch.equal
_add_, _clamp_, _masked_fill_ = Tensor.add_, Tensor.clamp_, Tensor.masked_fill_
_abs, _gt, _sub, _to, _view = torch.abs, torch.gt, torch.sub, Tensor.to, Tensor.view


@dataclass(frozen=True, slots=True)
class Precision:
    """How one call is computed.

    Attributes:
        dtype: The low-precision dtype.
        widen: Upcasts its inputs.
        is_product: Autograd saves only its inputs, or copies of them.
        rounds_inputs: Its fp32 inputs are rounded first.
        splits_output: An output that autograd saves beside other tensors is kept as two 16-bit
            tensors: the rounded output, and the remainder that rounding takes away.
    """

    dtype: torch.dtype
    widen: Callable[[Tensor], Tensor]
    is_product: bool
    rounds_inputs: bool
    splits_output: bool = False


class _Kept:
    """What is kept for autograd instead of an fp32 tensor.

    Attributes:
        tensor: The low-precision tensor, or parameter, that the fp32 tensor is made from; with outer
            hooks, whatever those packed it into.
        version: The tensor's version, so that a write to it in the meantime is noticed.
        raise_again: Makes the fp32 tensor again; None if ``tensor`` already is it.
        rest: What to add to its bits afterwards, see `remainder`; None for nothing.
        layout: The strides of the tensor that ``raise_again`` first made, then the shape and strides
            of the view of it to return; None for the tensor itself.
    """

    __slots__ = ("layout", "raise_again", "rest", "tensor", "version")

    def __init__(
        self,
        tensor: Any,
        raise_again: Callable[[Tensor], Tensor] | None = None,
        layout: tuple[Any, Any, Any] | None = None,
    ) -> None:
        self.tensor, self.raise_again, self.layout = tensor, raise_again, layout
        self.rest: Any = None
        self.version = tensor._version


def keeping_low(  # noqa: PLR0917  # all there is to one call
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    given: Args,
    precision: Precision,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Computes ``function`` in fp32 and rounds the result; autograd saves low-precision tensors.

    ``finish``, if given, makes the result from the fp32 one; it must be given for products only.
    An fp32 copy of an input is made again from the input, or from the parameter behind it, which is
    alive anyway. An output is kept as rounded, unless the backward formula reads other tensors
    beside it. A norm's statistics stay as they are.
    """
    convert, raise_one = CAST[precision.dtype], precision.widen
    # By address: the source of an fp32 input, how to upcast it, and the strides.
    sources: dict[int, tuple[Tensor, Callable[[Tensor], Tensor], Any]] = {}
    alive: set[int] = set()  # addresses of fp32 parameters that are inputs themselves
    pending: list[tuple[int, _Kept]] = []
    outer = top_hooks()

    def reround(tensor: Tensor) -> Tensor:
        return raise_one(convert(tensor))

    def noting(tensor: Tensor, source: Tensor | None = None) -> Tensor:
        wide = raise_one(tensor)
        again = raise_one if source is None else reround
        sources[_data_ptr(wide)] = (tensor if source is None else source, again, wide.stride())
        return wide

    def pack(tensor: Tensor) -> _Kept:
        is_usual = tensor.dtype is torch.float32 and tensor.layout is torch.strided
        pointer = _data_ptr(tensor) if is_usual else 0  # 0, too, if it is empty
        found = sources.get(pointer)
        if found is not None and pointer:
            source, again, strides = found
            layout = (strides, tensor.shape, tensor.stride())
            return keep(_Kept(_detach(source), again, layout))
        tensor = _detach(tensor)
        if not pointer or pointer in alive:
            return keep(_Kept(tensor))
        if precision.is_product and precision.rounds_inputs:
            low = convert(tensor)
            if _equal(widen(low), tensor):  # a copy of an input in another layout
                return keep(_Kept(low, widen))
        kept = _Kept(tensor)
        pending.append((pointer, kept))
        return kept

    def keep(kept: _Kept) -> _Kept:
        if outer is not None:
            kept.tensor = outer[0](kept.tensor)
            if kept.rest is not None:
                kept.rest = outer[0](kept.rest)
        return kept

    def unpack(kept: _Kept) -> Tensor:
        tensor: Tensor = kept.tensor
        if outer is not None:
            tensor = outer[1](tensor)
        elif tensor._version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.dtype}, {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {kept.version} instead"
            )
        if kept.raise_again is None:
            return tensor
        tensor = kept.raise_again(tensor)
        if kept.rest is not None:
            rest = kept.rest if outer is None else outer[1](kept.rest)
            _add_(_view(tensor, torch.int32), rest)
        return tensor if kept.layout is None else _laid_out(tensor, *kept.layout)

    new_args = list(args)
    for position, value in enumerate(args):
        before = given[position]
        is_parameter = type(before) is torch.nn.Parameter
        if isinstance(value, Tensor):
            if value.dtype in LOW_DTYPES:
                source = before if is_parameter and before is not value else None
                new_args[position] = noting(value, source)
            elif is_parameter:
                alive.add(_data_ptr(before))
        elif isinstance(value, (list, tuple)):
            new_args[position] = raised(value, noting)
    new_kwargs = {name: raised(value, noting) for name, value in kwargs.items()} if kwargs else {}
    if outer is not None:
        hide_hook(pack, outer)
    push_hooks(pack, unpack)
    try:
        result = function(*new_args, **new_kwargs)
    finally:
        pop_hooks()
    low_result = rounded(result, finish or convert)
    if pending:
        is_dense = isinstance(result, Tensor) and result.layout is torch.strided
        address = _data_ptr(result) if is_dense else 0
        outputs = [kept for pointer, kept in pending if pointer == address]
        for kept in outputs:
            # If the formula also reads other tensors, which are not rounded, this must not be rounded
            # either: formulas compare them, or take their small difference.
            if finish is None and (precision.splits_output or _is_read_alone(kept, result)):
                _keep_output(kept, result, low_result, splits=precision.splits_output)
        if precision.is_product and not precision.rounds_inputs and not outputs:
            for _, kept in pending:
                kept.tensor, kept.raise_again = convert(kept.tensor), widen
                kept.version = kept.tensor._version
        for _, kept in pending:
            keep(kept)
    return low_result


def _is_read_alone(kept: _Kept, result: Tensor) -> bool:
    """Whether the backward formula that an output is saved for reads no other tensor."""
    node = result.grad_fn
    while node is not None:
        saved = [tensor for name in _saved_names(type(node)) for tensor in _each(node, name)]
        if saved:
            is_it = not TELLS_SAVED or saved[0].data is kept
            return len(saved) == 1 and is_it
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None  # as of views
    return False


@functools.cache
def _saved_names(node: type) -> list[str]:
    """Returns the attributes of this class of autograd nodes that stand for saved tensors."""
    return [name for name in dir(node) if name.startswith("_raw_saved_")]


def _each(node: Any, name: str) -> list[Any]:
    """Returns the saved tensors behind one attribute, without any that are None."""
    value = getattr(node, name)
    several = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in several if not TELLS_SAVED or each.data is not None]


def _keep_output(kept: _Kept, result: Tensor, low_result: Tensor, *, splits: bool) -> None:
    """Keeps the rounded output instead of ``kept.tensor``, if that holds the output's elements.

    With ``splits``, the remainder that rounding takes away is kept, too.
    """
    tensor = kept.tensor
    if tensor.shape != result.shape:
        if tensor.numel() != result.numel():
            return
        if not (tensor.is_contiguous() and result.is_contiguous()):
            return
        kept.layout = (result.stride(), tensor.shape, tensor.stride())
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


def _laid_out(tensor: Tensor, strides: Any, shape: Any, view_strides: Any) -> Tensor:
    """Returns a view of ``tensor``, which must have these strides, as it had when it was packed."""
    if tensor.stride() != strides:  # outer hooks gave back another layout
        same = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = _copy_(same, tensor)
    if tensor.shape == shape and strides == view_strides:
        return tensor
    return _as_strided(tensor, shape, view_strides)
