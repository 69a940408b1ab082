"""``hmpx tune``: lists from the exit status of a command, here one that needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hmpx
from hmpx.cli import main
from hmpx.reports import Report, Row
from tests import forks

#: Passes if what the variables at its top say is in fp32; its first run writes a report.
SCRIPT = """
import os, pathlib, sys
import yaml
needed = {needed!r}
policy = yaml.safe_load(pathlib.Path(os.environ["HMPX_POLICY"]).read_text())
report = os.environ.get("HMPX_REPORT")
if report:
    pathlib.Path(report).write_text(pathlib.Path("ready.json").read_text())
    sys.exit({first})
print("tried", policy.get("fp32", []))
kept = {{("", op) for op in policy.get("fp32", [])}}
for section in policy.get("sections", []):
    for op in section.get("low", []):
        kept.discard(("", op))
    kept |= {{(module, op) for module in section["module"] for op in section.get("fp32", [])}}
sys.exit(not all((module, op) in kept or ("", op) in kept for module, op in needed))
"""

OPS = ("linear", "gelu", "softmax", "layer_norm", "add", "sub", "mul", "exp")


def row(op: str, module: str) -> Row:
    return Row(
        op, f"torch.{op}", module, "m.py:1", "forward", "cpu", "PASS", "", "float32", ("float32",),
        ("float32",), ("float32",), 1, 0, 0, 100 if op == "linear" else 0, 50,
    )  # fmt: skip


def check(
    folder: Path, needed: list[tuple[str, str]], modules: tuple[str, ...] = ("",), first: int = 0
) -> str:
    """Returns a command that passes if these are in fp32."""
    rows = tuple(row(op, module) for op in OPS for module in modules)
    Report(rows).to_json(folder / "ready.json")
    (folder / "check.py").write_text(SCRIPT.format(needed=needed, first=first))
    return f"{sys.executable} check.py"


def test_the_exit_status_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists, reports and the artefacts of each run are there; started anew, nothing runs again."""
    monkeypatch.chdir(tmp_path)
    command = check(tmp_path, [("", "softmax"), ("", "sub"), ("", "add")])
    assert main(["tune", "--check", command, "--output", "lists"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 of 8 candidates stay in fp32 under bfloat16: the check passes;")
    assert "without it the check fails" in said
    policy = hmpx.load_policy(lists="lists")
    assert {op for op in OPS if policy[op].cast_policy is hmpx.DENY} == {"add", "softmax", "sub"}
    assert (
        "the check passes with it, fails without\nsoftmax\n" in Path("lists/fp32.txt").read_text()
    )
    runs = sorted(Path("lists").glob("[0-9]*"))
    first = runs[0]
    assert "tried" in (first / "output.txt").read_text()
    assert main(["tune", "--check", command, "--output", "lists"]) == 0
    assert sorted(Path("lists").glob("[0-9]*")) == runs
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exit 3", "fails in fp32 already, with exit status 3"),
        ("true", "has not run under `hmpx run`"),
        ("no_such_program", "fails in fp32 already, with exit status 127"),
    ],
)
def test_commands_that_cannot_be_tuned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    message: str,
) -> None:
    """Exit status 2, and the reason."""
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--check", command]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--runs", "0"], ["--timeout", "0"], ["--budget", "x"]])
def test_options(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that make no sense are refused."""
    with pytest.raises(SystemExit):
        main(["tune", "--check", "true", *option])
    assert option[0] in capsys.readouterr().err


# --- commands as users have them ---------------------------------------------------------------------


def test_reports_of_several_programs_and_processes_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun's do: one a rank. What only one of them calls is a candidate, too."""
    monkeypatch.chdir(tmp_path)
    command = check(tmp_path, [("", "add")])
    Report((row("tanh", ""),)).to_json(tmp_path / "other.json")
    copy = 'if [ -n "$HMPX_REPORT" ]; then cp other.json "${HMPX_REPORT%.json}.rank1.json"; fi'
    assert main(["tune", "--check", f"{command} && {{ {copy}; }}", "--output", "o"]) == 0
    assert f"1 of {len(OPS) + 1} candidates" in capsys.readouterr().out


def processes_with(marker: str) -> list[str]:
    """Returns the command lines of running programs that hold ``marker``."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "stat,args"], capture_output=True, text=True, check=True
    )
    lines = [line for line in listed.stdout.splitlines() if marker in line]
    return [line for line in lines if not line.startswith("Z")]


#: Runs hmpx such that it obeys interrupts, also where the tests run in the background of a shell.
OBEDIENT = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("hmpx", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGINT, "0003"),
        pytest.param(signal.SIGTERM, "called", marks=pytest.mark.slow),
    ],
)
def test_an_interruption_ends_the_command_too(
    tmp_path: Path, number: signal.Signals, when: str
) -> None:
    """Ctrl-C, or a kill: the best so far is written, if any was tried; started anew, the search goes on."""
    marker = f"sleeper-{os.getpid()}-{number}"
    command = check(tmp_path, [("", "softmax"), ("", "sub")])
    hang = f"if [ -e slow ] && [ -d o/{when} ]; then {sys.executable} sleeper.py {marker}; fi"
    hanging = f"{hang}; {command}"
    tune = [sys.executable, "-c", OBEDIENT, "tune", "--check", hanging, "--output", "o"]
    (tmp_path / "sleeper.py").write_text("import time; open('asleep', 'w'); time.sleep(60)")
    (tmp_path / "slow").touch()
    with subprocess.Popen(
        tune,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            while process.poll() is None and not (tmp_path / "asleep").exists():
                time.sleep(0.1)
            process.send_signal(number)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()  # or leaving the block would wait for the whole search
    assert "Traceback" not in said
    assert not processes_with(marker)
    if when == "called":
        assert process.returncode == 130
        assert "interrupted before any policy was tried" in said
    else:
        assert process.returncode == 0
        assert "this is the best set so far" in " ".join(said.split())
    (tmp_path / "slow").unlink()
    done = forks.run(*tune[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 of 8 candidates stay in fp32")


def test_hmpx_run_obeys_the_policy_under_test(tmp_path: Path) -> None:
    """Over its own options; a report is written where the other variable says."""
    (tmp_path / "policy.yaml").write_text("lists: none\nfp32: [add, sub]\nlow: [linear]\n")
    (tmp_path / "script.py").write_text(
        "import torch\ny = torch.nn.Linear(2, 2)(torch.ones(1, 2))\nprint(y.dtype, (y + 1).dtype)\n"
    )
    environment = {"HMPX_POLICY": str(tmp_path / "policy.yaml"), "HMPX_REPORT": "report.json"}
    command = ("-m", "hmpx", "run", "--lists", "o2", "script.py")
    done = forks.run(*command, cwd=tmp_path, env={**os.environ, **environment})
    assert (done.returncode, done.stdout) == (0, "torch.bfloat16 torch.float32\n"), done.stderr
    assert (tmp_path / "report.json").is_file()


TRAINING = """
import sys, torch
torch.manual_seed(0)
x, linear = torch.randn(8, 16), torch.nn.Linear(16, 16)
with torch.no_grad():
    y = (linear(x) + 256) - 256
    expected = x.double() @ linear.weight.double().T + linear.bias.double()
sys.exit(float((y.double() - expected).norm() / expected.norm()) > 0.02)
"""


@pytest.mark.slow
def test_a_script_under_hmpx_run_needs_no_change(tmp_path: Path) -> None:
    """The whole way: its ops are found, tried and written; with the lists it passes."""
    (tmp_path / "train.py").write_text(TRAINING)
    hmpx_run = f"{sys.executable} -m hmpx run"
    tune = [sys.executable, "-m", "hmpx", "tune", "--check", f"{hmpx_run} train.py"]
    done = subprocess.run(tune, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 candidates stay in fp32" in done.stdout
    assert hmpx.load_policy(lists=tmp_path / "hmpx_tune")["sub"].cast_policy is hmpx.DENY
    again = f"{hmpx_run} --lists hmpx_tune train.py".split()
    assert subprocess.run(again, cwd=tmp_path, check=False).returncode == 0
