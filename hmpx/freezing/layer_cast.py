"""LayerCast: weights are stored in 16 bits, and upcast to float32 where a module reads them.

A module gets a subclass of its class, whose parameters are properties. So its state dict, its hooks and modules
that share a parameter work as before, and an error in the forward leaves nothing behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..tensors import CAST, LOW_DTYPES

#: Is set in the classes made here.
_MARK: Final = "_hmpx_layer_cast"


def is_layer_cast(module: nn.Module) -> bool:
    """Whether a module's parameters are upcast where it reads them."""
    return hasattr(type(module), _MARK)


def upcast_parameters(module: nn.Module) -> Callable[[], None]:
    """Upcasts a module's low-precision parameters where it reads them; returns the undo."""
    own = type(module)
    made = _class_of(own, frozenset(module._parameters))  # type: ignore[arg-type]
    module.__class__ = made

    def undo() -> None:
        if type(module) is made:
            module.__class__ = own

    return undo


@functools.cache
def _class_of(own: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    members: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        _MARK: True,
        **{name: property(functools.partial(_read, name)) for name in names},
    }
    if issubclass(own, nn.RNNBase):  # which keeps its parameters in a list, too
        members["_flat_weights"] = property(_read_list, _set_list)
    if issubclass(own, nn.Embedding) and own.forward is nn.Embedding.forward:
        members["forward"] = _embed
    return type(own.__name__, (own,), members)


def _upcast(tensor: Any) -> Any:
    is_low = isinstance(tensor, Tensor) and tensor.dtype in LOW_DTYPES
    return CAST[torch.float32](tensor) if is_low else tensor


def _read(name: str, module: nn.Module) -> Any:
    if name not in module._parameters:  # deleted; nn.Module's error follows
        raise AttributeError(name)
    return _upcast(module._parameters[name])


def _read_list(module: nn.Module) -> list[Any]:
    return [_upcast(each) for each in vars(module)["_flat_weights"]]


def _set_list(module: nn.Module, weights: list[Any]) -> None:
    vars(module)["_flat_weights"] = weights


def _embed(module: nn.Embedding, input: Tensor) -> Any:
    """The forward of embeddings: upcasts the rows that it selects, not the table."""
    if module.max_norm is not None:
        return nn.Embedding.forward(module, input)
    weight = module._parameters["weight"]
    assert weight is not None
    options = module.padding_idx, None, 2.0, module.scale_grad_by_freq, module.sparse
    return _upcast(nn.functional.embedding(input, weight, *options))
