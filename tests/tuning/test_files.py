"""What `hmpx.tune` reads and writes: journals are looked at before they are touched, and files are whole or old."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def tune(model: nn.Module, **options: Any) -> hmpx.Tuned:
    options = {"tolerance": 0.1, "device_types": {"cpu"}, "progress": False, **options}
    return hmpx.tune(model, torch.ones(2, 8), **options)


@pytest.mark.parametrize(
    "content",
    [
        b'{"epoch": 1}\n{"epoch": 2, "loss": 0.25}',
        b'{"epoch": 1}',
        b"notes\nmore",
        b'{"epoch": 1}\nnotes\n',
        b"\x00\xff",
        b"[1]\n{",
    ],
    ids=range(6),
)
def test_files_that_are_no_journals_stay_as_they_are(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        hmpx.OptionError, match=r"is not a journal of hmpx\.tune; give another path"
    ):
        tune(small(), journal=path)
    assert path.read_bytes() == content


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("search") / "journal"
    tune(small(), journal=path)
    return path.read_bytes().splitlines()[0]


@pytest.mark.parametrize("record", [{"spots": 1}, {"key": "spots"}, 3])
def test_damaged_journals_are_named_with_the_line(
    tmp_path: Path, header: bytes, record: object
) -> None:
    path = tmp_path / "journal"
    content = header + b"\n" + json.dumps(record).encode() + b'\n{"kept": ["to'
    path.write_bytes(content)
    with pytest.raises(hmpx.OptionError, match=r"journal:2: the journal is damaged .*; delete"):
        tune(small(), journal=path)
    assert path.read_bytes() == content


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({key: nn.Linear(8, 8) for key in ("k=3", "=", "a:b=follows")})

    def forward(self, x: Tensor) -> Tensor:
        for each in self.parts.values():
            x = each(x)
        return x


def test_modules_may_have_names_with_equals_signs(tmp_path: Path) -> None:
    best = tune(Keyed(), tolerance=1e-9, by="module")
    assert best.keep_fp32 == {f"parts.{key}:linear" for key in ("k=3", "=", "a:b=follows")}
    assert set(best.types.values()) == {"float32"}
    best.write(tmp_path)
