"""Effective precision: the narrowest dtype that a tensor's values came from.

An fp32 tensor whose values all end in 16 zero bits was bf16 before: a dtype tells of the container, not of
its contents.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import OptionError, raised_here
from ..observers import OpCall
from ..places import located
from ..tensors import LOW_DTYPES, PLAIN_TENSORS, edges_of, node_of, tensors_in, version_of
from ..torch_internals import is_graph_made, is_jit_tracing, transforms
from ..torch_state import without_casts

#: Values that are read at a time: they stay in the cache.
_ROW: Final = 1 << 15
#: The same on a device, where each time costs several kernels.
_DEVICE_ROW: Final = 1 << 24

#: Values of the sample that tells rounded values from integers and small sets.
_SAMPLE: Final = 512

#: Fewer distinct magnitudes are constants, masks or a small set: no evidence of rounding.
_FEWEST: Final = 16

#: The last bit of half of all rounded values is one. Where it hardly ever is, values are short by nature: positions
#: times slopes.
_LEAST_ODD: Final = 1 / 8

#: The bits of an fp32 value that are zero if it was bf16, and if it was fp16.
_BELOW_BF16: Final = (1 << 16) - 1
BELOW_FP16: Final = (1 << 13) - 1


def contents(tensor: Tensor) -> torch.dtype | None:
    """Returns the narrowest dtype that holds each value of ``tensor`` exactly.

    The dtype is float32, float16 or bfloat16 (which is preferred to float16 where both fit), or the
    tensor's own. None where values can't show rounding: at most 16 distinct magnitudes
    (constants, masks), small integers times a power of two (positions, images), or hardly any that
    needs the last bit of the dtype (positions times slopes).

    Reads the values once; stops at the first part that tells them from low precision.

    Args:
        tensor: Any shape and device; float32 or float64. Other floating dtypes are returned as they are.

    Raises:
        OptionError: ``tensor`` is not a floating-point tensor.

    Example:
        >>> x = torch.linspace(0, 1, 100)
        >>> hmpx.contents(x), hmpx.contents(x.bfloat16().float())
        (torch.float32, torch.bfloat16)
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise OptionError(f"contents takes a floating-point tensor, not {given}")
    if not is_readable(tensor):
        kind = "meta" if tensor.device.type == "meta" else type(tensor).__name__
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
        raise OptionError(f"contents takes a plain, strided tensor, not a {kind} one")
    return all_contents([tensor])[0]


def all_contents(tensors: Sequence[Tensor]) -> list[torch.dtype | None]:
    """Returns the `contents` of each of these tensors, which are readable or hold integers."""
    found, samples = [each.dtype for each in tensors], dict[int, Tensor]()
    if not tensors:
        return []
    with without_casts(), torch.no_grad():
        for number, each in enumerate(tensors):
            if each.dtype in (torch.float32, torch.float64):
                found[number], sample = _held_in(each.detach().resolve_neg().reshape(-1))
                if found[number] in LOW_DTYPES:
                    samples[number] = torch.nn.functional.pad(sample, (0, _SAMPLE - len(sample)))
        if not samples:
            return [*found]
        lows = [found[number] for number in samples]
        are_evidence = _are_evidence(torch.stack([*samples.values()]).cpu().double(), lows)
    evidence = dict(zip(samples, are_evidence, strict=True))
    return [each if evidence.get(number, True) else None for number, each in enumerate(found)]


def _held_in(values: Tensor) -> tuple[torch.dtype, Tensor]:
    """Returns the narrowest dtype that holds values of float32 or float64, and a sample of them in float32."""
    # Strides are odd: values may have patterns of powers of two.
    sample = values[:: values.numel() // _SAMPLE | 1][:_SAMPLE]
    if values.dtype is torch.float64:
        if not (_is_fp32(sample) and _is_fp32(values)):
            return torch.float64, sample
        sample, values = sample.float(), values.float()
    is_bf16 = True
    for each in (sample, *torch.split(values, _row(values))) if len(values) else ():
        bits = each.view(torch.int32)
        if (bits & _BELOW_BF16).max() > 0:  # faster than any()
            is_bf16 = False
            if (bits & BELOW_FP16).max() > 0:
                return torch.float32, sample
    if is_bf16:
        return torch.bfloat16, sample
    return torch.float16 if _is_fp16(values) else torch.float32, sample


def has_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` has values that can be read: plain, strided, with storage."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not tensor.is_quantized
        and _has_storage(tensor)
    )


def is_readable(tensor: Tensor) -> bool:
    """Whether ``tensor`` has real floating-point values that can be read."""
    return tensor.is_floating_point() and has_values(tensor)


def _has_storage(tensor: Tensor) -> bool:
    # FSDP frees storages; kernels crash on these.
    try:
        return not tensor.numel() or tensor.untyped_storage().nbytes() > 0
    except raised_here(RuntimeError):  # a wrapper of torch.func
        return False


def may_read() -> bool:
    """Whether observers may read values: no graph is traced, and no transform of torch.func runs."""
    is_traced = torch.compiler.is_compiling() or is_graph_made() or is_jit_tracing()
    return not is_traced and transforms() is None


def _row(values: Tensor) -> int:
    """Returns how many values are read at a time: few on the CPU, where they stay in its cache."""
    return _ROW if values.device.type == "cpu" else _DEVICE_ROW


def _is_fp32(values: Tensor) -> bool:
    parts = torch.split(values, _row(values))
    return all(bool(((each.float() == each) | each.isnan()).all()) for each in parts)


def _is_fp16(values: Tensor) -> bool:
    """Whether float16 holds all fp32 values with its number of significant bits."""
    for each in torch.split(values, _row(values)):
        steps = each.abs().mul_(2.0**24)  # of the least subnormal number
        is_held = (steps == steps.trunc()) & (steps <= 65504 * 2.0**24)
        if not (is_held | ~each.isfinite()).all():
            return False
    return True


def _are_evidence(samples: Tensor, lows: Sequence[torch.dtype]) -> list[bool]:
    """Whether rows of values on the CPU that low dtypes hold are likely to be rounded ones."""
    magnitudes, _ = samples.abs().nan_to_num(0.0, 0.0).sort(1)
    before = torch.nn.functional.pad(magnitudes[:, :-1], (1, 0))
    is_new = magnitudes > before
    counts = is_new.sum(1)
    mantissa, _ = torch.frexp(magnitudes)
    power = magnitudes / mantissa  # of two: exact
    whole = (mantissa * 2**24).to(torch.int64)
    steps = ((whole & -whole) * power).where(is_new, torch.inf).amin(1) / 2**24
    least, largest = magnitudes.where(is_new, torch.inf).amin(1), magnitudes.amax(1)
    infos = [torch.finfo(each) for each in lows]
    eps = torch.tensor([each.eps for each in infos], dtype=torch.float64)
    least_ulps = torch.tensor(
        [each.smallest_normal * each.eps for each in infos], dtype=torch.float64
    )
    ulps = torch.maximum(power * (eps / 2)[:, None], least_ulps[:, None])
    odd = ((magnitudes / ulps % 2 == 1) & is_new).sum(1)
    has_range = (largest > 2 / eps * steps) | (largest < 4 * least)
    return ((counts > _FEWEST) & (odd >= _LEAST_ODD * counts) & has_range).tolist()


# --- where it was lost ---------------------------------------------------------------------------

#: The key of an origin in the metadata of an autograd node.
_KEY: Final = "hmpx.origin"


class Origins:
    """Follows low contents from call to call: through upcasts, copies and views.

    Views and most copies are not observed calls. Their origin is found by their autograd nodes, or by their
    storage.
    """

    def __init__(self) -> None:
        self._origins: MutableMapping[Tensor, str] = (
            WeakTensorKeyDictionary()
        )  # low contents -> where they were made low
        self._storages: MutableMapping[Any, str]  # likewise, the last one in each
        self._storages = weakref.WeakKeyDictionary()
        # Tensor -> its version, and its contents then
        self._known: MutableMapping[Tensor, tuple[int, torch.dtype | None]]
        self._known = WeakTensorKeyDictionary()

    def contents(self, tensor: Tensor) -> torch.dtype | None:
        """Returns `contents` of ``tensor``, computed once as long as nothing writes to it.

        None, too, for tensors whose values can't be read.
        """
        if not is_readable(tensor):
            return None
        version, known = version_of(tensor), self._known.get(tensor)
        if known is None or known[0] != version or version < 0:
            known = self._known[tensor] = version, contents(tensor)
        return known[1]

    def note(self, call: OpCall, inputs: Iterable[Tensor], result: object) -> None:
        """Notes where the results of a call lost precision."""
        outputs = [each for each in tensors_in([result]) if each.is_floating_point()]
        low = [each for each in outputs if self.contents(each) in LOW_DTYPES]
        if not low:
            return
        known = [each for each in inputs if self.contents(each) is not None]
        before = [each for each in known if self.contents(each) in LOW_DTYPES]
        origin = next(filter(None, map(self._found, before)), None)
        if origin is None and len(before) < len(known):
            place = f" of {call.module}" if call.module else ""
            origin = f"in {call.op}{place} ({located(call.location)})"
        if origin is None:
            return  # all inputs were low before the first observed call
        for each in low:
            self._origins[each] = origin
            self._storages[each.untyped_storage()] = origin
            if (node := node_of(each)) is not None:
                node.metadata[_KEY] = origin

    def _found(self, tensor: Tensor) -> str | None:
        found = self._origins.get(tensor) or _of_graph(tensor)
        return found or self._storages.get(tensor.untyped_storage())

    def origin(self, tensor: Tensor) -> str:
        """Returns the call that made these contents low: ``"in linear of mlp.up (train.py:40)"``.

        ``"before the first observed call"`` for parameters and for inputs of the program. Without gradients, a
        copy of a result can't be told from an input.
        """
        if found := self._found(tensor):
            return found
        is_known = tensor.requires_grad or isinstance(tensor, nn.Parameter)
        return "before the first observed call" + ("" if is_known else ", or before a copy")


def _of_graph(tensor: Tensor) -> str | None:
    """Returns the origin of the last observed result that ``tensor`` is a view or a copy of."""
    node = node_of(tensor)
    for _ in range(32):  # views and copies until the next observed call
        if node is None or (origin := node.metadata.get(_KEY)) is not None:
            return None if node is None else origin
        parents = [parent for parent, _ in edges_of(node) if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    return None
