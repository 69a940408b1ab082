"""What `hmpx.tune` reads and writes: journals are looked at before they are touched, and files are whole or old."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx.casting import Options


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def tune(model: nn.Module, x: Tensor | None = None, **options: Any) -> hmpx.Tuned:
    options = {"tolerance": 0.1, "device_types": {"cpu"}, "progress": False, **options}
    return hmpx.tune(model, torch.ones(2, 8) if x is None else x, **options)


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
    with pytest.raises(
        hmpx.OptionError, match=r"journal:2: not a journal of hmpx\.tune, or damaged: .*; delete"
    ):
        tune(small(), journal=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("by", "given", "in_force", "options"),
    [
        ("op", {}, {}, {"legalize": "always"}),
        ("module", {}, {}, {"legalize": "always"}),
        (
            "op",
            {"legalize": "fast"},
            {"keep_weight_casts": True},
            {"legalize": "fast", "keep_weight_casts": True},
        ),
        ("op", {"low_precision_type": "float8_e4m3fn"}, {}, {"legalize": "always"}),
        (
            "module",
            {},
            {"low_precision_type": "float8_e4m3fn", "round_gradients": "float8_e5m2"},
            {"round_gradients": hmpx.formats.get("float8_e5m2")},
        ),
        (
            "op",
            {"low_precision_type": "bfloat16"},
            {"low_precision_type": "float8_e4m3fn", "overflow": "saturate"},
            {},
        ),
    ],
)
def test_what_is_said_to_be_used_is_what_was_measured(
    by: str,
    given: dict[str, Any],
    in_force: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The lists as arguments, and the call in the first line of the file: all options, the same error."""
    model, x = Apart(), torch.linspace(-3, 3, 64).reshape(8, 8)
    before = hmpx.convert(device_types={"cpu"}, **in_force) if in_force else nullcontext()
    with before:
        best = tune(model, x, tolerance=1e-3, by=by, **given)
    assert best.kept
    (path, *_) = best.write(tmp_path)
    line = path.read_text().splitlines()[0].partition(" Use: ")[2]
    line = line.replace("DIRECTORY", str(tmp_path)).replace("policy.yaml", str(path))
    with torch.no_grad():
        expected = model(x).double()
        for convert in (lambda: hmpx.convert(**best.lists), lambda: eval(line)):
            with convert() as session:
                found = model(x).double()
            assert session.device_types == {"cpu"}
            assert session.options == Options(**options)
            assert session.policy.fingerprint() == best.policy.fingerprint()
            assert float((found - expected).norm() / expected.norm()) == pytest.approx(best.error)


class Apart(nn.Module):
    """Two layers, between which something cancels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return second((torch.tanh(first(x)) + 256) - 256)  # type: ignore[no-any-return]


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
