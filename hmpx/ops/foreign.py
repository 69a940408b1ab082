"""Ops of other libraries, by dotted name: ``torchvision.ops.nms``, ``torch.ops.mylib.scaled_add``.

Checks names, and looks them up in loaded modules. Never imports anything or runs a library's code: it reads
the dicts of modules and classes.
"""

from __future__ import annotations

import functools
import importlib.util
import keyword
import sys
import types
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import passing_over, shown, suggestion
from ..patching import names_of
from ..torch_internals import CustomOpDef, OpOverload, OpOverloadPacket

#: Where torch binds the operators of `torch.library`.
OPERATORS: Final = "torch.ops"

#: Libraries whose functions are not ops, or are hmpx's own.
_REFUSED: Final = frozenset({"hmpx", "builtins", "habana_frameworks"}) | sys.stdlib_module_names

#: Namespaces of torch's own operators.
_TORCHS: Final = frozenset({"aten", "prim", "prims", "_c10d_functional", "c10d", "higher_order"})

#: Callables that may take tensors, and that a function can fully replace.
_FUNCTIONS: Final = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    torch.jit.ScriptFunction,
)


@dataclass(frozen=True, slots=True)
class Found:
    """The target of a dotted name: the value in its slot, the module or class, the slot's name."""

    value: Any
    owner: Any
    attribute: str


# --- names -------------------------------------------------------------------------------------


def canonical(name: str, prefixes: Container[str], names: Container[str]) -> str | None:
    """Returns the canonical name of another library's op; None for one of torch's ``prefixes`` and ``names``."""
    namespace, separator, operator = name.partition("::")
    if separator:
        name = f"{OPERATORS}.{namespace}.{operator}"
    parts = name.split(".")
    is_plain = [p.isidentifier() and p[:2] != "__" and not keyword.iskeyword(p) for p in parts]
    if len(parts) < 2 or not all(is_plain) or parts[0] in _REFUSED:
        return None
    if parts[:2] == ["torch", "ops"]:
        if len(parts) not in (4, 5):
            return None
        # torch binds some of its operators itself, such as torch.quantized_lstm
        is_bound = isinstance(names_of(torch).get(parts[3]), OpOverloadPacket)
        return ".".join(parts[:4]) if parts[2] not in _TORCHS or is_bound else None
    if parts[0] == "torch":
        is_elsewhere = parts[1] == "nn" and ".".join(parts[:-1]) not in prefixes
        return name if is_elsewhere and _is_of_torch(name) else None
    is_aten = len(parts) == 2 and parts[0] in names  # pow.Tensor_Scalar
    return None if is_aten or parts[0] in prefixes else name


def is_foreign(name: str) -> bool:
    """Whether the known op ``name`` is another library's."""
    return "." in name


def _is_of_torch(name: str) -> bool:
    """Whether torch has a function of that name, or may have one in a module not yet imported."""
    found = find_foreign(name)
    if found is not None:
        return not why_not(name, found)
    module = name.rpartition(".")[0]
    path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return module not in sys.modules and path.is_file()


# --- values ------------------------------------------------------------------------------------


def modules_of(name: str) -> Iterator[str]:
    """Yields the names of modules whose import may define ``name``, the longest first."""
    while name := name.rpartition(".")[0]:
        yield name


def find_foreign(name: str) -> Found | None:
    """Looks ``name`` up in the loaded modules; None if it is not there yet."""
    for module_name in modules_of(name):
        owner: Any = sys.modules.get(module_name)
        if not issubclass(type(owner), types.ModuleType):
            continue
        attributes = name[len(module_name) + 1 :].split(".")
        for attribute in attributes[:-1]:
            owner = _own(owner, attribute)
            if owner is not None and not isinstance(owner, (type, types.ModuleType)):
                owner = None
        value = None if owner is None else _own(owner, attributes[-1])
        if value is not None:
            return Found(value, owner, attributes[-1])
    return None


def _own(owner: Any, attribute: str) -> Any:
    """Returns the attribute of a module or a class without running its code."""
    if owner is None:
        return None
    if not isinstance(owner, type):
        return names_of(owner).get(attribute)
    return next((vars(c)[attribute] for c in owner.__mro__ if attribute in vars(c)), None)


def same(name: str, others: Iterable[str]) -> str | None:
    """Returns another name of op ``name`` among ``others``; None if there is none yet."""
    found = find_foreign(name)
    if found is None:
        return None
    wanted = identity(found.value)
    for other in others:
        known = find_foreign(other) if is_foreign(other) else None
        if known is not None and identity(known.value) == wanted:
            return other
    return None


def identity(value: Any) -> int:
    """Identifies the op of a value: all callables of one operator are the same op."""
    operator = value if isinstance(value, OpOverload) else operator_of(value)
    return id(value if operator is None else operator.overloadpacket)


def why_not(name: str, found: Found) -> str:
    """Returns why the function ``name`` can't be cast; ``""`` if it can."""
    value = found.value
    if isinstance(value, (OpOverload, OpOverloadPacket)) or operator_of(value) is not None:
        return ""
    if isinstance(value, types.ClassMethodDescriptorType):
        return ""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if isinstance(value, type):
        return f"{shown(name)} is a class; list a function of it, such as {name + '.forward'!r}"
    if not isinstance(value, _FUNCTIONS):
        return f"{shown(name)} is not a function but a {type(value).__name__}"
    top = name.partition(".")[0]
    origins = {_top(found.owner)}
    if not isinstance(found.owner, type):  # a class may inherit from any library
        origins.add(_top(value))
    for origin in sorted(origins - {top, ""}):
        if origin in _REFUSED:
            return f"{shown(name)} is a function of {origin}, not of {top}"
        if origin == "torch":
            return f"{shown(name)} is torch's own function; list it by the name that it has there"
    return ""


def _top(value: Any) -> str:
    """Returns the library of a module, a class or a function; ``""`` if unknown."""
    if isinstance(value, types.ModuleType):
        module = names_of(value).get("__name__")
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        module = value.__module__
    else:
        module = None
    return module.partition(".")[0] if isinstance(module, str) else ""


def operator_of(value: Any) -> OpOverload | None:
    """Returns the operator that ``value`` calls, if it comes from `torch.library.custom_op`."""
    found = getattr(value, "_opoverload", None) if isinstance(value, CustomOpDef) else None
    return found if isinstance(found, OpOverload) else None


def lacking(name: str, executed: object = None) -> str:
    """Returns a message if the module of ``name`` is fully imported, as ``executed`` is, and lacks it, else ``""``."""
    if name.startswith(f"{OPERATORS}."):
        return ""
    found = find_foreign(name)
    if found is not None:
        return why_not(name, found)
    for module_name in modules_of(name):
        owner: Any = sys.modules.get(module_name)
        if owner is None:
            continue
        attributes = name[len(module_name) + 1 :].split(".")
        spec = getattr(owner, "__spec__", None)
        is_unfinished = owner is not executed and getattr(spec, "_initializing", False)
        if type(owner) is not types.ModuleType or is_unfinished:
            return ""
        for index, attribute in enumerate(attributes):
            names = names_of(owner) if not isinstance(owner, type) else vars(owner)
            if "__getattr__" in names:
                return ""
            value = _own(owner, attribute)
            if value is None:
                if index < len(attributes) - 1 and "__path__" in names:
                    return ""  # perhaps a submodule not yet imported
                where = ".".join([module_name, *attributes[:index]])
                hint = suggestion(attribute, [n for n in names if not n.startswith("__")])
                return f"{where} has no {shown(attribute)}{hint}"
            if not isinstance(value, (type, types.ModuleType)):
                return f"{shown(name)}: {attribute} holds no functions"
            owner = value
    return ""


def missing(name: str) -> str:
    """Returns a message if the library of ``name`` is not installed; ``""`` if it may be."""
    top = name.partition(".")[0]
    if name.startswith(f"{OPERATORS}.") or top in sys.modules:
        return ""
    with passing_over(ImportError, ValueError):
        if importlib.util.find_spec(top) is not None:
            return ""
    return f"no library {shown(top)} is installed, for {shown(name)}"
