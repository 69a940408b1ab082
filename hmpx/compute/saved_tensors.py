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
from ..torch_internals import (
    address_of,
    hide_hook,
    passes_for_real,
    pop_hooks,
    push_hooks,
    top_hooks,
)
from .composition import raised, rounded, widen
from .kept_tensors import Kept, is_read_alone, keep_output, unpack

# Taken before anything is patched: op lists may name any of them.
_detach, _equal = Tensor.detach, torch.equal


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
    outer = top_hooks()
    packer = _Packer(precision, outer)
    new_args, new_kwargs = packer.upcast(args, kwargs, given)
    if outer is None:
        push_hooks(packer.pack, unpack)
    else:
        pack = functools.partial(packer.pack)  # methods can't be marked
        hide_hook(pack, outer)
        push_hooks(pack, functools.partial(unpack, unpack_outer=outer[1]))
    try:
        result = function(*new_args, **new_kwargs)
    finally:
        pop_hooks()
    packer.sources.clear()  # torch keeps a pack hook as long as the tensors that it packed
    low_result = rounded(result, finish or packer.convert)
    if packer.pending:
        packer.settle(result, None if finish else low_result)
    return low_result


class _Packer:
    """The pack hook of one call.

    Attributes:
        precision: How the call is computed.
        convert: Rounds a tensor to the call's dtype.
        outer: The hooks around the call, or None.
        sources: By address: the source of an fp32 input, how to upcast it, and the strides.
        alive: Addresses of fp32 parameters that are inputs themselves.
        pending: Address and what is kept, for tensors that `settle` decides about.
    """

    __slots__ = ("alive", "convert", "outer", "pending", "precision", "sources")

    def __init__(self, precision: Precision, outer: tuple[Any, Any] | None) -> None:
        self.precision, self.outer = precision, outer
        self.convert = CAST[precision.dtype]
        self.sources: dict[int, tuple[Tensor, Callable[[Tensor], Tensor], Any]] = {}
        self.alive: set[int] = set()
        self.pending: list[tuple[int, Kept]] = []

    def upcast(self, args: Args, kwargs: Kwargs, given: Args) -> tuple[list[Any], Kwargs]:
        """Returns the arguments with low-precision tensors in fp32; notes what each is made from.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            given: The positional arguments before they were cast.
        """
        note = self.note
        new_args = list(args)
        for position, value in enumerate(args):
            before = given[position]
            is_parameter = isinstance(before, torch.nn.Parameter)
            if isinstance(value, Tensor):
                if value.dtype in LOW_DTYPES:
                    source = before if is_parameter and before is not value else None
                    new_args[position] = note(value, source)
                elif is_parameter:
                    self.alive.add(address_of(before))
            elif isinstance(value, (list, tuple)):
                new_args[position] = raised(value, note)
        if not kwargs:
            return new_args, {}
        return new_args, {name: raised(value, note) for name, value in kwargs.items()}

    def note(self, tensor: Tensor, source: Tensor | None = None) -> Tensor:
        """Returns ``tensor`` in fp32, and notes what it is made from: ``source``, rounded, if given."""
        again = self.precision.widen
        wide = again(tensor)
        if source is None:
            source = tensor
        else:
            again = functools.partial(_reround, self.convert, again)
        self.sources[address_of(wide)] = source, again, wide.stride()
        return wide

    def pack(self, tensor: Tensor) -> Kept:
        """Returns what is kept instead of ``tensor``, which autograd saves."""
        is_usual = tensor.dtype is torch.float32 and tensor.layout is torch.strided
        pointer = address_of(tensor) if is_usual else 0  # 0, too, if it is empty
        found = self.sources.get(pointer)
        if found is not None and pointer:
            source, again, strides = found
            layout = (strides, tensor.shape, tensor.stride(), 0)
            return self.keep(Kept(_detach(source), again, layout))
        tensor = _detach(tensor)
        if not pointer or pointer in self.alive:
            return self.keep(Kept(tensor))
        if self.precision.is_product and self.precision.rounds_inputs:
            low = self.convert(tensor)
            # A copy of an input in another layout; planned ones have no values, and are copies.
            if passes_for_real(tensor) or _equal(widen(low), tensor):
                return self.keep(Kept(low, widen))
        kept = Kept(tensor)
        self.pending.append((pointer, kept))
        return kept

    def keep(self, kept: Kept) -> Kept:
        """Returns ``kept`` as the outer hooks pack it."""
        if self.outer is not None:
            pack_outer = self.outer[0]
            kept.tensor = pack_outer(kept.tensor)
            if kept.rest is not None:
                kept.rest = pack_outer(kept.rest)
        return kept

    def settle(self, result: Any, low_result: Any) -> None:
        """Decides how the pending tensors are kept, now that the result is known.

        Args:
            result: The fp32 result.
            low_result: The same, rounded to the call's dtype; None if no output may be kept as that.
        """
        precision = self.precision
        is_dense = isinstance(result, Tensor) and result.layout is torch.strided
        address = address_of(result) if is_dense else 0
        outputs = [kept for pointer, kept in self.pending if pointer == address]
        for kept in outputs:
            # If the formula also reads other tensors, which are not rounded, this must not be rounded
            # either: formulas compare them, or take their small difference.
            if low_result is not None and (precision.splits_output or is_read_alone(kept, result)):
                keep_output(kept, result, low_result, splits=precision.splits_output)
        if precision.is_product and not precision.rounds_inputs and not outputs:
            for _, kept in self.pending:
                kept.tensor, kept.raise_again = self.convert(kept.tensor), widen
                kept.version = kept.tensor._version
        for _, kept in self.pending:
            self.keep(kept)
        self.pending.clear()


def _reround(
    convert: Callable[[Tensor], Tensor], raise_one: Callable[[Tensor], Tensor], tensor: Tensor
) -> Tensor:
    return raise_one(convert(tensor))
