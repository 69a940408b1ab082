"""Weights that are stored in 16 bits or as codes, and upcast to float32 where a module reads them.

The former is LayerCast. A module gets a subclass of its class, whose parameters are properties. So its state dict, its hooks and modules
that share a parameter work as before, and an error in the forward leaves nothing behind. `parameters()` gives
what reading the attributes gives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ..errors import to_the_end
from ..tensors import CAST, LOW_DTYPES, stored_parameters
from ..torch_internals import FakeTensor

if TYPE_CHECKING:
    from ..number_formats import Packing

#: In the classes made here: the class from which each was made.
_MARK: Final = "_hmpx_layer_cast"


#: In those of `upcast_parameters`.
_ALL: Final = "_hmpx_upcasts_all"


def is_layer_cast(module: nn.Module) -> bool:
    """Whether all of a module's parameters are upcast where it reads them."""
    return hasattr(type(module), _ALL)


def upcast_parameters(module: nn.Module) -> None:
    """Upcasts a module's low-precision parameters where it reads them."""
    module.__class__ = _upcasting(type(module), frozenset(module._parameters))  # type: ignore[arg-type]


def decode_parameters(module: nn.Module, packings: Mapping[str, Packing]) -> None:
    """Decodes these parameters, which are held in bytes, where the module reads them."""
    module.__class__ = _decoding(type(module), frozenset(packings.items()))  # type: ignore[arg-type]


class _AsStored:
    """In place of a `Packing`: the values are those that are stored."""

    def holds(self, tensor: Tensor) -> bool:
        return type(tensor) in {nn.Parameter, FakeTensor}

    def values(self, stored: Tensor) -> Tensor:
        return stored


_AS_STORED: Final[Any] = _AsStored()


@contextlib.contextmanager
def other_objects(model: nn.Module) -> Iterator[None]:
    """Inside of the block, parameters that modules read as attributes are other objects, of the same memory."""
    modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
    try:
        for module in modules:
            decode_parameters(module, dict.fromkeys(module._parameters, _AS_STORED))
        yield
    finally:
        to_the_end(lambda: [*map(restore_class, modules)])


def restore_class(module: nn.Module) -> None:
    """Ends `upcast_parameters` and `decode_parameters`."""
    module.__class__ = vars(type(module)).get(_MARK, type(module))


def _derived(own: type[nn.Module], members: Mapping[str, Any]) -> type[nn.Module]:
    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own,), {**named, _MARK: own, **members})


@functools.cache
def _decoding(own: type[nn.Module], packings: frozenset[tuple[str, Packing]]) -> type[nn.Module]:
    def reduced(module: nn.Module, protocol: Any) -> Any:
        found: Any = own.__reduce_ex__(module, protocol)
        return _empty, (own, packings), *found[2:]

    read = {
        name: property(functools.partial(_decode, name, *_decoder(each))) for name, each in packings
    }
    return _derived(own, {"__reduce_ex__": reduced, **read})


def _empty(own: type[nn.Module], packings: frozenset[tuple[str, Packing]]) -> nn.Module:
    """Returns a module without state, for copies and pickles."""
    made = _decoding(own, packings)  # type: ignore[arg-type]
    return made.__new__(made)


@functools.cache
def _decoder(packing: Packing) -> tuple[Packing, Callable[[Tensor], Tensor]]:
    """Returns how to decode, also in graphs: torch is patched there, and Dynamo does not know its original functions."""

    def decode(packed: Tensor) -> Tensor:
        return packing.values(packed)

    return packing, torch.compiler.allow_in_graph(decode)  # type: ignore[no-untyped-call]


def _decode(
    name: str, packing: Packing, decode: Callable[[Tensor], Tensor], module: nn.Module
) -> Any:
    found = _stored(name, module)
    if not isinstance(found, Tensor) or not packing.holds(found):
        return found
    if torch.compiler.is_compiling():
        return decode(found)
    # Ops without names for them know weights by their class.
    return nn.Parameter(packing.values(found.detach()), requires_grad=False)


@functools.cache
def _upcasting(own: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    members: dict[str, Any] = {
        _ALL: True,
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
    return _derived(own, members)


def _upcast(tensor: Any) -> Any:
    is_low = isinstance(tensor, Tensor) and tensor.dtype in LOW_DTYPES
    return CAST[torch.float32](tensor) if is_low else tensor


def _stored(name: str, module: nn.Module) -> Any:
    if name not in module._parameters:  # deleted; nn.Module's error follows
        raise AttributeError(name)
    return module._parameters[name]


def _read(name: str, module: nn.Module) -> Any:
    return _upcast(_stored(name, module))


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
