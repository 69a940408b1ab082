"""Traits of ops derived from their sites and schemas: whether casting has an effect, and its cost."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

import torch

from ..torch_internals import NN_NAMESPACE
from . import foreign
from .op_table import covered, covering, table
from .schemas import aten_name, parameters, read_schemas
from .sites import facts, operator_in

#: The options of a new tensor.
_OF_NEW = frozenset({"dtype", "layout", "device", "pin_memory"})

#: Tensor-valued properties, patched through their getters. The other properties describe a tensor.
PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")


def is_decisive(name: str, *, is_relative: bool) -> bool:
    """Whether a list line may change calls of op ``name``: another input than the written one decides."""
    if name not in table():
        return True  # another library's
    return any(_is_decisive(each, is_relative=is_relative) for each in (name, *covered(name)))


def _is_decisive(name: str, *, is_relative: bool) -> bool:
    sites = table()[name].sites
    if is_relative:
        return any(site.is_python or parameters(site).has_several_tensors for site in sites)
    return not all(site.in_place for site in sites)


@functools.cache
def computing() -> frozenset[str]:
    """Returns the ops that ``*`` means: they compute with tensors, and no write is lost by casting."""
    return frozenset(
        name
        for name in table()
        if name[0] != "_"
        and is_castable(name)
        and not is_view(name)
        and (covering(name) is not None or _is_decisive(name, is_relative=False))
    )


@functools.cache
def carrying() -> frozenset[str]:
    """Returns the ops that carry values on, but whose types no list decides: ``copy_``, and those of lists of tensors."""
    return frozenset(name for name in table() if name == "copy" or name.startswith("_foreach_"))


def kind(name: str) -> tuple[str, int | None]:
    """Returns the kind of op ``name``, by its speed; for matrix products also the position of the first matrix."""
    words = facts("kinds").get(name)
    if words is None:
        return ("norm" if name in facts("parameters") else "elementwise"), None
    return words[0], int(words[1]) if len(words) > 1 else None


@functools.cache
def role(name: str) -> str:
    """Returns ``"loss"``, ``"norm"`` or ``"sum"`` (of two tensors), parts that accuracy depends on; else ``""``."""
    if name in facts("parameters"):
        return "norm"
    if name in {"add", "iadd", "radd"}:
        return "sum"
    sites = table()[name].sites if name in table() else ()
    return "loss" if any("reduction" in parameters(site).names for site in sites) else ""


@functools.cache
def is_castable(name: str) -> bool:
    """Whether op ``name`` takes and returns tensors, so that casts have an effect."""
    if foreign.is_foreign(name):
        return True  # as far as is known
    for site in table()[name].sites:
        if site.is_property:
            return site.attribute in PROPERTIES
        if operator_in(site.attribute) is not None:
            return True
        if site.is_python and site.namespace != "torch.Tensor":
            return True
        schemas = read_schemas(aten_name(site))
        if site.namespace == NN_NAMESPACE and not schemas:
            return site.attribute[0] != "_"
        for schema in schemas:
            tensors = sum(bool(each.kind) for each in schema.arguments)
            returns = schema.torchs.returns if tensors == 1 else ()
            if tensors > 1 or any("Tensor" in str(each.type) for each in returns):
                return True
    return False


@functools.cache
def is_view(name: str) -> bool:
    """Whether op ``name`` may return a view of its input, or just moves, copies or converts it."""
    if name in facts("views"):
        return True
    sites = table()[name].sites if name in table() else ()  # else it is of another library
    if any(s.is_property for s in sites):
        return True
    return any(map(_has_view, {aten_name(site) for site in sites if not site.in_place}))


@functools.cache
def _has_view(name: str) -> bool:
    """Whether a schema of ATen's op ``name`` computes nothing."""
    for schema in read_schemas(name):
        if schema.is_view:
            return True
        names = [each.name for each in schema.arguments]
        if schema.has_tensors and _OF_NEW.issubset(names):
            return True  # a tensor and all the options of a new one: zeros_like
        if name.endswith("_copy"):  # detach_copy, slice_copy; slice_scatter also has the tag
            packet = getattr(torch.ops.aten, name, None)
            op = getattr(packet, schema.torchs.overload_name or "default", None)
            if op is not None and torch.Tag.view_copy in op.tags:
                return True
    return False


# --- roles of inputs ---------------------------------------------------------------------------

#: Names of tensors added to attention scores, in torch's schemas and `multi_head_attention_forward`.
_MASKS: Final = frozenset({"attn_bias", "attn_mask", "key_padding_mask"})


def is_weight(name: str) -> bool:
    return name.endswith("weight")


def is_mask(name: str) -> bool:
    """Whether an argument's name is that of a tensor added to attention scores."""
    return name in _MASKS


def names_weights(names: Iterable[str]) -> bool:
    """Whether one of these names is a weight's; the other arguments are then not weights."""
    return any(map(is_weight, names))
