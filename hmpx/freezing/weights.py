"""The report of a freezing: one row for each weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import lined
from ..policy import LowType
from ..tensors import short_name


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer of a frozen model, under one of its names.

    Attributes:
        name: Its name in the model.
        kind: ``"parameter"`` or ``"buffer"``.
        dtype: The dtype that it had before.
        stored_dtype: The dtype that it has in the frozen model, or the number format whose codes it
            holds.
        size_bytes: Its size before; 0 if it shares the memory of another weight in this list.
        stored_bytes: Its size in the frozen model.
        reason: Why it is stored this way.

    Example:
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.freeze(model, torch.ones(1, 2)) as frozen:
        ...     for weight in frozen.weights:
        ...         print(weight.name, weight.size_bytes, weight.stored_bytes)
        weight 24 12
        bias 12 6
    """

    name: str
    kind: str
    dtype: torch.dtype
    stored_dtype: LowType
    size_bytes: int
    stored_bytes: int
    reason: str

    @property
    def is_low(self) -> bool:
        """Whether freezing stored it in low precision."""
        return self.stored_dtype is not self.dtype


def table(name: str, weights: Sequence[Weight], *, is_undone: bool) -> str:
    """Returns the bytes before and after, and for each weight its dtype and the reason.

    Args:
        name: The model's name.
        weights: The rows.
        is_undone: Whether the model has its fp32 weights back.
    """
    before = sum(weight.size_bytes for weight in weights)
    after = sum(weight.stored_bytes for weight in weights)
    low = sum(weight.is_low for weight in weights)
    lines = [
        f"{name}: {low} of {len(weights)} weights stored in low precision, "
        f"{before:,} -> {after:,} bytes{' (undone)' if is_undone else ''}"
    ]
    rows = [("name", "kind", "dtype", "stored", "bytes", "why")]
    rows += [
        (
            weight.name,
            weight.kind,
            short_name(weight.dtype),
            short_name(weight.stored_dtype),
            f"{weight.stored_bytes:,}",
            weight.reason,
        )
        for weight in weights
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, size, reason in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*padded, size.rjust(widths[-2]), reason]))
    return lined(lines)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns the first few names, each once, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")
