"""``hmpx plan``: functions of files and modules, what is printed and written, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hmpx.cli import main

SCRIPT = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))

def inputs():
    return torch.randn(4, 64)

def wide():
    return (torch.randn(400, 64),)

def loss(output):
    return output.square().mean()

class Models:
    build = staticmethod(build)

if __name__ == "__main__":
    raise SystemExit("trains")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import sys

    path = tmp_path / "models_to_plan.py"
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_to_plan", raising=False)
    return path


def test_it_prints_a_plan(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the function `inputs` of the same file, on a device that is not here."""
    assert main(["plan", f"{script}:build", "--device", "hpu"]) == 0
    printed = capsys.readouterr().out
    assert "Sequential, 4,680 parameters: a training step with AdamW on hpu" in printed
    assert "weight casts kept" in printed


def test_functions_options_and_files(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its argument."""
    arguments = [
        "plan", "models_to_plan:Models.build", "--inputs", "wide", "--loss-fn", f"{script}:loss",
        "--device", "cuda", "--optimizer", "SGD momentum=0.9", "--world-size", "2", "--html",
        "plan.html", "--json", "plan.json", "--opt-level", "O2",
    ]  # fmt: skip
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "with SGD momentum=0.9 on cuda" in printed
    assert "each of 2" in printed
    assert "wrote plan.html" in printed
    found = json.loads(Path("plan.json").read_text("utf-8"))
    assert found["runs"]["hmpx"]["optimizer_bytes"] == 4 * 4_680
    assert found["runs"]["float32"]["saved"]["float32"] > 4 * 400 * 64
    assert "Plan of a step" in Path("plan.html").read_text("utf-8")


def test_inference(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A forward, without an optimizer."""
    assert main(["plan", f"{script}:build", "--device", "hpu", "--inference"]) == 0
    assert "a forward on hpu" in capsys.readouterr().out
    assert main(["plan", f"{script}:build", "--device", "hpu", "--optimizer", "none"]) == 0
    assert "optimizer state" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build"], "name a file and a function in it"),
        (["models_to_plan.py:"], "name a file and a function in it"),
        (["models_to_plan.py:built"], "did you mean 'build'?"),
        (["nowhere.py:build"], "nowhere.py can't be imported"),
        (["nowhere.models:build"], "No module named 'nowhere'"),
        (["models_to_plan.py:build", "--inputs", "nothing"], "has no 'nothing'"),
        (["models_to_plan.py:build", "--device", "hpuu"], "did you mean 'hpu'?"),
        (["models_to_plan.py:loss", "--device", "hpu"], "missing 1 required positional argument"),
        (["models_to_plan.py:build", "--device", "hpu", "--world-size", "0"], "world_size"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, with exit status 2."""
    assert main(["plan", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
