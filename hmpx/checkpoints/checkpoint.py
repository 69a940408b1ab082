"""A checkpoint as data: its quantized layers, and its faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from ..errors import brief, fielded
from ..reports import Column, ReportTable, Written, page, paragraphs, table_section, without_end

#: The version of the JSON that `Checkpoint.to_json` writes.
SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class CheckpointLayer:
    """A quantized layer of a checkpoint: the largest magnitude of its weight, and how far that is from the model's.

    ``error`` is the norm of the difference over that of the weight; None without a model.
    """

    name: str
    layout: str
    strategy: str
    shape: tuple[int, ...] | None
    largest: float | None
    error: float | None
    faults: tuple[str, ...]

    __repr__ = fielded


@dataclass(frozen=True)
class Checkpoint(Written):
    """The quantized layers of a checkpoint; ``other_faults`` are those of files, of config.json, of other tensors."""

    path: str
    layers: tuple[CheckpointLayer, ...]
    other_faults: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """A line for each fault."""
        of_layers = [f"{each.name}: {fault}" for each in self.layers for fault in each.faults]
        return (*self.other_faults, *of_layers)

    __repr__ = brief

    def __str__(self) -> str:
        return "\n".join([self._verdict(), "", *(self.faults or self._shown().lines())])

    def _repr_html_(self) -> str:
        return f"<div>{paragraphs([self._verdict(), *self.faults])}{self._shown().to_html()}</div>"

    def _verdict(self) -> str:
        count = len(self.faults)
        said = "no faults" if not count else f"{count} fault{'s' * (count > 1)}"
        unread = sum(not each.faults and each.largest is None for each in self.layers)
        said += f", {unread} with zero points, whose values are not looked at" if unread else ""
        layers = f"{len(self.layers)} quantized layer{'s' * (len(self.layers) != 1)}"
        return f"{self.path}: {layers}, {said}"

    def _data(self) -> Mapping[str, Any]:
        return {"hmpx_checkpoint": SCHEMA, **asdict(self)}

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(CheckpointLayer)], self.layers)

    def _shown(self) -> ReportTable:
        columns = []
        for name, show in (("name", str), ("layout", str), ("strategy", str), ("shape", str),
                           ("largest", "{:.3g}".format), ("error", "{:.2g}".format), ("faults", "; ".join)):  # fmt: skip
            values = [getattr(each, name) for each in self.layers]
            if name not in {"error", "faults"} or any(values):
                columns.append(
                    Column(name, values, show, name in {"largest", "error"}, without_end)
                )
        return ReportTable(columns)

    def _page(self) -> str:
        name = Path(self.path).name
        said = paragraphs([self._verdict(), *self.other_faults], "verdict")
        parts, tables = said + table_section("layers", "Layers"), {"layers": self._shown()}
        return page(f"hmpx: {name}", f"Quantized layers of {name}", parts, {}, tables=tables)
