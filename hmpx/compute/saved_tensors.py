"""Makes autograd save the sources of tensors, by hooks, instead of tensors that the backward can make again.

`keeping_low` computes an op in fp32: autograd saves the low-precision sources of its inputs.
`keeping_parameters` is for calls of torch's low-precision kernels: autograd saves a parameter, which is alive
anyway, instead of its cast. The backward casts it again, to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..tensors import CAST, LOW_DTYPES, PLAIN_TENSORS, Args, Kwargs, edges_of, node_of
from ..torch_internals import (
    address_of,
    has_fake_tensors,
    hide_hook,
    hooks_refused,
    is_jit_tracing,
    is_noted_in_graph,
    number_of,
    passes_for_real,
    pop_hooks,
    push_hooks,
    top_hooks,
    transforms,
)
from .composition import raised, rounded, widen

# Read before anything is patched: op lists may name any of them.
_add_, _clamp_, _masked_fill_ = Tensor.add_, Tensor.clamp_, Tensor.masked_fill_
_as_strided, _copy_, _detach = Tensor.as_strided, Tensor.copy_, Tensor.detach
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_abs, _gt, _sub, _to, _view = torch.abs, torch.gt, torch.sub, Tensor.to, Tensor.view
_equal, _storage = torch.equal, Tensor.untyped_storage


@dataclass(slots=True)
class SavedTensor:
    """The replacement of an fp32 tensor that autograd saves."""

    tensor: (
        Any  # its low-precision source, perhaps a parameter; or the packed object of outer hooks
    )
    version: int  # the source's version counter
    raise_again: Callable[[Tensor], Tensor] | None = None  # recreates it; None if ``tensor`` is it
    #: The strides of the first result of ``raise_again``, then the shape, strides and offset of the view of it to
    #: return; None for the tensor itself.
    layout: tuple[Any, Any, Any, Any] | None = None
    rest: Any = None  # the number to add to its bits afterwards, see `remainder`; None for nothing
    is_pending: bool = False  # whether its tensor is yet to be replaced by a low-precision one


def unpack(kept: SavedTensor, unpack_outer: Callable[[Any], Tensor] | None = None) -> Tensor:
    """Returns the tensor that ``kept`` represents; raises RuntimeError if its source was written to.

    Under compiled autograd writes are not detected, like all writes to tensors that hooks keep.
    """
    tensor: Tensor = kept.tensor
    if unpack_outer is not None:
        tensor = unpack_outer(tensor)
    elif not is_dynamo_compiling() and tensor._version != kept.version:  # it has no versions
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
    if tensor.stride() != strides:  # outer hooks returned another layout
        same = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = _copy_(same, tensor)
    if tensor.shape == shape and strides == view_strides:
        return tensor
    return _as_strided(tensor, shape, view_strides, tensor.storage_offset() + offset)


def saved_by(node: Any) -> list[Any]:
    """Returns the saved tensors of one autograd node, as torch's objects, without None."""
    found: list[Any] = []
    for name in _saved_names(node.__class__):
        value = getattr(node, name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [each for each in found if each.data is not None]


def tensors_saved_by(node: Any) -> list[Tensor] | None:
    """Returns the tensors that one autograd node keeps, unless hooks of the program packed them.

    None while a call that hmpx computes has yet to decide what it keeps.
    """
    found: list[Any] = [each.data for each in saved_by(node)]
    kept = [each for each in found if isinstance(each, SavedTensor)]
    if any(each.is_pending for each in kept):
        return None
    found += [value for each in kept for value in (each.tensor, each.rest)]
    return [each for each in found if isinstance(each, Tensor)]


def nodes_made(tensors: Iterable[Tensor], first: int, mark: object) -> list[Any]:
    """Returns the autograd nodes behind tensors that have a number from ``first`` on, and no ``mark``."""
    found: list[Any] = []
    following = [node_of(each) for each in tensors]
    while following:
        node = following.pop()
        if node is None or (number_of(node) or 0) < first or mark in node.metadata:
            continue
        if all(node is not each for each in found):
            found.append(node)
            following += [each for each, _ in edges_of(node)]
    return found


@functools.cache
def _saved_names(node: type) -> list[str]:
    return [name for name in dir(node) if name.startswith("_raw_saved_")]


def _is_read_alone(kept: SavedTensor, result: Tensor) -> bool:
    """Whether the backward formula of a saved output reads no other tensor."""
    node = node_of(result)
    while node is not None:
        saved = saved_by(node)
        if saved:
            return len(saved) == 1 and saved[0].data is kept
        before = [each for each, _ in edges_of(node) if each is not None]
        node = before[0] if len(before) == 1 else None  # for views
    return False


def _keep_output(kept: SavedTensor, result: Tensor, low_result: Tensor, *, splits: bool) -> None:
    """Keeps the rounded output, with ``splits`` also the remainder, if ``kept`` has the output's elements."""
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
    """Returns the int16 to add to the fp32 bits of ``low`` to restore float32 ``exact``.

    Halfway between two bfloat16 numbers, the result may be off by one unit in fp32's last place. The
    remainder is 0 for float16 values that are NaN, subnormal or infinite, where the difference does not fit.
    """
    rest = _sub(_view(exact, torch.int32), _view(widen(low), torch.int32))
    if low.dtype is torch.bfloat16:
        return _to(_clamp_(rest, -0x8000, 0x7FFF), torch.int16)
    return _to(_masked_fill_(rest, _gt(_abs(rest), 0x1000), 0), torch.int16)


# --- ops computed in fp32 --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of one call."""

    dtype: torch.dtype  # the low-precision dtype
    widen: Callable[[Tensor], Tensor]  # upcasts its inputs
    is_product: bool  # autograd saves only its inputs, or copies of them
    rounds_inputs: bool  # its fp32 inputs are rounded first
    #: An output saved with other tensors is kept as two 16-bit tensors: the rounded output, and the remainder.
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

    ``finish``, for products only, converts the fp32 result to the final one. fp32 copies of inputs are
    recreated from the input, or from its parameter, which is alive anyway. An output is kept rounded, unless the
    backward formula also reads other tensors. A norm's statistics stay unchanged.
    """
    outer = top_hooks()
    packer = _Packer(precision, CAST[precision.dtype], outer)
    new_args, new_kwargs = packer.upcast(args, kwargs, given)
    if outer is None:
        push_hooks(packer.pack, unpack)
    else:
        push_under(packer.pack, outer)
    try:
        result = function(*new_args, **new_kwargs)
    finally:
        pop_hooks()
    packer.sources.clear()  # torch keeps a pack hook as long as its packed tensors
    low_result = rounded(result, finish or packer.convert)
    if packer.pending:
        packer.settle(result, None if finish else low_result)
    return low_result


def push_under(pack: Callable[[Tensor], SavedTensor], outer: tuple[Any, Any]) -> None:
    """Pushes saved-tensor hooks that store the results of ``pack``, below the ``outer`` ones."""
    pack = functools.partial(pack)  # methods can't be marked
    hide_hook(pack, outer)
    push_hooks(pack, functools.partial(unpack, unpack_outer=outer[1]))


@dataclass(slots=True, eq=False)
class _Packer:
    """The pack hook of one call."""

    precision: Precision
    convert: Callable[[Tensor], Tensor]  # to its low-precision dtype
    outer: tuple[Any, Any] | None  # the hooks around it
    #: Address -> the source of an fp32 input, how to upcast it, and the strides.
    sources: dict[int, tuple[Tensor, Callable[[Tensor], Tensor], Any]] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)  # addresses of fp32 parameters that are inputs
    pending: list[tuple[int, SavedTensor]] = field(
        default_factory=list
    )  # with addresses, for `settle`

    def upcast(self, args: Args, kwargs: Kwargs, given: Args) -> tuple[list[Any], Kwargs]:
        """Returns the arguments with low-precision tensors in fp32; records their sources."""
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
        """Returns ``tensor`` in fp32, and records its source: ``source``, rounded, if given."""
        again = self.precision.widen
        wide = again(tensor)
        if source is None:
            source = tensor
        else:
            convert = self.convert
            again = functools.partial(lambda one, source: one(convert(source)), again)
        self.sources[address_of(wide)] = source, again, wide.stride()
        return wide

    def pack(self, tensor: Tensor) -> SavedTensor:
        is_usual = tensor.dtype is torch.float32 and tensor.layout is torch.strided
        pointer = address_of(tensor) if is_usual else 0  # also 0 if it is empty
        found = self.sources.get(pointer)
        if found is not None and pointer:
            source, again, strides = found
            layout = (strides, tensor.shape, tensor.stride(), 0)
            source = _detach(source)
            kept = SavedTensor(source, source._version, again, layout)
            return kept if self.outer is None else self.pack_again(kept)
        tensor = _detach(tensor)
        kept = SavedTensor(tensor, tensor._version)
        if not pointer or pointer in self.alive:
            return self.pack_again(kept)
        if self.precision.is_product and self.precision.rounds_inputs:
            low = self.convert(tensor)
            # A copy of an input in another layout; planned tensors have no values, and are copies. On other devices
            # the comparison would wait.
            if passes_for_real(tensor) or (tensor.is_cpu and _equal(widen(low), tensor)):
                return self.pack_again(SavedTensor(low, low._version, widen))
        kept.is_pending = True
        self.pending.append((pointer, kept))
        return kept

    def pack_again(self, kept: SavedTensor) -> SavedTensor:
        if self.outer is not None:
            pack_outer = self.outer[0]
            kept.tensor = pack_outer(kept.tensor)
            if kept.rest is not None:
                kept.rest = pack_outer(kept.rest)
        return kept

    def settle(self, result: Any, low_result: Any) -> None:
        """Decides how to keep the pending tensors, given the fp32 result, and the rounded one if it may be kept."""
        precision = self.precision
        is_dense = isinstance(result, Tensor) and result.layout is torch.strided
        address = address_of(result) if is_dense else 0
        outputs = [kept for pointer, kept in self.pending if pointer == address]
        for kept in outputs:
            # If the formula also reads other, unrounded tensors, this must not be rounded either: formulas
            # compare them, or compute their small difference.
            if low_result is not None and (precision.splits_output or _is_read_alone(kept, result)):
                _keep_output(kept, result, low_result, splits=precision.splits_output)
        if precision.is_product and not precision.rounds_inputs and not outputs:
            for _, kept in self.pending:
                kept.tensor, kept.raise_again = self.convert(kept.tensor), widen
                kept.version = kept.tensor._version
        for _, kept in self.pending:
            self.pack_again(kept).is_pending = False
        self.pending.clear()


# --- parameters instead of their casts, for torch's low-precision kernels ------------------------

#: A parameter, or a view of one, and its cast.
Pair = tuple[Tensor, Tensor]

#: How many times a call on a CPU must use each of a parameter's elements before ``"auto"`` casts again. The
#: products of forward and backward take 6 operations per use of an element, and its cast moves 6 bytes. From
#: here on the cast takes at most 3 % of their time, on a processor with 8 operations to a byte moved.
_LEAST_USES: Final = 256

#: Smaller parameters are not worth the hooks.
LEAST_ELEMENTS: Final = 1 << 14

#: Nor are parameters with less than 1/32 of the elements of the other tensor.
_LEAST_SHARE: Final = 32


def keeping_parameters(  # noqa: PLR0917  # all there is to one call
    is_choosy: bool,
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    given: Args,
    given_kwargs: Kwargs | None = None,
) -> Any:
    """Runs ``function`` on cast arguments; autograd keeps the original parameters instead of their casts.

    ``given`` are the arguments before casts. With ``is_choosy``, casts that cost more time than they are worth
    are kept.
    """
    # Avoids guards on sizes; partitioned graphs choose later.
    if is_choosy and is_dynamo_compiling():
        return function(*args, **kwargs)
    pairs: list[Pair] = []
    if torch.is_grad_enabled() and not is_jit_tracing():  # its sizes are tensors
        least = LEAST_ELEMENTS if is_choosy else 0
        _note(pairs, least, given, args)
        if given_kwargs:
            _note(pairs, least, given_kwargs.values(), kwargs.values())
        if pairs and is_choosy:
            pairs = [pair for pair in pairs if _is_worthwhile(pair[1], args)]
    if not pairs or hooks_refused() is not None or transforms() is not None or is_noted_in_graph():
        return function(*args, **kwargs)
    outer = top_hooks()
    pack = functools.partial(_pack, pairs, None if outer is None else outer[0])
    if outer is None:
        push_hooks(pack, unpack)
    else:
        push_under(pack, outer)
    try:
        return function(*args, **kwargs)
    finally:
        pop_hooks()
        pairs.clear()  # torch keeps a pack hook as long as its packed tensors


def _note(pairs: list[Pair], least: int, given: Iterable[Any], cast: Iterable[Any]) -> None:
    """Adds cast parameter matrices of at least ``least`` elements to ``pairs``."""
    for before, value in zip(given, cast, strict=True):
        if value is before:
            continue
        if isinstance(value, Tensor):
            size = value.numel()
            is_large = size >= least if isinstance(size, int) else not least  # without a guard
            is_matrix = value.dim() > 1 and is_large and value.dtype in LOW_DTYPES
            if is_matrix and (_is_parameter(before) or _is_parameter(before._base)):
                pairs.append((before, value))
        elif isinstance(value, (list, tuple)):
            _note(pairs, least, before, value)


def _is_parameter(tensor: Tensor | None) -> bool:
    kind = type(tensor)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def _is_worthwhile(cast: Tensor, args: Args) -> bool:
    others = [each for each in args if isinstance(each, Tensor) and each is not cast]
    if not all(isinstance(each.numel(), int) for each in (cast, *others)):
        return False  # an exported graph would only fit sizes with the same decision
    return bool(others) and pays(cast, max(others, key=Tensor.numel))


def pays(weight: Tensor, other: Tensor) -> bool:
    """Whether to cast a weight again in the backward of its product with another tensor.

    Never on accelerators: it takes the host's time, for which their steps wait.
    """
    size, other_size = weight.numel(), other.numel()
    if (
        not (weight.is_cpu and other.dim())
        or size < LEAST_ELEMENTS
        or size * _LEAST_SHARE < other_size
    ):
        return False
    channels = 1 if weight.dim() > 2 and weight.dim() == other.dim() else -1
    uses = other_size // max(1, other.shape[channels])
    return uses >= _LEAST_USES


def _pack(
    pairs: list[Pair], pack_outer: Callable[[Tensor], Any] | None, tensor: Tensor
) -> SavedTensor:
    kept = None
    if tensor.dtype in LOW_DTYPES and tensor.layout is torch.strided:
        memory = _storage(tensor)._cdata
        for parameter, cast in pairs:
            # Inference tensors have no version counter; their casts are ordinary tensors.
            is_usual = _has_strides(cast) and not parameter.is_inference()
            if is_usual and _storage(cast)._cdata == memory:
                offset = tensor.storage_offset() - cast.storage_offset()
                layout = (cast.stride(), tensor.shape, tensor.stride(), offset)
                # A leaf is kept itself, as in autograd: sharding may replace its memory meanwhile.
                is_leaf = _is_parameter(parameter) and pack_outer is None
                identity = parameter._cdata if is_leaf else None
                again = functools.partial(_cast_again, cast.dtype, identity)
                source = parameter if is_leaf else _detach(parameter)
                kept = SavedTensor(source, source._version, again, layout)
                break
    if kept is None:
        tensor = _detach(tensor)
        kept = SavedTensor(tensor, tensor._version)
    if pack_outer is not None:
        kept.tensor = pack_outer(kept.tensor)
    return kept


def _has_strides(tensor: Tensor) -> bool:
    """Whether a tensor's class supports views by strides, unlike DTensor."""
    kind = type(tensor)
    return kind in PLAIN_TENSORS or (has_fake_tensors() and not hasattr(kind, "__tensor_flatten__"))


def _cast_again(dtype: torch.dtype, identity: int | None, parameter: Tensor) -> Tensor:
    """Returns the cast of a parameter; checks its identity below Python, if one is given."""
    if identity is not None and not is_dynamo_compiling() and parameter._cdata != identity:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been swapped for another by "
            f"torch.utils.swap_tensors: [{parameter.dtype}, {list(parameter.shape)}]; swap after the "
            "backward, or convert with keep_weight_casts=True"
        )
    # Without a view where none is needed: modes that count memory would count the parameter's.
    return CAST[dtype](_detach(parameter) if torch.is_grad_enabled() else parameter)
