"""The dtypes that torch's kernels computed in, below torch.autocast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..tensors import floating_in
from ..torch_internals import TorchDispatchMode

_aten: Final = torch.ops.aten

#: Kernels that move values.
_MOVES: Final = frozenset(
    {
        _aten._to_copy, _aten.clone, _aten.copy_, _aten.cat, _aten.stack, _aten.detach, _aten.index,
        _aten.index_select, _aten.gather, _aten.fill_, _aten.zero_, _aten.constant_pad_nd,
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_empty,
        _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten._local_scalar_dense, _aten.lift_fresh,
    }
)  # fmt: skip


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Collects the dtypes of the floating inputs of kernels that compute."""

    def __init__(self) -> None:
        """Starts empty."""
        super().__init__()
        self._dtypes: dict[torch.dtype, None] = {}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes so far, in the order in which they were first seen."""
        return tuple(self._dtypes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and func.overloadpacket not in _MOVES:
            given = floating_in([*args, *kwargs.values()])
            self._dtypes.update(dict.fromkeys([each.dtype for each in given]))
        return func(*args, **kwargs)
