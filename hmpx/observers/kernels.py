"""The dtypes that torch's kernels computed in, below torch.autocast."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ..tensors import floating_in, promoted
from ..torch_internals import DispatchMode, call_in, innermost_mode
from .faults import spared

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
    """Collects the dtypes of the floating inputs of kernels that compute.

    Attributes:
        dtypes: The dtypes so far, in the order in which they were first seen; None outside of `reading_kernels`.
    """

    def __init__(self) -> None:
        """Starts without."""
        super().__init__()
        self.dtypes: dict[torch.dtype, None] | None = None

    @spared
    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes the dtypes of a kernel's inputs."""
        if self.dtypes is not None and _is_computing(func):
            given = floating_in([*args, *kwargs.values()] if kwargs else args)
            dtypes = [each.dtype for each in given]
            if torch.Tag.pointwise in func.tags and dtypes:  # they convert inputs to one dtype
                deciding = [each.dtype for each in given if each.dim()] or dtypes
                dtypes = [promoted(deciding)]
            self.dtypes.update(dict.fromkeys(dtypes))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.note(func, args, kwargs or {})
        return call_in(self, func, args, kwargs or {})


@contextlib.contextmanager
def reading_kernels() -> Iterator[dict[torch.dtype, None]]:
    """Yields the dtypes of the block's kernels, collected by the innermost mode if that can, else by a new one."""
    known = innermost_mode()
    with contextlib.nullcontext(known) if isinstance(known, Kernels) else Kernels() as mode:
        before, mode.dtypes = mode.dtypes, {}
        try:
            yield mode.dtypes
        finally:
            mode.dtypes = None if before is None else before | mode.dtypes
