"""The dtypes that torch's kernels computed in, below torch.autocast."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..tensors import floating_in, promoted
from ..torch_internals import DispatchMode, call_in

#: Kernels that move values or call other kernels, and whose schemas don't tell so.
_MOVES: Final = frozenset(
    {
        "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "fill_", "flip", "gather", "index",
        "index_select", "repeat", "roll", "stack", "zero_",
    }
)  # fmt: skip

#: Options of kernels that make a new tensor, from another's shape or values.
_OF_NEW: Final = frozenset({"dtype", "layout", "device"})


@functools.cache
def _is_computing(kernel: Any) -> bool:
    """Whether a kernel computes, rather than makes a tensor, a view, a copy or a Python number.

    Not a higher-order operator, such as `torch.cond`, which takes functions.
    """
    schema = getattr(kernel, "_schema", None)
    return schema is not None and not (
        kernel.is_view
        or torch.Tag.view_copy in kernel.tags
        or kernel.overloadpacket.__name__ in _MOVES
        or {each.name for each in schema.arguments} >= _OF_NEW
        or not any("Tensor" in str(each.type) for each in schema.returns)
    )


class Kernels(DispatchMode):
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
        if _is_computing(func):
            given = floating_in([*args, *kwargs.values()])
            dtypes = [each.dtype for each in given]
            if torch.Tag.pointwise in func.tags and dtypes:  # they convert inputs to one dtype
                deciding = [each.dtype for each in given if each.dim()] or dtypes
                dtypes = [promoted(deciding)]
            self._dtypes.update(dict.fromkeys(dtypes))
        return call_in(self, func, args, kwargs)
