"""What numpy gets for bfloat16 tensors while torch is converted: their values in float32.

numpy has no bfloat16, and programs that run in fp32 pass it the results of any op. Owns the patches of
`Tensor.numpy`, which ``Tensor.__array__`` and ``numpy.asarray`` use, and of ``numpy.from_dlpack``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import torch_state
from ..compute import widen
from ..patching import Draft, Patch


def numpy_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches that give numpy float32 copies of bfloat16 tensors instead of views."""
    yield Patch(Tensor, "numpy", _method(draft.attribute(Tensor, "numpy")))
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "from_dlpack"):
        yield Patch(numpy, "from_dlpack", _from_dlpack(draft.attribute(numpy, "from_dlpack")))


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(self):
            return handle_torch_function(numpy, (self,), self, *args, **kwargs)
        return original(_known_to_numpy(self), *args, **kwargs)

    return _named_after(original, numpy)


def _from_dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_dlpack(x: Any, /, **kwargs: Any) -> Any:
        return original(_known_to_numpy(x) if isinstance(x, Tensor) else x, **kwargs)

    return _named_after(original, from_dlpack)


def _known_to_numpy(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, or its values in float32 if it is bfloat16 and torch is converted."""
    if tensor.dtype is torch.bfloat16 and torch_state.in_force() is not None:
        return widen(tensor)
    return tensor


def _named_after(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__qualname__ = getattr(original, "__qualname__", function.__name__)
    function.__doc__ = original.__doc__
    return function
