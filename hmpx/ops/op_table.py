"""The table of torch's ops: each with its names, its sites, and the op that covers it.

Everything here is read from torch (its namespaces, `torch.overrides`, its operator schemas) once, while
torch is unpatched.

Words: an *op* is what a list line names (``softmax``); a *site* is one slot that holds one of its callables
(``torch.Tensor.softmax``); a *spelling* is any way to write its name in a list.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import get_ignored_functions, get_overridable_functions

from ..errors import shown, suggestion
from ..torch_internals import NN_NAMESPACE, VF_NAMESPACE
from . import foreign
from .schemas import has_overload
from .sites import (
    NAMESPACES,
    PREFIXES,
    QUALIFIED_ONLY,
    RESERVED,
    Site,
    facts,
    is_in_place,
    operator_in,
    plain_operator,
    renamings,
)


class Op(NamedTuple):
    """One op of torch."""

    name: str  # The name in reports; list lines may use it
    # The op whose list line covers this one too (``truediv`` is covered by ``div``)
    covered_by: str | None
    sites: tuple[Site, ...]  # The slots whose patches cover every spelling of the op
    # Python functions that call one of ``sites``, so they need no patch
    followers: tuple[Site, ...]


class _Tables(NamedTuple):
    """The ops and their names."""

    ops: Mapping[str, Op]  # Op name -> op
    below: Mapping[str, list[str]]  # Op name -> the ops that its list line covers
    bare_names: Mapping[str, str]  # Bare name -> op name
    qualified_names: Mapping[str, Mapping[str, str]]  # Key of `NAMESPACES` -> attribute -> op name


def table() -> Mapping[str, Op]:
    """Returns every op of the installed torch by name."""
    return _tables().ops


def covering(name: str) -> str | None:
    """Returns the op whose list line covers op ``name`` too, if there is one."""
    op = table().get(name)
    return None if op is None else op.covered_by


def covering_among(name: str, known: Container[str]) -> str | None:
    """Returns op ``name``, or else the nearest op that covers it, that is among ``known``."""
    found: str | None = name
    while found is not None and found not in known:
        found = covering(found)
    return found


def names() -> Mapping[str, str]:
    """Returns every bare name that a list line may hold -> op name."""
    return _tables().bare_names


def resolve(name: str) -> str | None:
    """Returns the op that ``name`` means, or None.

    Accepts a bare name (``softmax``), an operator (``truediv``, ``__iadd__``), an in-place name
    (``add_``), a qualified name (``torch.nn.functional.softmax``, ``Tensor.add``, ``F.gelu``), and
    ATen's (``pow.Tensor_Scalar``, ``aten::nll_loss2d``). Any other dotted name is an op of another library
    (``torchvision.ops.nms``, ``torch.ops.mylib.scaled_add``).
    """
    found = names().get(name)
    if found is not None or name.isidentifier():
        return found
    found = _resolve_of_torch(name)
    return foreign.canonical(name, RESERVED, names()) if found is None else found


def _resolve_of_torch(name: str) -> str | None:
    bare_names = names()
    name = name.removesuffix(".__get__")
    for prefix in ("aten::", "torch.ops.aten.", "aten."):
        name = name.removeprefix(prefix)
    if name in bare_names:
        return bare_names[name]
    prefix, _, attribute = name.rpartition(".")
    if prefix == "torch.foreach":  # since torch 2.15; calls the old private names
        return bare_names.get(f"_foreach_{attribute}")
    namespace = PREFIXES.get(prefix)
    if namespace is not None:
        return _tables().qualified_names[namespace].get(attribute)
    if prefix in bare_names and has_overload(prefix, attribute):
        return bare_names[prefix]
    return None


def root(name: str) -> str:
    """Returns the op that operator ``name`` computes: ``div`` for ``rtruediv``."""
    while name not in facts("covering") and (found := covering(name)) is not None:
        name = found
    return name


@functools.cache
def covered(name: str) -> frozenset[str]:
    """Returns op ``name`` and the ops that its list line covers."""
    found, below = [name], _tables().below
    for each in found:  # grows meanwhile
        found += [more for more in below.get(each, ()) if more not in found]
    return frozenset(found)


# --- messages about unknown names ---------------------------------------------------------------


def unknown(name: str) -> str:
    return f"unknown op {shown(name)}{nearest(name, names())}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'softmax'?"`` for a misspelt name, also ``"F.sofmax"``, or a module's class."""
    known = [*known]
    bare = name.rpartition(".")[2]
    spelled = [name, bare] if bare.islower() else [bare.lower(), name, bare]
    return next(filter(None, (suggestion(each, known) for each in spelled)), "")


# --- building the table ------------------------------------------------------------------------


@functools.cache
def _tables() -> _Tables:
    aliases = renamings("aliases")
    found = [(n, a, value, _bare_name(n, a, value)) for n, a, value in _members()]
    known = {bare for *_, bare in found}
    slots: dict[str, list[Site]] = {}
    bare_names: dict[str, str] = {}
    qualified_names: dict[str, dict[str, str]] = {namespace: {} for namespace in NAMESPACES}
    for namespace, attribute, value, bare in found:
        name = aliases.get(bare, bare)
        if name not in known:  # the alias' target is absent from this torch
            name = bare
        site = Site(
            namespace,
            attribute,
            in_place=is_in_place(attribute),
            is_python=type(value) is types.FunctionType,
            is_property=type(value) in _DESCRIPTORS,
        )
        slots.setdefault(name, []).append(site)
        qualified_names[namespace][attribute] = name
        bare_names.setdefault(bare, name)
        if namespace not in QUALIFIED_ONLY:
            bare_names.setdefault(attribute, name)
    for namespace in QUALIFIED_ONLY:  # their bare names, unless taken
        for attribute, name in qualified_names[namespace].items():
            bare_names.setdefault(attribute, name)
    for bare, name in renamings("libraries").items():
        bare_names.setdefault(bare, name)
    ops: dict[str, Op] = {}
    below: dict[str, list[str]] = {}
    for name, sites in slots.items():
        # Functions in Python that end in one of the op's builtins.
        has_builtin = any([not (site.is_python or site.in_place) for site in sites])  # noqa: C419
        followers = [
            site
            for site in sites
            if site.is_python
            and has_builtin
            and not (operator_in(site.attribute) or site.qualified in facts("python_level"))
        ]
        patched = tuple([site for site in sites if site not in followers])
        above = _covering(name, sites, slots)
        ops[name] = Op(name, above, patched, tuple(followers))
        if above is not None:
            below.setdefault(above, []).append(name)
    return _Tables(types.MappingProxyType(ops), below, bare_names, qualified_names)


def _bare_name(namespace: str, attribute: str, value: Any) -> str:
    operator_name = operator_in(attribute)
    if operator_name is not None:
        return operator_name
    if namespace in QUALIFIED_ONLY:
        return str(value.__name__)  # torch.linalg.norm is the builtin linalg_norm
    if attribute.startswith("__"):
        return attribute
    stripped = attribute.rstrip("_")
    return stripped or attribute


def _covering(name: str, sites: list[Site], slots: Mapping[str, list[Site]]) -> str | None:
    """Returns the op whose line covers op ``name``: rtruediv -> truediv -> div."""
    below = renamings("covering").get(name)
    if below in slots:
        return below
    if f"__{name}__" not in [site.attribute for site in sites]:
        return None
    base = plain_operator(name)
    if base is not None and base != name and base in slots:
        return base
    covering = renamings("operators").get(base or "", base)
    return covering if covering in slots and covering != name else None


# --- the members of torch's namespaces ---------------------------------------------------------

_CALLABLES: Final = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.FunctionType,
)
_DESCRIPTORS: Final = (types.GetSetDescriptorType, property)


def _members() -> Iterator[tuple[str, str, Any]]:
    """Yields (namespace, attribute, callable or property) of everything that may be an op.

    `torch.overrides` does not list all of them; each comment names an op that needs that line.
    """
    overridable = get_overridable_functions()
    listed = {id(each) for functions in overridable.values() for each in functions}
    methods = {each.__name__.rstrip("_") for each in overridable[torch.Tensor]}
    ignored = {id(each) for each in get_ignored_functions()}
    found: set[str] = set()
    for namespace, owner in NAMESPACES.items():
        for attribute in facts("called_in_vf") if namespace == VF_NAMESPACE else dir(owner):
            value = getattr(owner, attribute, None)
            is_method, is_builtin = namespace == "torch.Tensor", type(value) is _CALLABLES[0]
            if is_method and type(value) in _DESCRIPTORS:
                yield namespace, attribute, value
            if type(value) not in _CALLABLES or attribute == "__getitem__":
                continue  # with this in its class, Python and torch.tensor treat a tensor as a sequence
            stem = attribute.rstrip("_")  # without the underscore of in-place ops
            is_known_method = is_method and stem in found  # Tensor.unflatten, Tensor._conj
            # torch.overrides ignores torch.fill, but not Tensor.fill_; Tensor._conj, but not torch._conj
            if id(value) in ignored and not (stem in methods or is_known_method):
                continue
            if (
                id(value) in listed
                or is_known_method
                or (is_builtin and stem in methods)  # torch.as_strided, torch.normal
                or (is_builtin and stem != attribute and stem in found)  # torch.dropout_
                or (namespace == VF_NAMESPACE and attribute in found)  # lstm, which torch.nn calls
                or (is_method and operator_in(attribute))  # Tensor.__add__, though listed today
                or namespace == NN_NAMESPACE  # torch._C._nn._upsample_bicubic2d_aa
                or (is_builtin and namespace == "torch.sparse")  # torch.sparse.sampled_addmm
                # torch._convolution: lists may use ATen's names; torch.segment_reduce has a private one.
                or (is_builtin and namespace == "torch" and attribute[0] == "_" != attribute[1])
                or (is_builtin and vars(torch).get(f"_{attribute}") is value)
            ):
                found.add(attribute)
                yield namespace, attribute, value
