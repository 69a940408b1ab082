"""Reads files of safetensors without the package, and names their damage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import cut, raised_here, shown
from ..files import STATE, opened

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip

_MOST_HEADER: Final = 100_000_000  # that of safetensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which is not read yet."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        with opened(self.path, STATE) as file:
            file.seek(self.start)
            content = bytearray(file.read(self.nbytes))
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
        return flat.view(self.dtype).view(self.shape) if content else flat.to(self.dtype).view(self.shape)


class TensorFile:
    """The header of a file: its tensors, its metadata, and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: Mapping[str, Any] = {}
        self.faults: list[str] = []
        for fault in self._read(path):
            self.faults.append(f"{path.name}: {fault}")

    def _read(self, path: Path) -> Iterator[str]:
        with opened(path, STATE) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                yield f"cut within its header: {size:,} bytes"
                return
            header = file.read(length)
        doubled: list[str] = []

        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            names = [name for name, _ in pairs]
            doubled.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
            return dict(pairs)

        try:
            entries = json.loads(header, object_pairs_hook=once)
        except raised_here(ValueError, RecursionError) as error:
            yield f"its header is damaged: {cut(str(error))}"
            return
        if not isinstance(entries, dict):
            yield "its header is not an object"
            return
        for name in doubled:
            yield f"{name}: there twice"
        metadata = entries.pop("__metadata__", None)
        self.metadata = metadata if isinstance(metadata, dict) else {}
        ends = [0]
        for name, entry in entries.items():
            try:
                dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
                start, end = map(int, entry["data_offsets"])
            except (KeyError, TypeError, ValueError):
                yield f"{name}: unreadable entry {shown(entry)}"
                continue
            found = StoredTensor(path, dtype, shape, 8 + length + start)
            ends.append(end)
            if min(shape, default=0) < 0 or start < 0 or end - start != found.nbytes:
                yield f"{name}: {end - start} bytes do not hold {entry['dtype']} of shape {shape}"
            elif 8 + length + end > size:
                yield f"{name}: cut: it ends at byte {8 + length + end:,} of {size:,}"
            else:
                self.tensors[name] = found
        if 8 + length + max(ends) < size:
            yield f"{size - 8 - length - max(ends):,} bytes belong to no tensor"
