"""``hmpx bench``: steps, makers of steps and models in files, what is printed, and wrong arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hmpx.cli import main

SCRIPT = """
import argparse
import hmpx
import pickle
import torch

made = []

def build():
    return torch.nn.Linear(32, 8)

def inputs():
    return torch.randn(4, 32)

def make_step():
    model = build()
    return lambda: model(inputs()).square().mean()

model = build()

def step():
    made.append(1)
    assert model.weight.grad is None or len(made) > 1, "another variant's model"
    loss = model(torch.ones(4, 32)).square().mean()
    loss.backward()
    with torch.no_grad():
        model.weight -= model.weight.grad
    return loss

def fails():
    if torch.is_autocast_enabled("cpu"):
        raise ValueError("not in here")

number = 3

def counting():
    drawn.append((hmpx.is_converted(), torch.rand(1).item()))
    return sum(drawn[0])

def interrupts():
    drawn.append(1)
    if len(drawn) > 4:
        raise KeyboardInterrupt

class Data:
    pass

def pickles():
    return len(pickle.dumps(Data()))

def reads_arguments():
    argparse.ArgumentParser().parse_args()
    return make_step()

drawn = []

if __name__ == "__main__":
    raise SystemExit("trains")
"""
QUICK = ["--device", "cpu", "--runs", "2", "--warmup", "1", "--run-s", "0", "--threads", "1"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "steps_to_bench.py"
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "steps_to_bench", None)
    monkeypatch.delitem(sys.modules, "steps_to_bench")
    return path


def labels(printed: str) -> list[str]:
    """Returns the first column of the table."""
    lines = printed.splitlines()
    return [line.split("  ")[0] for line in lines[3 : lines.index("", 3)]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", ["make_step", "step"])
def test_steps(function: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that makes one, or the step itself, whose file is run anew for each variant."""
    assert main(["bench", f"{script}:{function}", *QUICK]) == 0
    printed = capsys.readouterr()
    assert labels(printed.out) == ["fp32", "torch.autocast", "hmpx auto", "hmpx fast"]
    assert "loss at 6" in printed.out
    assert "run 2 of 2" in printed.err


def test_models(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the function `inputs` of the same file, from a module, with JSON and without messages."""
    options = ["--variants", "never,", "frozen", "--json", "bench.json", "--no-progress", *QUICK]
    assert main(["bench", "steps_to_bench:build", *options]) == 0
    printed = capsys.readouterr()
    assert labels(printed.out) == ["fp32", "hmpx never", "hmpx frozen"]
    assert printed.out.rstrip().endswith("wrote bench.json")
    assert not printed.err
    found = json.loads(Path("bench.json").read_text("utf-8"))
    assert list(found["variants"]) == ["fp32", "never", "frozen"]


def test_a_variant_that_fails(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gives exit status 1, and the others their figures."""
    assert main(["bench", f"{script}:fails", "--variants", "autocast", "never", *QUICK]) == 1
    assert "torch.autocast failed: ValueError: not in here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make_step"], "name a file and a function in it"),
        (["steps_to_bench.py:make_stop"], "did you mean 'make_step'?"),
        (["steps_to_bench.py:number"], "is not a function"),
        (["nowhere.py:step"], "nowhere.py can't be imported"),
        (["steps_to_bench.py:build", "--inputs", "nothing"], "has no 'nothing'"),
        (["steps_to_bench.py:make_step", "--inputs", "inputs"], "this one returns no model"),
        (["steps_to_bench.py:step", "--variants", "atuo"], "did you mean 'auto'"),
        (["steps_to_bench.py:step", "--runs", "0"], "runs must be an int of at least 1"),
        (["steps_to_bench.py:step", "--json", "no/such.json"], "there is no directory no"),
        (["steps_to_bench.py:step", "--json", "."], "is a directory; name a file in it"),
        (
            ["exits.py:step"],
            "can't be imported: SystemExit: 3, at exits.py:2; its training belongs",
        ),
        (["broken.py:step"], "invalid syntax"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, with exit status 2."""
    Path("exits.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    Path("broken.py").write_text("def step(:\n", encoding="utf-8")
    assert main(["bench", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
