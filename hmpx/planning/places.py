"""The place of a plan: fake tensors of a device that may be absent, or real ones.

Fake tensors are corrected where they differ from the device: `_Corrections` works below autograd; `_stand_ins`
are torch functions as an accelerator computes them.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch_internals
from ..errors import PlanError, raised_here, said_by
from ..patching import Patch, apply, undo, unpatched
from ..tensors import ELIGIBLE, LOW_DTYPES, is_present, stored_parameters
from ..torch_internals import DispatchMode, FakeTensor, disable_modes, has_fake_tensors
from ..torch_state import reached_by


class PlannedDevice:
    """The place of a plan's tensors."""

    def __init__(self, device_type: str, *, is_small: bool) -> None:
        self.device_type = "cpu" if is_small else device_type
        self.is_small = is_small  # Tensors are real
        self.given: list[Tensor] = []  # that a given model holds
        self._is_absent = self.device_type != "cpu" and not is_present(self.device_type)
        self._device = torch.device("cpu")
        if self.device_type != "cpu":
            self._device = (
                torch_internals.HERE if self._is_absent else torch.device(self.device_type, 0)
            )
        self._corrections = _Corrections()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts tensors made in the block in this place."""
        with contextlib.ExitStack() as stack:
            if self._is_absent:  # fake tensors on the CPU replace those of the device
                stack.enter_context(torch_internals.standing_in(self.device_type))
                stack.callback(undo, apply(_stand_ins(self.device_type)))
            if not self.is_small:
                stack.enter_context(torch_internals.quiet())
                stack.enter_context(torch_internals.replacing_parameters())
                stack.enter_context(torch_internals.planning())
                stack.enter_context(torch_internals.fake_mode())
                stack.enter_context(self._corrections)
            yield

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Puts new tensors on the device, without values."""
        with torch.device(self.device_type), self.without_values():
            yield

    @contextlib.contextmanager
    def without_values(self) -> Iterator[None]:
        """Makes up values that are requested."""
        self._corrections.answers = True
        try:
            yield
        finally:
            self._corrections.answers = False

    # --- moving tensors ----------------------------------------------------------------------------

    def model(self, model: nn.Module) -> nn.Module:
        """Returns a model with its own and given tensors in this place: itself if they are, else a copy."""
        if self.is_small:
            return model
        own = [*stored_parameters(model), *model.buffers()]
        if all(self.placed(each) is each for each in own):
            return model
        memo: dict[int, Any] = {id(each): each for each in reached_by(model).generators}
        for tensor in (*own, *self.given):
            placed = self.placed(tensor)
            if placed is not tensor and isinstance(tensor, nn.Parameter):
                placed = nn.Parameter(placed.detach(), requires_grad=tensor.requires_grad)
            if placed is not tensor:
                memo[id(tensor)] = placed
        try:
            return copy.deepcopy(model, memo)
        except raised_here(Exception) as error:  # of the model's own attributes
            raise PlanError(
                f"{type(model).__name__} has weights of its own, and can't be copied without them: "
                f"{said_by(error)}; give a function that builds it: hmpx.plan(lambda: Model(), ...)"
            ) from error

    def placed(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like another one in this place, itself if it is there; with its values, if they are known."""
        if self.is_small:
            return tensor
        is_placed = isinstance(tensor, FakeTensor) and tensor.device.type == self.device_type
        if is_placed or tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        with torch.no_grad():
            found = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )
        known = self._corrections.values
        values = known.of(tensor) if isinstance(tensor, FakeTensor) else tensor
        if values is not None:
            known.keep(found, values)
        return found.requires_grad_(tensor.requires_grad)


# --- corrections ------------------------------------------------------------------------------------

_ATEN: Final = torch.ops.aten

#: Norms -> the position of the weight, whose dtype decides that of statistics if the input's differs.
_NORMS: Final = {
    _ATEN.native_layer_norm.default: 2,
    _ATEN.native_group_norm.default: 1,
    _ATEN.native_batch_norm.default: 1,
    torch_internals.BATCH_NORM_OP: 1,
    _ATEN.cudnn_batch_norm.default: 1,
}


class _Corrections(DispatchMode):
    """Corrects the results of fake tensors' kernels."""

    def __init__(self) -> None:
        super().__init__()
        # Whether to make up requested values (False, 1, 0.5): where they don't affect sizes, as in
        # initial values of parameters, and in optimizer steps.
        self.answers = False
        self.values = _Values()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch_internals.VALUE_OP:
            if (known := self.values.of(args[0])) is not None:
                with disable_modes():
                    return known.item()
            if self.answers:
                dtype = args[0].dtype
                return False if dtype is torch.bool else 0.5 if dtype.is_floating_point else 1
        result = func(*args, **(kwargs or {}))
        self.values.follow(func, args, kwargs or {}, result)
        position = _NORMS.get(func, len(args))
        weight = args[position] if position < len(args) else None
        if weight is not None and weight.dtype is not args[0].dtype:
            first, *statistics = result  # which are never viewed
            return first, *[
                torch.empty_like(each, dtype=weight.dtype)
                if each.dtype in ELIGIBLE and each.numel()
                else each
                for each in statistics
            ]
        return result


# --- values ---------------------------------------------------------------------------------------

_WHOLE: Final = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64})

#: Larger tensors have no known values, which would take time and memory.
_MOST: Final = 1 << 20


class _Unknown(Exception):  # noqa: N818  # nobody's mistake
    """A tensor has no values."""


class _Values:
    """Values of integer and bool fake tensors, which have none themselves: positions, masks, token ids.

    Programs branch on them: whether a mask is all ones, or positions start again. Calls on such tensors alone
    are computed for real; floating-point tensors have no values.
    """

    def __init__(self) -> None:
        # Memory -> view of it -> values: autograd makes new tensors of the same view.
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, Tensor | None]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns a real tensor with the values of a fake one; None if unknown."""
        return self._known.get(torch_internals.storage_of(tensor), {}).get(_view(tensor))

    def keep(self, tensor: Tensor, values: Tensor) -> None:
        """Stores the values of a tensor made from a real one."""
        if values.dtype in _WHOLE and values.numel() <= _MOST and not values.is_meta:
            self._note(tensor, values.detach().cpu().clone())

    def _note(self, tensor: Tensor, values: Tensor | None) -> None:
        self._known.setdefault(torch_internals.storage_of(tensor), {})[_view(tensor)] = values

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Computes a call's values, if its result and all its inputs may have any."""
        if not isinstance(result, Tensor) or result.dtype not in _WHOLE or result.numel() > _MOST:
            return
        try:
            real_args = self._real(args)
            real_kwargs = {name: self._real(each) for name, each in kwargs.items()}
            if "device" in real_kwargs:
                real_kwargs["device"] = torch.device("cpu")
            with disable_modes(), torch.no_grad():
                values = func(*real_args, **real_kwargs)
        except raised_here(_Unknown, RuntimeError, TypeError, ValueError):
            values = None
        is_whole = isinstance(values, Tensor) and values.shape == result.shape
        self._note(result, values if is_whole else None)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            found = self.of(value)
            if found is None:
                raise _Unknown
            return found
        if isinstance(value, (list, tuple)):
            return type(value)([self._real(each) for each in value])
        return value


def _view(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


# --- stand-ins -----------------------------------------------------------------------------------


def _stand_ins(device_type: str) -> list[Patch]:
    """Returns patches for an absent device type, which fake tensors on the CPU replace."""
    to, cuda = Tensor.to, Tensor.cuda

    def placing(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors():
            args = tuple([torch_internals.here(each, device_type) for each in args])
            kwargs = {
                name: torch_internals.here(each, device_type) for name, each in kwargs.items()
            }
        return to(self, *args, **kwargs)

    def moving(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors() and device_type == "cuda":
            return self.to(torch_internals.HERE)
        return cuda(self, *args, **kwargs)

    return [
        Patch(Tensor, "to", placing),
        Patch(Tensor, "cuda", moving),
        Patch(torch_internals.VF, "dropout", _dropout),
        Patch(torch_internals.NN, "scaled_dot_product_attention", _attention),
        Patch(F, "scaled_dot_product_attention", _attention),
    ]


_plain_dropout, _plain_attention = unpatched(torch.dropout, F.scaled_dot_product_attention)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Keeps a mask of bools, like accelerators; the CPU keeps one in the input's dtype."""
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
    """Computes attention by CUDA's fused kernels: flash attention, or with a mask the other one."""
    is_usual = query.dim() == key.dim() == value.dim() == 4 and query.dtype in ELIGIBLE
    is_usual = is_usual and torch_internals.FLASH_ATTENTION is not None
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
        result = torch_internals.FLASH_ATTENTION(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    else:
        if key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        result = torch_internals.MASKED_ATTENTION(
            query, key, value, bias, learns, dropout_p, is_causal, scale=scale
        )[0]
    return result[..., :width] if missing else result  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the term added to scores, in the query's dtype, for all heads: a view."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    columns = mask.shape[-1]
    if columns % 8:  # rows are aligned
        mask = F.pad(mask, (0, -columns % 8))[..., :columns]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _stands_in(tensor: Tensor) -> bool:
    return has_fake_tensors() and tensor.device.type != "cpu"
