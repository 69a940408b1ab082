"""What fake tensors get wrong, or leave to a device that is not there: dtypes, values, kernels.

`Corrections` stands below autograd; `stand_ins` are functions of torch's as an accelerator computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..patching import Patch, unpatched
from ..tensors import ELIGIBLE, LOW_DTYPES
from ..torch_internals import (
    BATCH_NORM_OP,
    FLASH_ATTENTION,
    HERE,
    MASKED_ATTENTION,
    NN,
    VALUE_OP,
    VF,
    TorchDispatchMode,
    disable_modes,
    has_fake_tensors,
    here,
)
from .values import Values

_ATEN: Final = torch.ops.aten

#: Norms -> the position of the weight, whose dtype statistics have where the input's is another.
_NORMS: Final = {
    _ATEN.native_layer_norm.default: 2,
    _ATEN.native_group_norm.default: 1,
    _ATEN.native_batch_norm.default: 1,
    BATCH_NORM_OP: 1,
    _ATEN.cudnn_batch_norm.default: 1,
}


class Corrections(TorchDispatchMode):  # type: ignore[misc]
    """Corrects what fake tensors' kernels return.

    Attributes:
        values: Those of whole numbers, as far as they are known.
        answers: Whether a value is made up where one is asked for: False, 1, 0.5. It is where values
            change nothing about sizes: when parameters get their first values, and in steps of optimizers.
    """

    def __init__(self) -> None:
        """Makes up no values."""
        super().__init__()
        self.answers = False
        self.values = Values()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is VALUE_OP and (known := self.values.of(args[0])) is not None:
            with disable_modes():
                return known.item()
        if func is VALUE_OP and self.answers:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.5 if dtype.is_floating_point else 1
        result = func(*args, **kwargs) if kwargs else func(*args)
        self.values.follow(func, args, kwargs or {}, result)
        position = _NORMS.get(func)
        if position is not None:
            weight = args[position] if len(args) > position else None
            if weight is not None and weight.dtype is not args[0].dtype:
                first, *statistics = result
                return (first, *(_as(each, weight.dtype) for each in statistics))
        return result


def _as(statistic: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor like a norm's statistic, which no view is ever taken of, in another dtype."""
    if statistic.dtype not in ELIGIBLE or not statistic.numel():
        return statistic
    return torch.empty_like(statistic, dtype=dtype)


# --- stand-ins -----------------------------------------------------------------------------------


def stand_ins(device_type: str) -> list[Patch]:
    """Returns patches for a device type that is not there, in whose place fake tensors are on the CPU."""
    return [
        Patch(Tensor, "to", _placing(Tensor.to, device_type)),
        Patch(Tensor, "cuda", _moving(Tensor.cuda, device_type)),
        Patch(VF, "dropout", _dropout),
        Patch(NN, "scaled_dot_product_attention", _attention),
        Patch(F, "scaled_dot_product_attention", _attention),
    ]


def _placing(to: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def placing(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors():
            args = tuple([_placed(each, device_type) for each in args])
            kwargs = {name: _placed(each, device_type) for name, each in kwargs.items()}
        return to(self, *args, **kwargs)

    return placing


def _placed(value: Any, device_type: str) -> Any:
    return value if isinstance(value, Tensor) else here(value, device_type)


def _moving(cuda: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def moving(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors() and device_type == "cuda":
            return self.to(HERE)
        return cuda(self, *args, **kwargs)

    return moving


_plain_dropout, _plain_attention = unpatched(torch.dropout, F.scaled_dot_product_attention)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Keeps a mask of bools, as accelerators do: the CPU keeps one of the input's dtype."""
    if not (_stands_in(input) and train and 0 < p < 1 and input.numel()):
        return _plain_dropout(input, p, train)
    return _ATEN.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


def _attention(  # noqa: PLR0917  # torch's own
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Is computed by the fused kernels that CUDA has: flash attention, or where there is a mask the other.

    Args:
        query: [..., heads, length, width], and so on: as torch has it.
        key: [..., key heads, key length, width].
        value: [..., key heads, key length, width].
        attn_mask: As torch has it, like all that follow.
        dropout_p: The share that is dropped.
        is_causal: Whether later keys are masked.
        scale: What scores are multiplied by.
        enable_gqa: Whether there may be fewer keys than queries.
    """
    is_usual = query.dim() == key.dim() == value.dim() == 4 and query.dtype in ELIGIBLE
    is_usual = is_usual and FLASH_ATTENTION is not None
    if not (is_usual and _stands_in(query)) or query.shape[-1] != value.shape[-1]:
        return _plain_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    if attn_mask is None and query.dtype in LOW_DTYPES:
        result = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    else:
        if key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        result = MASKED_ATTENTION(
            query, key, value, bias, learns, dropout_p, is_causal, scale=scale
        )[0]
    return result[..., :width] if missing else result  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns what is added to scores, in the dtype of the query, for all heads: a view."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    columns = mask.shape[-1]
    if columns % 8:  # rows are aligned
        mask = F.pad(mask, (0, -columns % 8))[..., :columns]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _stands_in(tensor: Tensor) -> bool:
    return has_fake_tensors() and tensor.device.type != "cpu"
