"""What contributors and other repositories rely on: workflows, hooks, forms, the citation."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import hmpx
from hmpx import cli
from tests import forks

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


HOOKS = {hook["id"]: hook for hook in loaded(".pre-commit-hooks.yaml")}


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("lists/my_bf16.txt", "hmpx-check"),
        ("fp32.txt", "hmpx-check"),
        ("lists/fp16_ops.txt", "hmpx-check"),
        ("policy.yaml", "hmpx-check-policy"),
        ("serving/mine.policy.yml", "hmpx-check-policy"),
        ("tests/contract.yaml", "hmpx-check-policy"),
        ("requirements.txt", None),
        ("my_bf16.py", None),
        ("deployment.yaml", None),
        ("mypolicy.yaml", None),
    ],
)
def test_the_hooks_for_others_take_lists_and_policies(name: str, hook: str | None) -> None:
    """Lists by the names that `hmpx check` tells them by, policies by those of `hmpx schema --vscode`."""
    found = [each for each, known in HOOKS.items() if re.search(known["files"], name)]
    assert found == ([hook] if hook else [])


@pytest.mark.parametrize(
    ("hook", "name", "good", "bad"),
    [
        ("hmpx-check", "my_bf16.txt", "mm\n", "mm\nmatmull\n"),
        ("hmpx-check-policy", "policy.yaml", "low: [mm]\n", "low: [mm]\nlowe: [mv]\n"),
        (
            "hmpx-check-policy",
            "contract.yaml",
            "expect:\n- {op: mm, compute: float32}\n",
            "expect:\n- {op: mm, computed: float32}\n",
        ),
    ],
)
def test_the_hooks_for_others_find_faults(
    *,
    hook: str,
    name: str,
    good: str,
    bad: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By their commands, with file and line; a good file passes, alone and beside another."""
    monkeypatch.chdir(tmp_path)
    program, *command = shlex.split(HOOKS[hook]["entry"])
    assert program == "hmpx"
    Path(name).write_text(good, "utf-8")
    assert cli.main([*command, name]) == 0
    Path(f"bad.{name}").write_text(bad, "utf-8")
    for names in ([f"bad.{name}"], [name, f"bad.{name}"]):
        capsys.readouterr()
        assert cli.main([*command, *names]) == 1
        assert f"bad.{name}:2: unknown" in capsys.readouterr().out


# --- the action that lints -----------------------------------------------------------------------

ACTION = loaded(".github/actions/lint/action.yml")
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}


def run_step(name: str, folder: Path, commands: dict[str, str], **inputs: str) -> tuple[int, str]:
    """Runs a step as GitHub does, where these commands are shell scripts; returns its status and what it prints."""
    step, environment = STEPS[name], {"GITHUB_ACTION_PATH": str(ROOT / ".github/actions/lint")}
    for variable, value in step["env"].items():
        (key,) = re.fullmatch(r"\$\{\{ inputs\.([a-z-]+) \}\}", value).groups()  # type: ignore[union-attr]
        environment[variable] = inputs.get(
            key.replace("-", "_"), ACTION["inputs"][key].get("default", "")
        )
    for command, text in commands.items():
        path = folder / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n", "utf-8")
        path.chmod(0o755)
    (folder / "step.sh").write_text(step["run"], "utf-8")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
        cwd=folder,
        env={**os.environ, **environment, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert step["shell"] == "bash"
    return done.returncode, done.stdout


def test_the_action_says_what_it_takes() -> None:
    """Every input is used, and none of them inside of a script, where bash would run it."""
    assert ACTION["runs"]["using"] == "composite"
    steps = ACTION["runs"]["steps"]
    used = [value for step in steps for value in (step.get("env") or step["with"]).values()]
    assert sorted(used) == sorted(f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"])
    assert all("${{" not in step["run"] for step in STEPS.values())
    assert all(each["description"] for each in ACTION["inputs"].values())


def test_the_action_installs_the_hmpx_that_it_is_of(tmp_path: Path) -> None:
    for given, words in (("", []), ("some file.txt", ["-r", "some file.txt"])):
        status, out = run_step(
            "Install hmpx", tmp_path, {"python": 'printf "%s\\n" "$@"'}, requirements=given
        )
        *before, source = out.splitlines()
        assert (status, before) == (0, ["-m", "pip", "install", *words])
        assert Path(source).resolve() == ROOT


@pytest.mark.parametrize(
    ("fail_on", "status", "expected"),
    [("findings", 0, 0), ("findings", 1, 1), ("findings", 2, 2), ("nothing", 0, 0),
     ("nothing", 1, 0), ("nothing", 2, 2), ("finding", 0, 2)],
)  # fmt: skip
def test_the_action_fails_as_asked(
    fail_on: str, status: int, expected: int, tmp_path: Path
) -> None:
    commands = {"hmpx": f'printf "<%s>" "$@"; exit {status}'}
    found, out = run_step(
        "Run the program",
        tmp_path,
        commands,
        script="my train.py",
        arguments="--steps 3 $(touch pwned)",
        options="--baseline known.txt",
        fail_on=fail_on,
    )
    assert found == expected
    assert out.startswith(
        "<lint><--output-format><github><--baseline><known.txt><my train.py><--steps><3><$(touch><pwned)>"
    )
    assert not (tmp_path / "pwned").exists()


def test_the_action_annotates_lines(tmp_path: Path) -> None:
    program = "import torch\nt = torch.arange(1000).to(torch.bfloat16)\n"
    (tmp_path / "train.py").write_text(program, "utf-8")
    printed = {"hmpx": 'printf "%s\\n" "$@"'}
    _, command = run_step("Run the program", tmp_path, printed, script="train.py")
    done = forks.run("-m", "hmpx", *command.splitlines(), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("::warning file=train.py,line=2,title=HP102 rounded integers::")


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


def test_the_conda_recipe_is_in_step_with_the_project() -> None:
    """Its version, what it is built with and what it needs."""
    recipe, project = (
        loaded("conda/recipe/recipe.yaml"),
        (ROOT / "pyproject.toml").read_text("utf-8"),
    )
    assert recipe["context"]["version"] == hmpx.__version__
    (built_with,) = re.findall(r"^requires = (.*)$", project, re.MULTILINE)
    (needed,) = re.findall(r"^dependencies = (.*)$", project, re.MULTILINE)
    (python,) = re.findall(r'^requires-python = "(.*)"$', project, re.MULTILINE)
    names = {"torch": "pytorch", "PyYAML": "pyyaml", "hatchling": "hatchling"}
    build, run = (
        {
            re.sub(r"^(\w+)", lambda found: f"{names[found[0]]} ", each)
            for each in ast.literal_eval(listed)
        }
        for listed in (built_with, needed)
    )
    assert {*recipe["requirements"]["run"]} == {*run, f"python {python}"}
    torch = {each for each in run if each.startswith("pytorch")}
    assert {*recipe["requirements"]["host"]} == {*build, *torch, "pip", f"python {python}"}


def test_the_citation_is_of_this_version() -> None:
    """As a release has it."""
    citation = loaded("CITATION.cff")
    assert str(citation["version"]) == hmpx.__version__
    assert f"## {hmpx.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
