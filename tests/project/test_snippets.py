"""The documents' code runs: Python, commands, lists and policy files, and prints what is shown.

Blocks in Python run in their order, as one program; a ``text`` block right behind one is what it
prints. What a document takes for granted is made by ``snippets/assumed.py`` and ``snippets/NAME.py``, and files that it names lie in
``snippets/files``. Commands run, unless they take long or are of other programs; then it is checked that
they exist, and that hmpx knows their options.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx import policy
from hmpx.cli import entry
from hmpx.reports import Report
from tests import forks

from . import markdown
from .markdown import DOCUMENTS, ROOT

SNIPPETS = Path(__file__).parent / "snippets"
RUNNER = Path(__file__).with_name("run_snippets.py")

#: Outputs whose fractions come from a training: they may differ a little between machines.
ROUGH = {"tutorial": 0.2}

FRACTION = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def named_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the files that documents name."""
    made = tmp_path_factory.mktemp("named") / "files"
    shutil.copytree(SNIPPETS / "files", made)
    for name in ("report", "rank0", "rank1"):
        Report(()).to_json(made / f"{name}.json")
    for name in ("fp32", "bf16", "before", "after"):
        with hmpx.trace(made / f"{name}.hmpx"):
            torch.ones(4).exp()
    return made


@pytest.fixture
def folder(named_files: Path, tmp_path: Path) -> Path:
    """Returns a directory of the test's own with these files."""
    shutil.copytree(named_files, tmp_path, dirs_exist_ok=True)
    return tmp_path


def python(document: Path) -> list[markdown.Block]:
    return [block for block in markdown.blocks(document) if block.language == "python"]


def shown(document: Path) -> dict[int, str]:
    """Returns line of a block in Python -> what is shown right behind it."""
    found = {}
    before = None
    for block in markdown.blocks(document):
        if block.language == "text" and block.follows and before and before.language == "python":
            found[before.line] = block.text
        before = block
    return found


def assert_alike(actual: str, expected: str, tolerance: float | None) -> None:
    if tolerance is None:
        assert actual == expected
        return
    assert FRACTION.sub("#", actual).split() == FRACTION.sub("#", expected).split()
    numbers = [[float(number) for number in FRACTION.findall(text)] for text in (actual, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=tolerance)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "document", [each for each in DOCUMENTS if python(each)], ids=markdown.name
)
def test_python_runs_and_prints_what_is_shown(document: Path, folder: Path) -> None:
    """All blocks of a document, one after the other."""
    prelude = SNIPPETS / f"{document.stem}.py"
    outcomes = folder / "outcomes.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = forks.run(
        *(str(RUNNER), str(document), str(prelude), str(outcomes)), cwd=folder, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    printed = dict(json.loads(outcomes.read_text("utf-8")))
    for line, expected in shown(document).items():
        assert_alike(
            printed[line].replace(f"{folder.resolve()}/", ""), expected, ROUGH.get(document.stem)
        )


def test_outputs_are_shown() -> None:
    """So the test above compares something."""
    assert sum(len(shown(document)) for document in DOCUMENTS) > 8


@pytest.mark.sampled(3)
def test_the_tutorials_commands_use_what_its_program_wrote(tmp_path: Path) -> None:
    """In an empty directory but for a script, which then computes in the tutorial's low type."""
    tutorial = ROOT / "docs" / "tutorial.md"
    shutil.copy(SNIPPETS / "files" / "train.py", tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = (str(tutorial), str(SNIPPETS / "tutorial.py"), str(tmp_path / "outcomes.json"))
    run = forks.run(str(RUNNER), *program, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    texts = [text for _, text, _ in commands(tutorial) if text.startswith("hmpx ")]
    assert [text.split()[1] for text in texts] == ["check", "run"]
    for text in texts:
        words = text.replace("hmpx run", "hmpx run --verbose").split()[1:]
        run = forks.run("-m", "hmpx", *words, cwd=tmp_path, env=environment)
        assert run.returncode == 0, run.stdout + run.stderr
    assert "  to_fp16  " in run.stdout
    assert "  to_bf16  " not in run.stdout


# --- commands ------------------------------------------------------------------------------------

#: Commands of hmpx that take long, write outside of the directory or ask about the machine at length.
PARSED_ONLY = {"bench", "tune", "lint"}

#: Programs that are no part of the project; what follows them is for a person to try.
OTHERS = {".", "git", "mkdocs", "pre-commit", "source"}


def commands(document: Path) -> Iterator[tuple[int, str, str]]:
    """Yields line, command and what is shown of its output."""
    for block in markdown.blocks(document):
        if block.language == "console":
            for text in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = text.partition("\n")
                yield block.line, command, output
        elif block.language == "sh":
            for command in block.text.splitlines():
                yield block.line, command, ""


def helped() -> dict[str, str]:
    """Returns command -> what its ``--help`` says."""
    (commands,) = (
        action
        for action in entry.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {name: parser.format_help() for name, parser in commands.choices.items()}


COMMANDS = [
    *(
        pytest.param(command, output, id=f"{markdown.name(document)}:{line}-{number}")
        for document in DOCUMENTS
        for number, (line, command, output) in enumerate(commands(document))
    ),
    *(
        pytest.param(command.strip(), "", id=f"help-{name}-{number}")
        for name, text in helped().items()
        for number, command in enumerate(text.rpartition("example")[2].splitlines()[1:])
    ),
]


def test_each_command_of_hmpx_shows_an_example() -> None:
    """At the end of its help."""
    for name, text in helped().items():
        assert re.search(rf"\nexamples?:\n  (\S+ .*)?hmpx {name}\b", text), name


def test_the_commands_of_the_tasks_exist() -> None:
    """With their options; they stand in cells of a table and in sentences."""
    text = (ROOT / "docs" / "how_to.md").read_text("utf-8")
    found = re.findall(r"`hmpx ([a-z][\w-]*)( [^`]*)?`", text)
    assert {name for name, _ in found} <= {*helped()}
    assert len({name for name, _ in found}) > 10
    for name, options in found:
        if options:
            assert entry.parser().parse_args([name, *shlex.split(options)])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_commands_run(
    command: str, output: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of hmpx; of others it is checked that what they name is there."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        del words[0]
    if words[:1] == ["torchrun"] and "hmpx" in words:
        words = words[words.index("hmpx") :]
        assert entry.parser().parse_args(words[1:])
    elif words[:1] == ["hmpx"]:
        run_hmpx(words[1:], output, folder)
    elif words and words[0] in {"python", "python3", "torchrun"}:
        assert "-m" in words or any((ROOT / word).is_file() for word in words[1:])
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[([\w,-]+)\]", command):
            assert set(extra.split(",")) <= extras()
    else:
        assert not words or words[0] in OTHERS


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (table,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    return set(re.findall(r"^(\w+) = \[", table, re.M))


def run_hmpx(words: list[str], output: str, folder: Path) -> None:
    """Runs a command in a directory where the files are that it names."""
    words = words[: min(words.index(each) if each in words else len(words) for each in (">", ">>"))]
    checkpoints = {"--", "--state", "--model"} & {*words}  # and programs
    if words[0] in PARSED_ONLY or checkpoints:
        assert entry.parser().parse_args(words)
        return
    if words[0] == "check" and output:  # the faults that are shown
        (folder / "my_bf16.txt").write_text("matmul\nmatmull\nlinear\nsoftmax\n")
        (folder / "my_fp32.txt").write_text("softmax\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    run = forks.run("-m", "hmpx", *words, cwd=folder, env=environment)
    is_fault = words[0] == "diff" or (words[0] == "check" and bool(output))
    if words[0] == "draw" and words[-1].endswith(".svg") and shutil.which("dot") is None:
        assert (run.returncode, "graphviz's program dot" in run.stderr) == (2, True)
        return
    assert run.returncode == is_fault, run.stdout + run.stderr
    if output and words[0] != "doctor":  # of another machine
        assert (run.stdout + run.stderr).splitlines() == output.splitlines()


# --- lists and policy files ----------------------------------------------------------------------

#: A line of an op list, but for the words of prose.
LINE = re.compile(r"(@[\w-]+|-?[\w.*:]+)( +(\w+=\w+|float\w+|bfloat16|mx\w+))*( ; torch \S+ \S+)?")


def is_list(block: markdown.Block) -> bool:
    lines = [line.partition("#")[0].rstrip() for line in block.text.splitlines()]
    return block.language in {"", "text"} and all(LINE.fullmatch(line) for line in lines if line)


def data() -> Iterator[object]:
    for document in DOCUMENTS:
        for block in markdown.blocks(document):
            if block.language in {"yaml", "json"} or (is_list(block) and not block.follows):
                yield pytest.param(block, id=f"{markdown.name(document)}:{block.line}")


@pytest.mark.parametrize("block", [*data()])
def test_lists_and_policy_files_have_no_faults(block: markdown.Block, folder: Path) -> None:
    """But that libraries which are not installed have no functions."""
    if block.language == "yaml" and block.text.startswith("steps:"):
        import yaml

        action = yaml.safe_load((ROOT / ".github/actions/lint/action.yml").read_text("utf-8"))
        *_, step = yaml.safe_load(block.text)["steps"]
        assert "/.github/actions/lint@" in step["uses"]
        assert step["with"].keys() <= action["inputs"].keys()
        return
    if block.language == "yaml" and block.text.startswith("repos:"):
        import yaml

        hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
        (repository,) = yaml.safe_load(block.text)["repos"]
        offered = {hook["id"] for hook in hooks}
        assert {hook["id"] for hook in repository["hooks"]} <= offered
        return
    if "\nexpect:\n" in f"\n{block.text}":
        import yaml

        assert hmpx.expect(yaml.safe_load(block.text)).breaches == []
        return
    is_policy = block.language in {"yaml", "json"}
    kind = "policy" if is_policy else "low"
    path = folder / ("shown.yaml" if is_policy else "shown.txt")
    path.write_text(block.text, encoding="utf-8")
    faults = policy.check_files({kind: (str(path),)})
    assert [fault for fault in faults if "no library" not in fault] == []


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """No other language; `text` is output or a list, and `pycon` the example of a docstring."""
    kinds = {"", "text", "python", "pycon", "sh", "console", "yaml", "json", "ini"}
    unknown = [
        f"{markdown.name(document)}:{block.line}: {block.language}"
        for document in DOCUMENTS
        for block in markdown.blocks(document)
        if block.language not in kinds
    ]
    assert unknown == []
