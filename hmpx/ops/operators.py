"""Python's operators as methods of tensors: ``__add__``, ``__radd__``, ``__iadd__``."""

from __future__ import annotations

import operator

#: Dunder methods that Python's ``operator`` module has but that are not tensor arithmetic.
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
