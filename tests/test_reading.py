"""Which files hmpx opens: all by one function, which refuses what is not a regular file of a usual size."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hmpx
from hmpx import checking, files, reports
from hmpx.errors import HmpxError
from hmpx.tuning.search import Journal
from tests import forks

ROOT = Path(hmpx.__file__).parent

#: Calls that open files, by the name of the function or method.
OPENING = {
    "open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "load_file", "safe_open",
    "getline", "getlines", "copyfile", "copy2", "is_zipfile", "ZipFile", "run_path", "fromfile", "from_file",
    "mmap", "FileIO", "loadtxt", "genfromtxt", "unlink", "mkstemp", "NamedTemporaryFile",
}  # fmt: skip

#: Places that may: module -> calls -> why.
ALLOWED = {
    "files.py": {
        "open": "the one reader, and the one writer", "write_bytes": "", "unlink": "",
        "read_text": "files of the package",
    },
    "reports/pages.py": {"read_text": "files of the package"},
    "number_formats/kernels/sources.py": {"read_bytes": "files of the package"},
    "compute/nodes/library.py": {"read_bytes": "files of the package"},
    "patches/compiled.py": {"read_bytes": "files of the package"},
    "policy/lists.py": {"read_text": "the shipped lists"},
    "cli/lists.py": {"read_bytes": "the shipped lists"},
    "cli/scripts.py": {"read_bytes": "the program, as python reads it", "is_zipfile": "a regular file"},
    "cli/output.py": {"open": "/dev/null, to write to"},
    "planning/runner.py": {"read_text": "/proc/self", "write_text": "/proc/self"},
    "checkpoints/reading.py": {"safe_open": "of a file that is open"},
    "checkpoints/writing.py": {"safe_open": "the header alone, of a file to replace"},
    "checking/states.py": {"load_file": "of a file that is open"},
    "checking/findings.py": dict.fromkeys(("getline", "getlines"), "the running program"),
    "reports/report_page.py": {"getlines": "the cache, for what is not on the disk"},
    "tracing/tracing.py": {"open": "a trace, written as it goes"},
    "tuning/checking.py": {"open": "the output of a command", "unlink": "reports of an earlier run"},
}  # fmt: skip


def _opened(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            if name in OPENING and ast.unparse(function).partition(".")[0] != "files":
                yield name


def test_no_other_module_opens_files() -> None:
    found = {
        str(path.relative_to(ROOT)): {*_opened(ast.parse(path.read_text("utf-8")))}
        for path in ROOT.rglob("*.py")
    }
    assert {name: calls for name, calls in found.items() if calls} == {
        name: {*calls} for name, calls in ALLOWED.items()
    }


# --- what is refused -----------------------------------------------------------------------------

READERS: dict[str, Callable[[str], object]] = {
    "list.txt": hmpx.load_policy,
    "policy.yaml": lambda path: hmpx.convert(policy=path),
    "policy.json": lambda path: hmpx.load_policy(policy=path),
    "contract.yaml": hmpx.expect,
    "report.json": reports.read_json,
    "trace.hmpx": lambda path: hmpx.diff_runs(path, path),
    "journal.jsonl": lambda path: Journal(path, {}),
    "state.pt": checking.read_state,
    "baseline.txt": lambda path: files.read_text(path, files.BASELINE),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # bytes that the disk need not have


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (_pipe, "a pipe or a device, not "),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device, not "),
    "directory": (Path.mkdir, "a directory, not "),
    "nothing": (lambda path: None, "no such file; give the path of "),
    "large": (_large, "1,099,511,627,776 bytes; "),
}


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_a_file_of_a_usual_size_is_refused_at_once(
    name: str, other: str, tmp_path: Path
) -> None:
    """By its name, before a byte of it is read."""
    path = tmp_path / name
    make, message = OTHERS[other]
    make(path)
    if (name, other) in (("journal.jsonl", "nothing"), ("state.pt", "large")):
        return  # a new journal; tensors may be large
    with pytest.raises(HmpxError) as caught:
        READERS[name](str(path))
    assert str(caught.value).startswith(f"{path}: {message}")
    assert not hmpx.is_converted()


def test_lists_may_not_be_as_large_as_logs(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"x" * (100 << 20))
    with pytest.raises(
        HmpxError, match=r"train\.log: 104,857,600 bytes; an op list has 10,485,760 at most"
    ):
        hmpx.load_policy(path)


def test_regular_files_by_way_of_stdin_are_read(tmp_path: Path) -> None:
    """``hmpx check /dev/stdin < list.txt``."""
    path = tmp_path / "list.txt"
    path.write_text("linear\n", "utf-8")
    command = [sys.executable, "-m", "hmpx", "check", "/dev/stdin"]
    with path.open() as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
    assert done.stdout == "1 file, 1 op: no faults\n", done.stderr


# --- a full disk ---------------------------------------------------------------------------------

_STEPS = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for i in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).float().sum().backward()
    optimizer.step()
print("done", flush=True)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_full_disk_ends_traces_and_reports_but_not_the_program(tmp_path: Path) -> None:
    """With one line each, that names the file and the reason."""
    script = tmp_path / "script.py"
    script.write_text(_STEPS, "utf-8")
    (tmp_path / "report.json").symlink_to("/dev/full")
    options = ["--trace", "/dev/full", "--report", str(tmp_path / "report.json")]
    done = forks.run("-m", "hmpx", "run", *options, str(script))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    told = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert len(told) == 2, done.stderr
    assert "can't write /dev/full: No space left on device; the trace ends" in told[0]
    assert "report.json: No space left on device" in told[1]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_full_disk_ends_the_journal_but_not_the_search(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"), {})
    (tmp_path / "journal").unlink()
    (tmp_path / "journal").symlink_to("/dev/full")
    with pytest.warns(
        hmpx.HmpxWarning, match=r"journal: No space left on device; the search goes on"
    ):
        assert journal.remembered("a", lambda: 3, int) == 3
    assert journal.remembered("b", lambda: 4, int) == 4
    assert journal.remembered("a", lambda: 5, int) == 3


def test_programs_may_close_their_output(tmp_path: Path) -> None:
    """Under the log and a report, too, they end as under python."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.stdout.close(); sys.stderr.close()\n{_STEPS.partition('print')[0]}",
        "utf-8",
    )
    options = ["--verbose", "--report", str(tmp_path / "report.json")]
    command = [sys.executable, "-m", "hmpx", "run", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert reports.read_json(tmp_path / "report.json").rows
