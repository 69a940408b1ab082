"""What is said of a name that is no op."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from torch import nn

from ..errors import shown, suggestion
from .op_table import names

#: Where words of a class's name meet: ``LayerNorm``, ``MSELoss``.
_BETWEEN_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

#: What modules have in their names, and ops do not.
_OF_MODULES_ALONE: Final = re.compile(r"_loss$|[123]d$")


def unknown(name: str) -> str:
    """Returns that ``name`` is no op, and what may be meant.

    Example:
        >>> unknown("matmull"), unknown("nn.LayerNorm")
        ("unknown op 'matmull'; did you mean 'matmul'?", "unknown op 'nn.LayerNorm'; did you mean 'layer_norm'?")
    """
    return f"unknown op {shown(name)}{suggestion(name, names(), of_modules())}"


@functools.cache
def of_modules() -> Mapping[str, str]:
    """Returns names of classes in `torch.nn`, in lower case -> the op of that name."""
    found: dict[str, str] = {}
    for name, each in vars(nn).items():
        if not isinstance(each, type) or not issubclass(each, nn.Module):
            continue
        spelled = _BETWEEN_WORDS.sub("_", name).lower()
        for op in (name.lower(), spelled, _OF_MODULES_ALONE.sub("", spelled)):
            if op in names():
                found |= {prefix + name.lower(): op for prefix in ("", "nn.", "torch.nn.")}
                break
    return found
