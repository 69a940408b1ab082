"""What contributors and other repositories rely on: workflows, hooks, forms, the citation."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import hmpx
from hmpx import cli

from .markdown import ROOT


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def test_ci_runs_the_gate_on_each_version_of_python() -> None:
    """From the lowest that is supported."""
    (job,) = loaded(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert {"run": "python scripts/test.py"} in job["steps"]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'requires-python = ">=3.10"' in project
    gate = (ROOT / "scripts" / "test.py").read_text("utf-8")
    assert set(re.findall(r'"--python-version", "([\d.]+)"', gate)) == {"3.10", "3.13"}


def test_each_night_every_case_runs() -> None:
    """Of the tests of which the gate draws a sample."""
    (job,) = loaded(".github/workflows/nightly.yml")["jobs"].values()
    assert {"run": "python scripts/test.py --whole"} in job["steps"]


def test_hooks_run_programs_that_the_extra_installs() -> None:
    """And the shipped lists, each set by itself, have no faults."""
    (local,) = loaded(".pre-commit-config.yaml")["repos"]
    entries = {hook["id"]: hook["entry"] for hook in local["hooks"]}
    for entry in entries.values():
        program = entry.split()[0]
        is_there = shutil.which(program) or shutil.which(program, path=Path(sys.executable).parent)
        assert is_there, entry
    assert entries.keys() >= {"ruff-format", "ruff-check", "codespell", "lint-imports"}
    for folder in sorted(path for path in (ROOT / "lists").iterdir() if path.is_dir()):
        assert cli.main(["check", str(folder / "bf16.txt"), str(folder / "fp32.txt")]) == 0


@pytest.mark.parametrize(
    ("name", "is_list"),
    [
        ("lists/my_bf16.txt", True),
        ("fp32.txt", True),
        ("lists/fp16_ops.txt", True),
        ("requirements.txt", False),
        ("my_bf16.py", False),
    ],
)
def test_the_hook_for_others_takes_op_lists(name: str, is_list: bool) -> None:
    """By the names that `hmpx check` tells them by."""
    (hook,) = loaded(".pre-commit-hooks.yaml")
    assert (hook["id"], hook["entry"]) == ("hmpx-check", "hmpx check")
    assert bool(re.search(hook["files"], name)) is is_list


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem
)
def test_forms_ask_for_something(form: Path) -> None:
    """With an id each, as GitHub requires."""
    found = yaml.safe_load(form.read_text("utf-8"))
    assert {"name", "description", "body"} <= found.keys()
    ids = [field["id"] for field in found["body"]]
    assert len(set(ids)) == len(ids) > 0
    assert all(field["attributes"]["label"] for field in found["body"])


def test_the_citation_is_of_this_version() -> None:
    """As a release has it."""
    citation = loaded("CITATION.cff")
    assert str(citation["version"]) == hmpx.__version__
    assert f"## {hmpx.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
