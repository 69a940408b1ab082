"""Policies that are given as dicts, as the plain values of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ... import arguments, tensors
from ...arguments import is_a
from ...errors import OptionError, PolicyFileError, shown
from ...number_formats import is_format
from .node_reader import MOST_ITEMS

#: What messages call a policy that is not in a file.
SOURCE: Final = "<policy>"

#: A policy has four: itself, its sections, a section, a list in it.
_MOST_LEVELS: Final = 16


class PlainValues:
    """Turns a user's dict into values that YAML has; errors name the keys that lead to a value."""

    def __init__(self) -> None:
        """Starts with no items counted."""
        self._count = 0

    def mapping(self, path: str, value: Mapping[Any, Any], level: int) -> dict[Any, Any]:
        """Returns a mapping with plain keys and values.

        Args:
            path: The keys that lead to it, for messages: ``"['sections'][0]"``.
            value: The mapping.
            level: How many collections it is in.

        Raises:
            PolicyFileError: Something in it can't be in a policy.
        """
        found = {}
        try:
            given = arguments.mapping("it", value)
        except OptionError as error:
            raise _error(path, str(error)) from error
        for key, each in given.items():
            if not is_a(key, (str, int, float, type(None))):
                raise _error(path, f"a key must be a string, not {shown(key)}")
            plain_key = self.value(path, key, level)
            found[plain_key] = self.value(f"{path}[{shown(plain_key)}]", each, level + 1)
        return found

    def value(self, path: str, value: Any, level: int) -> Any:
        """Returns a plain value; the arguments are those of `mapping`."""
        self._count += 1
        if self._count > MOST_ITEMS:
            raise _error(path, f"more than {MOST_ITEMS:,} items in one policy")
        if level > _MOST_LEVELS:
            raise PolicyFileError(f"{SOURCE}: nested too deep to be a policy")
        if is_a(value, Mapping):
            return self.mapping(path, value, level)
        if is_a(value, (list, tuple, set, frozenset)):
            items = arguments.items(path, value, "a list")
            return [
                self.value(f"{path}[{index}]", each, level + 1) for index, each in enumerate(items)
            ]
        if is_a(value, torch.dtype) or is_format(value):
            return tensors.long_name(value)
        if is_a(value, str):
            return str.__str__(value)
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int and value.bit_length() <= 200:
            return value
        raise _error(path, f"a policy holds strings, numbers, dtypes and lists, not {shown(value)}")


def _error(path: str, message: str) -> PolicyFileError:
    where = f"{SOURCE}{path}" if len(path) <= 200 else SOURCE
    return PolicyFileError(f"{where}: {message}")
