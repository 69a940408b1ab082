"""LayerCast: weights are stored in 16 bits, and upcast to float32 where a module reads them.

A module gets a subclass of its class, whose parameters are properties. So its state dict, its hooks and modules
that share a parameter work as before, and an error in the forward leaves nothing behind. `parameters()` gives
what reading the attributes gives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..tensors import CAST, LOW_DTYPES, stored_parameters

#: In the classes made here: the class from which each was made.
_MARK: Final = "_hmpx_layer_cast"


def is_layer_cast(module: nn.Module) -> bool:
    """Whether a module's parameters are upcast where it reads them."""
    return hasattr(type(module), _MARK)


def upcast_parameters(module: nn.Module) -> None:
    """Upcasts a module's low-precision parameters where it reads them."""
    module.__class__ = _class_of(type(module), frozenset(module._parameters))  # type: ignore[arg-type]


def restore_class(module: nn.Module) -> None:
    """Ends `upcast_parameters`."""
    module.__class__ = vars(type(module)).get(_MARK, type(module))


@functools.cache
def _class_of(own: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    members: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        _MARK: own,
        "named_parameters": lambda *args, **kwargs: _named(own, *args, **kwargs),
        "requires_grad_": _require_grad,
        "zero_grad": _drop_grad,
        **{name: property(functools.partial(_read, name)) for name in names},
    }
    if issubclass(own, nn.RNNBase):  # which keeps its parameters in a list, too
        members["_flat_weights"] = property(_read_list, _store_list)
        members["_update_flat_weights"] = _keep_list
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


def _named(
    own: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Any]]:
    """As `named_parameters` of the class ``own``, upcast.

    With ``remove_duplicate=False``, which torch.export and torch.func use to manage a model's state, not upcast.
    """
    is_stored = kwargs.get("remove_duplicate") is False
    for name, parameter in own.named_parameters(module, *args, **kwargs):
        yield name, parameter if is_stored else _upcast(parameter)


def _require_grad(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    for parameter in stored_parameters(module):
        parameter.requires_grad_(requires_grad)
    return module


def _drop_grad(module: nn.Module, set_to_none: bool = True) -> None:
    for parameter in stored_parameters(module):
        parameter.grad = None


def _read_list(module: nn.RNNBase) -> list[Any]:
    return [_upcast(getattr(module, name, None)) for name in module._flat_weights_names]


def _store_list(module: nn.RNNBase, weights: list[Any]) -> None:
    """Keeps the stored parameters rather than ``weights``, which are what reading them gave."""
    stored = module._parameters
    vars(module)["_flat_weights"] = [
        stored[name] if name in stored else getattr(module, name, None)
        for name in module._flat_weights_names
    ]


def _keep_list(module: nn.RNNBase) -> None:
    """Nothing to update: the list is made each time that it is read."""


def _embed(module: nn.Embedding, input: Tensor) -> Any:
    """The forward of embeddings: upcasts the rows that it selects, not the table."""
    if module.max_norm is not None:
        return nn.Embedding.forward(module, input)
    weight = module._parameters["weight"]
    assert weight is not None
    options = module.padding_idx, None, 2.0, module.scale_grad_by_freq, module.sparse
    return _upcast(nn.functional.embedding(input, weight, *options))
