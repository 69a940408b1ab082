"""Paths on the command line are those of the directory in which the command was started."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hmpx.cli import entry, functions
from hmpx.cli.options import PATHS

#: Metavars of values that are not paths.
OTHERS = {
    "A", "B", "A:B", "CMD", "CODES", "COMMAND", "FUNCTION", "GLOBS", "MODULES", "N", "NAME", "NAME[,NAME]",
    "OP", "PATTERN", "SECONDS", "SHELL", "T[,T]", "yes|FORMAT", "TYPE", "raise|log",
}  # fmt: skip

#: Values that are not made absolute, though they name files.
AS_GIVEN = {
    ("report", "files"): "the first may be the word merge; the command runs no program",
    ("diff-runs", "a"): "the command runs no program",
    ("diff-runs", "b"): "the command runs no program",
    ("diff", "before"): "a set or a file; the program runs in another process",
    ("diff", "after"): "a set or a file; the program runs in another process",
}


def _options() -> Iterator[tuple[str, argparse.ArgumentParser, argparse.Action]]:
    whole = entry.parser()
    commands = next(a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if action.nargs not in (0, argparse.REMAINDER) and not action.choices:
                yield name, parser, action


def test_each_option_is_known_to_take_a_path_or_not() -> None:
    metavars = {str(action.metavar or action.dest) for _, _, action in _options()}
    functions_of_files = {"FILE.py:FUNCTION"}
    assert {m for m in metavars if m not in PATHS and m not in OTHERS | functions_of_files} <= set()


def test_paths_do_not_depend_on_where_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    seen = set()
    for command, parser, action in _options():
        if action.metavar in PATHS and (command, action.dest) not in AS_GIVEN:
            value = parser._get_value(action, "x")  # type: ignore[attr-defined]
            assert value == str(tmp_path / "x"), (command, action)
            seen.add(action.metavar)
    assert seen == {*PATHS}
    assert functions.split("train.py:build") == (str(tmp_path / "train.py"), "build")


_CHANGING = "import os\nos.chdir('sub')\n"


def _hmpx(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hmpx", *args], cwd=folder, capture_output=True, text=True, check=False
    )  # fmt: skip
    return done.stdout + done.stderr


def test_programs_that_change_their_directory(tmp_path: Path) -> None:
    """Their findings, figures and later lists have the paths of the command's directory."""
    (tmp_path / "sub").mkdir()
    script = f"{_CHANGING}import torch\na = torch.arange(2000).to(torch.bfloat16)\n"
    (tmp_path / "lint.py").write_text(script, "utf-8")
    assert "wrote 1 finding to k.txt" in _hmpx(tmp_path, "lint", "--baseline", "k.txt", "--write-baseline", "lint.py")  # fmt: skip
    assert (tmp_path / "k.txt").read_text("utf-8").endswith(" lint.py\n")
    assert "file=lint.py,line=4," in _hmpx(tmp_path, "lint", "--output-format", "github", "lint.py")
    (tmp_path / "low.txt").write_text("gelu\n", "utf-8")
    (tmp_path / "gaudi.py").write_text(
        f"{_CHANGING}import torch\nfrom habana_frameworks.torch.hpex import hmp\nhmp.convert()\n"
        "print(torch.nn.functional.gelu(torch.ones(2, device='hpu')).dtype)\n",
        "utf-8",
    )
    assert "torch.bfloat16" in _hmpx(tmp_path, "run", "--habana-shim", "--bf16", "low.txt", "gaudi.py")  # fmt: skip
    assert {each.name for each in tmp_path.iterdir()} - {"__pycache__"} == {
        "sub", "lint.py", "k.txt", "low.txt", "gaudi.py",
    }  # fmt: skip
    assert not any(os.scandir(tmp_path / "sub"))
