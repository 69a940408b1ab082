"""Which callables and properties in torch's namespaces are ops, or may be.

`torch.overrides` lists most of them, but not all; each predicate here names an op that needs it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import get_ignored_functions, get_overridable_functions

from ..torch_internals import NN_NAMESPACE, VARIABLE_FUNCTIONS, VF_NAMESPACE
from .operators import operator_in
from .sites import NAMESPACES

_CALLABLES = frozenset(
    {
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.FunctionType,
    }
)
DESCRIPTORS = frozenset({types.GetSetDescriptorType, property})


class _Member(NamedTuple):
    """Something in a namespace that can be called.

    Attributes:
        namespace: Key of `NAMESPACES`.
        attribute: Its name there.
        value: The callable.
    """

    namespace: str
    attribute: str
    value: Any

    @property
    def stem(self) -> str:
        """The name without the underscore of in-place ops."""
        return self.attribute.rstrip("_")

    @property
    def is_builtin(self) -> bool:
        """Whether it is a function implemented in C++."""
        return type(self.value) is types.BuiltinFunctionType

    @property
    def is_method(self) -> bool:
        """Whether it is a method of `torch.Tensor`."""
        return self.namespace == "torch.Tensor"


class _Search:
    """Decides which members are ops; some are known by ops that were found before them."""

    def __init__(self) -> None:
        overridable = get_overridable_functions()
        self._overridable = {id(each) for functions in overridable.values() for each in functions}
        self._methods = {each.__name__.rstrip("_") for each in overridable[torch.Tensor]}
        self._ignored = {id(each) for each in get_ignored_functions()}
        self._found: set[str] = set()

    def takes(self, member: _Member) -> bool:
        """Whether ``member`` is an op; if so, it counts as found from now on."""
        if id(member.value) in self._ignored and not self._is_ignored_by_mistake(member):
            return False
        is_op = (
            id(member.value) in self._overridable
            or self._is_function_of_method(member)
            or self._is_method_of_function(member)
            or self._is_in_place_function(member)
            or self._is_copy_for_vf(member)
            or _is_operator(member)
            or _is_of_nn(member)
            or _is_sparse_builtin(member)
            or _is_private_builtin(member)
        )
        if is_op:
            self._found.add(member.attribute)
        return is_op

    def _is_ignored_by_mistake(self, member: _Member) -> bool:
        # torch.overrides ignores torch.fill, but not Tensor.fill_; Tensor._conj, but not torch._conj
        return member.stem in self._methods or self._is_method_of_function(member)

    def _is_function_of_method(self, member: _Member) -> bool:
        return member.is_builtin and member.stem in self._methods  # torch.as_strided, torch.normal

    def _is_method_of_function(self, member: _Member) -> bool:
        return member.is_method and member.stem in self._found  # Tensor.unflatten, Tensor._conj

    def _is_in_place_function(self, member: _Member) -> bool:
        is_in_place = member.stem != member.attribute
        return member.is_builtin and is_in_place and member.stem in self._found  # torch.dropout_

    def _is_copy_for_vf(self, member: _Member) -> bool:
        is_vf = member.namespace == VF_NAMESPACE
        return is_vf and member.attribute in self._found  # torch._VF.lstm, which torch.nn calls


def _is_operator(member: _Member) -> bool:
    # Tensor.__add__, though torch.overrides lists all operators today
    return member.is_method and operator_in(member.attribute) is not None


def _is_of_nn(member: _Member) -> bool:
    return member.namespace == NN_NAMESPACE  # torch._C._nn._upsample_bicubic2d_aa


def _is_sparse_builtin(member: _Member) -> bool:
    return member.is_builtin and member.namespace == "torch.sparse"  # torch.sparse.sampled_addmm


def _is_private_builtin(member: _Member) -> bool:
    # torch._convolution: lists may hold ATen's own names, too; torch.segment_reduce has a private name
    name = member.attribute
    is_private = name[0] == "_" != name[1] or getattr(torch, f"_{name}", None) is member.value
    return member.is_builtin and member.namespace == "torch" and is_private


def members() -> Iterator[tuple[str, str, Any]]:
    """Yields (namespace, attribute, callable or property) of everything that may be an op."""
    search = _Search()
    for namespace, owner in NAMESPACES.items():
        source = VARIABLE_FUNCTIONS if namespace == VF_NAMESPACE else owner
        for attribute in dir(source):
            member = _Member(namespace, attribute, getattr(source, attribute, None))
            kind = type(member.value)
            is_property = kind in DESCRIPTORS and member.is_method
            if is_property or (kind in _CALLABLES and search.takes(member)):
                yield member
