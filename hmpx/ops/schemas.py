"""ATen's schemas of the callables at ops' sites, and what they declare."""

from __future__ import annotations

import functools
from typing import Any

from ..torch_internals import has_kernel, schemas_of
from .known_facts import renamings
from .operators import operator_in, plain_operator
from .sites import QUALIFIED_ONLY, Site

#: Other names of sparse products, which ATen does not have.
_SPARSE_ALIASES = frozenset({"dsmm", "hsmm", "saddmm", "spmm"})


def aten_name(site: Site) -> str:
    """Returns the name under which ATen knows the callable at ``site``, if it does."""
    operator_name = operator_in(site.attribute)
    if operator_name is not None:
        base = plain_operator(operator_name) or operator_name
        return renamings("operators").get(base, base) + ("_" if site.in_place else "")
    name = site.attribute
    if site.namespace in QUALIFIED_ONLY:
        name = f"{site.namespace.removeprefix('torch.')}_{name}"
        if site.namespace == "torch.sparse" and not schemas_named(name):
            return f"_{name}"  # torch.sparse.mm is _sparse_mm
    elif name in _SPARSE_ALIASES:
        return renamings("aliases")[name]
    return name


def schemas(site: Site) -> tuple[Any, ...]:
    """Returns the ATen schemas of the callable at ``site``; () if it has none."""
    return schemas_named(aten_name(site))


@functools.cache
def schemas_named(name: str) -> tuple[Any, ...]:
    """Returns the schemas of ATen's op ``name``; () if there is none."""
    return tuple(schemas_of(f"aten::{name}"))


def takes_tensor(schema: Any) -> bool:
    """Whether any argument is a tensor, or holds tensors."""
    return any(map(holds_tensor, schema.arguments))


def holds_tensor(argument: Any) -> bool:
    """Whether an argument is a tensor, or holds tensors."""
    return "Tensor" in str(argument.type)


def argument_letter(argument: Any, written: str | None = None) -> str:
    """Returns the letter of `Parameters.kinds` for an argument; ``""`` if it holds no tensor to cast.

    Args:
        argument: Of a schema.
        written: Its type as text, if that is known.
    """
    written = str(argument.type) if written is None else written
    if "Tensor" not in written or argument.is_out:
        return ""
    return {"Tensor": "T", "Optional[Tensor]": "O"}.get(written, "A")


def has_overload(base: str, overload: str) -> bool:
    """Whether ATen's op ``base`` has that overload, or may have had it in another version of torch."""
    found = schemas_of(f"aten::{base}")
    # `.default` is the overload without a name; `.deprecated` and older ones may be gone.
    return not found or overload in {"default", "deprecated", *(s.overload_name for s in found)}


@functools.cache
def declared_written(name: str) -> frozenset[str]:
    """Returns the tensor arguments, ``out`` aside, that a schema of ATen's op declares written to."""
    return frozenset(
        argument.name
        for schema in schemas_named(name)
        for argument in schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.is_out
        and "Tensor" in str(argument.type)
        and _is_dispatched(schema)
    )


def _is_dispatched(schema: Any) -> bool:
    """Whether the schema is of a kernel, rather than of TorchScript's own (``sort`` of a list)."""
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return has_kernel(schema.name + overload)
