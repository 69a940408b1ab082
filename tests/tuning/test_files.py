"""What `hmpx.tune` reads and writes: journals are looked at before they are touched, and files are whole or old."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx.tuning.checking import alone_in
from tests import forks


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


def test_the_journal_of_another_search_keeps_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    tune(small(), journal=path)
    content = path.read_bytes() + b'{"kep'
    path.write_bytes(content)
    with pytest.raises(hmpx.OptionError, match="belongs to another search"):
        tune(small(), journal=path, seed=3)
    assert path.read_bytes() == content
    tune(small(), journal=path)
    assert path.read_bytes() == content[:-5]


@pytest.mark.parametrize("torn", [b"{", b'{"hmpx jour', b'{"hmpx journal": 1, "by'])
def test_a_torn_header_is_begun_again(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(torn)
    tune(small(), journal=path)
    assert "hmpx journal" in json.loads(path.read_bytes().splitlines()[0])


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("search") / "journal"
    tune(small(), journal=path)
    return path.read_bytes().splitlines()[0]


@pytest.mark.parametrize(
    "record",
    [
        {"spots": 1},
        {"spots": []},
        {"spots": {"a": 1}},
        {"spots": [["a"]]},
        {"type": "bfloat16", "scores": 3},
        {"scores": []},
        {"type": "bfloat16", "scores": [[]]},
        {"kept": 5},
        {"kept": [], "inputs": "tuning", "tolerance": 0, "error": "x", "seen": {}},
        {"kept": [], "inputs": "tuning", "tolerance": 0, "error": 0, "seen": {"a": [1]}},
        {"kept": [], "inputs": "tuning", "tolerance": 0, "error": 0, "seen": 3},
        {"kept": []},
        {"seconds": [["linear"]]},
        3,
    ],
    ids=range(14),
)
def test_damaged_journals_are_named_with_the_line(
    tmp_path: Path, header: bytes, record: object
) -> None:
    path = tmp_path / "journal"
    content = header + b"\n" + json.dumps(record).encode() + b'\n{"kept": ["to'
    path.write_bytes(content)
    with pytest.raises(hmpx.OptionError, match=r"journal:2: the journal is damaged .*; delete"):
        tune(small(), journal=path)
    assert path.read_bytes() == content


def test_a_lock_is_neither_emptied_nor_followed(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    lock = tmp_path / "lock"
    lock.write_text("kept")
    with alone_in(tmp_path):
        pass
    assert lock.read_text() == "kept"
    lock.unlink()
    lock.symlink_to(notes)
    with pytest.raises(OSError, match="symbolic"), alone_in(tmp_path):
        pass
    assert notes.read_text() == "precious"


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    """A disk that is full after 200 bytes."""
    model = small()
    best = tune(model)
    with hmpx.convert(device_types={"cpu"}):
        with hmpx.record() as record:
            model(torch.ones(2, 8)).sum().backward()
        drawing = hmpx.draw(model, torch.ones(2, 8))
    writers: dict[str, Callable[[Path], object]] = {
        "a.json": record.to_json,
        "a.html": record.to_html,
        "a.csv": record.to_csv,
        "a.dot": drawing.save,
        "tuned.html": best.to_html,
        "lists": best.write,
    }
    for name, write in writers.items():
        write(tmp_path / name)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        for name, write in writers.items():
            with pytest.raises(hmpx.OptionError, match=r"can't write .*File too large"):
                write(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


def test_links_inside_a_directory_are_replaced_and_named_ones_followed(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    notes.chmod(0o640)
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "report.txt").symlink_to(notes)
    best = tune(small())
    best.write(folder)
    assert notes.read_text() == "precious"
    assert not (folder / "report.txt").is_symlink()
    link = tmp_path / "report.html"
    link.symlink_to(notes)
    best.to_html(link)
    assert link.is_symlink()
    assert notes.read_text() == best.to_html()
    assert notes.stat().st_mode & 0o777 == 0o640


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


def test_one_function_writes_files() -> None:
    """In place are only written: devices, a log of a command, appended journals, and the system's own files."""
    writing = re.compile(
        r"""write_text|write_bytes|\bopen\([^)\n]*["'](?:[wax]|r\+)|os\.open\(|os\.replace"""
    )
    root = Path(hmpx.__file__).parent
    found = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if writing.search(file.read_text(encoding="utf-8"))
    }
    assert found == {
        "reports/files.py",
        "benchmarking/runner.py",  # /proc
        "cli/output.py",  # /dev/null
        "tuning/checking.py",  # what a command prints, and the lock
        "tuning/journal.py",  # appends
    }


FORKED = """
import os, signal, torch, hmpx
torch.set_num_threads(1)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.ones(2, 8)
def tune(): hmpx.tune(model, x, tolerance=0.1, device_types={"cpu"}, progress=False)
tune()
if not (child := os.fork()):
    signal.alarm(60)
    tune()
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_may_tune_where_its_parent_did() -> None:
    """With one thread, with which torch may be forked."""
    assert forks.run("-c", FORKED).returncode == 0
