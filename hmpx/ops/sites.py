"""The places of torch's ops: namespaces, the slots in them, Python's operators; facts that torch lacks, of ``ops.ini``."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional

from ..files import read_sections
from ..torch_internals import NN, NN_NAMESPACE, VF, VF_NAMESPACE, torch_version


def facts(section: str) -> Mapping[str, tuple[str, ...]]:
    """Returns one section of ``ops.ini``: op (or alias, or site) -> the words of its value."""
    return _all_facts()[section]


def draws(op: str) -> bool:
    """Whether an op draws random numbers, itself or in ops that its code calls."""
    return op in facts("random") or op in facts("random_inside")


@functools.cache
def renamings(section: str) -> Mapping[str, str]:
    """Returns a section of ``ops.ini`` that maps each name to one other name."""
    return types.MappingProxyType({name: words[0] for name, words in facts(section).items()})


@functools.cache
def _all_facts() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for header, keys in read_sections(__package__, "ops.ini").items():
        section, _, ended = header.partition(" ; torch < ")
        if not ended or torch_version() < tuple(map(int, ended.split("."))):
            words = {name: tuple(value.split()) for name, value in keys.items()}
            found.setdefault(section, {}).update(words)
    return {section: types.MappingProxyType(keys) for section, keys in found.items()}


@dataclass(frozen=True)
class Product:
    """An op that multiplies its factors and sums over some of their indices."""

    names: tuple[str, ...]  # Names of the arguments that are factors
    letters: tuple[str, ...]  # For each factor, one letter per dimension, as in ``ops.ini``
    result: str  # The result's letters
    addend: str | None  # Name of the argument that is added to the product; None if there is none

    @property
    def is_convolution(self) -> bool:
        """Whether a window slides along some dimensions."""
        return "_" in self.result


@functools.cache
def product(op: str) -> Product | None:
    words = facts("products").get(op)
    if words is None:
        return None
    factors = [word.partition(":") for word in words if ":" in word]
    addends = [word[1:] for word in words if word[0] == "+"]
    results = [word for word in words if ":" not in word and word[0] != "+"]
    return Product(
        names=tuple([name for name, _, _ in factors]),
        letters=tuple([letters for _, _, letters in factors]),
        result=results[0] if results else "",
        addend=addends[0] if addends else None,
    )


#: The namespaces of ops. The order decides the meaning of a bare name: ``norm`` is ``torch.norm``,
#: not ``torch.linalg.norm``.
NAMESPACES: Mapping[str, Any] = types.MappingProxyType(
    {
        "torch": torch,
        "torch.functional": torch.functional,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
        NN_NAMESPACE: NN,
        VF_NAMESPACE: VF,
        "torch.linalg": torch.linalg,
        "torch.special": torch.special,
        "torch.fft": torch.fft,
        "torch.sparse": torch.sparse,
    }
)

#: Bare names of torch, Tensor and torch.nn.functional override theirs.
QUALIFIED_ONLY = ("torch.linalg", "torch.special", "torch.fft", "torch.sparse")

#: Prefix that users write before the dot -> namespace.
PREFIXES = {
    **{n: n for n in NAMESPACES},
    **{n.removeprefix("torch."): n for n in NAMESPACES if n != "torch"},
    "functional": "torch.nn.functional",
    "F": "torch.nn.functional",
}

RESERVED = frozenset(PREFIXES) | {prefix.partition(".")[0] for prefix in PREFIXES} | {"aten"}


class Site(NamedTuple):
    """One slot that holds a callable of an op."""

    namespace: str  # Key of `NAMESPACES`
    attribute: str  # Name of the slot in it
    in_place: bool = False  # The callable writes to its first argument
    is_python: bool = False  # The callable is implemented in Python and may call other ops
    is_property: bool = False  # The slot holds a property; the callable is its getter

    @property
    def qualified(self) -> str:
        """The dotted name: ``torch.nn.functional.linear``."""
        return f"{self.namespace}.{self.attribute}"

    @property
    def owner(self) -> Any:
        return NAMESPACES[self.namespace]

    def function(self) -> Callable[..., Any]:
        """Returns the callable that the slot holds now (for a property, its getter)."""
        return self.callable_of(getattr(self.owner, self.attribute))

    def callable_of(self, value: Any) -> Callable[..., Any]:
        """Returns the callable of the slot's content ``value`` (for a property, its getter)."""
        return value.__get__ if self.is_property else value  # type: ignore[no-any-return]


# --- operators as methods of tensors: ``__add__``, ``__radd__``, ``__iadd__`` -------------------

#: Dunder methods in Python's ``operator`` module that are not tensor arithmetic.
_NO_OPERATORS = frozenset({"contains", "index", "not", "concat", "iconcat", "call", "delitem"})


def operator_in(attribute: str) -> str | None:
    """Returns ``"add"`` for ``"__add__"``, ``"rsub"`` for ``"__rsub__"``; None for other names."""
    if not (attribute.startswith("__") and attribute.endswith("__")):
        return None
    name = attribute[2:-2]
    return name if plain_operator(name) is not None else None


def plain_operator(name: str) -> str | None:
    """Returns the plain operator of ``name``: ``"sub"`` for ``"rsub"``, ``"isub"``, ``"sub"``."""
    for base in (name, name[1:] if name[:1] in ("r", "i") else ""):
        is_operator = f"__{base}__" in vars(operator) and base not in _NO_OPERATORS
        if base and (is_operator or base == "div"):
            in_place_of = base[1:]  # operator.__iadd__ exists: its plain operator is add
            if base.startswith("i") and f"__{in_place_of}__" in vars(operator):
                return in_place_of
            return base
    return None


def is_in_place(attribute: str) -> bool:
    """Whether the callable of that name writes to its first argument: ``add_``, ``__iadd__``."""
    name = operator_in(attribute)
    if name is not None:
        return name == "setitem" or (name.startswith("i") and plain_operator(name) == name[1:])
    return attribute.endswith("_") and not attribute.endswith("__")
