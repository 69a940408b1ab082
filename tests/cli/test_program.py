"""``hmpx compare`` and ``hmpx draw``: functions of a program, what is printed and written; options under old names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

import hmpx
from hmpx.cli import main, output
from tests import forks

SCRIPT = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 4))

def inputs():
    return torch.ones(2, 8)

def batch():
    return torch.ones(2, 8), torch.tensor([0, 3])

def forward_step(model, batch):
    return model(batch[0])

def loss_fn(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

def broken():
    raise KeyError("of the program")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "a_program.py"
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "a_program", raising=False)
    return "a_program.py"


def test_compare_prints_what_the_function_returns(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--inputs", "batch", "--forward-step", "forward_step", "--loss-fn", "loss_fn"]
    files = ["--html", "c.html", "--json", "c.json", "--csv", "c.csv"]
    assert main(["compare", f"{script}:build", *given, "--device-types", "cpu", *files]) == 0
    printed = capsys.readouterr().out
    import a_program  # type: ignore[import-not-found]

    found = hmpx.compare(
        a_program.build(),
        a_program.batch(),
        forward_step=a_program.forward_step,
        loss_fn=a_program.loss_fn,
        device_types={"cpu"},
    )
    assert printed.startswith(str(found))
    assert printed.splitlines()[-3:] == ["wrote c.html", "wrote c.json", "wrote c.csv"]
    rows = json.loads(Path("c.json").read_text("utf-8"))["rows"]
    assert [row["effect"] for row in rows] == [row.effect for row in found.rows]


def test_draw_writes_a_picture(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["draw", f"{script}:build", "--device-types", "cpu"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote graph.dot"
    assert "fp32 -> bf16" in Path("graph.dot").read_text("utf-8")
    assert not hmpx.is_converted()
    few = ["--max-nodes", "2", "--no-fold", "--output", "few.dot", "--lists", "lean"]
    assert main([*command, *few]) == 0
    assert "max_nodes=2" in Path("few.dot").read_text("utf-8")


@pytest.mark.parametrize("command", ["compare", "draw"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a_program.py:built"], "did you mean 'build'?"),
        (["a_program.py:build", "--inputs", "nothing"], "has no 'nothing'"),
        (["a_program.py:build", "--inputs", "broken"], "KeyError: 'of the program'"),
        (["a_program.py:build", "--inputs", "batch"], "called Sequential(float32[2, 8], int64[2])"),
        (["a_program.py:build", "--device-types", "cuda,hpuu"], "did you mean 'hpu'?"),
    ],
)
def test_mistakes_are_named(
    command: str,
    arguments: list[str],
    message: str,
    script: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On stderr, with exit status 2."""
    assert main([command, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_options_under_their_old_names(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", f"{script}:build", "--device", "cpu", "--forward-step", "forward_step"]
    assert main([*plan, "--inputs", "batch", "--loss", "loss_fn"]) == 0
    printed = capsys.readouterr()
    assert "a training step" in printed.out
    assert "hmpx: --loss is now --loss-fn; the old name ends" in printed.err
    bench = ["bench", f"{script}:build", "--device", "cpu", "--runs", "1", "--warmup", "0"]
    assert main([*bench, "--run-seconds=0.001", "--quiet", "--variants", "auto"]) == 0
    said = capsys.readouterr().err
    assert "--run-seconds is now --run-s;" in said
    assert "--quiet is now --no-progress;" in said
    assert "run 1 of 1" not in said


@pytest.mark.parametrize("start", [["-m", "hmpx"], ["hmpx"]], ids=["module", "script"])
def test_the_version_is_printed_without_torch(start: list[str], tmp_path: Path) -> None:
    """As the command line prints it, which is the same for a program that is called otherwise."""
    script = "import sys\nfrom hmpx.cli import main\nsys.exit(main())\n"  # as pip writes it
    (tmp_path / "hmpx").write_text(script, encoding="utf-8")
    root = str(Path(hmpx.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [sys.executable, *start, "--version"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"hmpx {hmpx.__version__}\n"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hmpx.version" in imported
    assert not imported & {"torch", "yaml"}
    assert forks.run(*start, "--version", cwd=tmp_path).stdout == done.stdout


# --- seconds on a terminal -----------------------------------------------------------------------

SLOW = """
import time, torch

def build():
    time.sleep(0.5)
    return torch.nn.Linear(8, 4)

def inputs():
    return torch.ones(2, 8)

def broken():
    time.sleep(0.5)
    raise KeyError("of the program")

def interrupted():
    time.sleep(0.5)
    raise KeyboardInterrupt
"""


def screen(text: str) -> list[str]:
    """Returns the lines that a terminal shows after ``text``."""
    lines = []
    for written in text.replace("\r\n", "\n").split("\n"):
        line = ""
        for part in written.split("\r"):
            line = part + line[len(part) :]
        lines.append(line.rstrip(" "))
    return lines


@pytest.mark.parametrize(
    ("function", "last"),
    [
        ("build", ""),
        ("absent", "hmpx: "),
        ("broken", "KeyError: 'of the program'"),
        ("interrupted", ""),
    ],
)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_slow_command_shows_its_seconds_on_a_terminal(
    *,
    function: str,
    last: str,
    is_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a line of stderr of which nothing stays, however the command ends; a pipe gets none."""
    (tmp_path / "slow_program.py").write_text(SLOW, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "AFTER_S", 0.1)
    command = ["plan", f"slow_program.py:{function}", "--device", "cpu"]
    ours, theirs = os.openpty() if is_terminal else os.pipe()
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        ends = pytest.raises(KeyboardInterrupt) if function == "interrupted" else nullcontext()
        with ends:
            assert main(command) == (0 if function == "build" else 2)
        stderr.flush()
        written = ""
        with suppress(BlockingIOError):
            while part := os.read(ours, 1 << 16):
                written += part.decode()
    os.close(ours)
    monkeypatch.undo()
    slow = is_terminal and function != "absent"
    assert bool(re.search(r"\rhmpx plan: \d+ s", written)) is slow
    assert ("s, model and inputs" in written) is slow
    shown = [line for line in screen(written) if line]
    assert not [line for line in shown if re.search(r"plan: \d+ s", line)]
    assert last in "\n".join(shown)
    assert bool(shown) is bool(last)
    assert ("Linear" in capsys.readouterr().out) is (function == "build")
