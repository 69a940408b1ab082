"""The contents of weights once they are stored low."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .. import torch_state
from ..errors import FreezeError
from ..number_formats import encode, quantize
from ..policy import LowType
from ..tensors import chunk_of
from ..torch_internals import FakeTensor
from .judging import Rounding
from .weight_uses import FoundTensor, Place


def low_copies(
    lows: Iterable[FoundTensor], dtypes: Mapping[str, LowType], rounding: Rounding | None
) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor to be stored low, with its new contents; one copy per place.

    Tensors that lie in one chunk of memory still do so afterwards, as cuDNN requires of RNN weights.
    """
    lows = list(lows)
    by_storage: dict[object, dict[Place, FoundTensor]] = {}
    for f in lows:
        if f.place is not None:
            key = f.place.storage, dtypes[f.name], f.tensor.is_inference()
            by_storage.setdefault(key, {}).setdefault(f.place, f)
    copies: dict[Place | None, Tensor] = {}
    with torch.no_grad(), torch_state.without_casts():
        for group in by_storage.values():
            first = next(iter(group.values()))
            values, low = [f.tensor.detach() for f in group.values()], dtypes[first.name]
            with torch.inference_mode(first.tensor.is_inference()):
                chunk = chunk_of(values) if isinstance(low, torch.dtype) else None
                if chunk is not None and isinstance(low, torch.dtype):
                    stored = chunk.parts(chunk.elements(values[0]).to(low))
                else:
                    stored = [_low_copy(each, low, rounding) for each in values]
            copies.update(zip(group, stored, strict=True))
    return [(f.tensor, copies[f.place]) for f in lows]


def check_values_last(
    model: nn.Module,
    lows: Iterable[FoundTensor],
    low_copies: Iterable[tuple[Tensor, Tensor]],
    keep_fp32: bool,
) -> None:
    """Checks that no values are lost, and that there are values to keep for `Frozen.undo`.

    Raises:
        FreezeError: Some would be lost, or there are none.
    """
    for f, (tensor, low) in zip(lows, low_copies, strict=True):
        if isinstance(low, FakeTensor) and not isinstance(tensor, FakeTensor):
            raise FreezeError(
                f"{f.name!r} in {type(model).__name__} has values, which would be lost under the "
                "FakeTensorMode that is on; freeze the model outside of it, or make the model inside"
            )
        if keep_fp32 and tensor.is_meta:
            raise FreezeError(
                f"{f.name!r} in {type(model).__name__} is on the meta device, which holds no values to "
                "keep for undo(); pass keep_fp32=False, or make the model under FakeTensorMode"
            )


def flatten_rnns(modules: Iterable[nn.Module]) -> None:
    """Makes RNNs lay out their weights as cuDNN, where it is used, requires for their present dtype."""
    with torch.no_grad(), torch_state.without_casts():
        for module in modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def _low_copy(values: Tensor, low: LowType, rounding: Rounding | None) -> Tensor:
    """Returns the values in the dtype, or as the codes of the format."""
    if isinstance(low, torch.dtype):
        return values.to(low)
    assert rounding is not None
    codes = encode(quantize(values, low, rounding.mode, rounding.overflow), low)
    assert isinstance(codes, Tensor)
    return codes
