"""Makes autograd keep a parameter for the backward instead of its low-precision cast.

The parameter is alive anyway, and the backward casts it again, to the same bits. For calls of torch's
low-precision kernels; ``saved_tensors`` does the same for legalized ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..tensors import CAST, LOW_DTYPES, PLAIN_TENSORS, Args, Kwargs
from ..torch_internals import (
    has_fake_tensors,
    hooks_refused,
    is_jit_tracing,
    is_noted_in_graph,
    pop_hooks,
    push_hooks,
    top_hooks,
    transforms,
)
from .saved_tensors import Kept, is_dynamo_compiling, push_under, unpack

# Read before anything is patched: op lists may name any of them.
_detach, _storage = Tensor.detach, Tensor.untyped_storage

#: A parameter, or a view of one, and its cast.
Pair = tuple[Tensor, Tensor]

#: How many times a call must use each of a parameter's elements before ``"auto"`` casts again. The
#: products of forward and backward take 6 operations per use of an element, and its cast moves 6 bytes. From
#: here on the cast takes at most 3 % of their time, on a device with this ratio of operations to bytes moved: 8 on
#: a processor, 120 on an accelerator.
_LEAST_USES: Final = {"cpu": 256}
_LEAST_USES_ELSEWHERE: Final = 4096

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
    """Whether to cast a weight again in the backward of its product with another tensor."""
    size, other_size = weight.numel(), other.numel()
    if not other.dim() or size < LEAST_ELEMENTS or size * _LEAST_SHARE < other_size:
        return False
    channels = 1 if weight.dim() > 2 and weight.dim() == other.dim() else -1
    uses = other_size // max(1, other.shape[channels])
    return uses >= _LEAST_USES.get(weight.device.type, _LEAST_USES_ELSEWHERE)


def _pack(pairs: list[Pair], pack_outer: Callable[[Tensor], Any] | None, tensor: Tensor) -> Kept:
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
                kept = Kept(source, source._version, again, layout)
                break
    if kept is None:
        tensor = _detach(tensor)
        kept = Kept(tensor, tensor._version)
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
    return CAST[dtype](_detach(parameter))
