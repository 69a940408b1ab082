"""The command line: what it prints, and its exit status; ``run`` against python itself."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import hmpx
from hmpx import cli, ops
from hmpx.compute import capabilities as capability
from hmpx.compute import nodes_in_use
from hmpx.policy import lists as oplists
from hmpx.torch_internals import torch_part as torch_parts
from tests import forks


class Outcome(NamedTuple):
    """Exit status and output of a process."""

    status: int
    out: str
    err: str


ROOT = Path(__file__).parents[2]
HMPX = [sys.executable, "-m", "hmpx"]
RUN = [*HMPX, "run"]
PYTHON = [sys.executable]


def finish(command: list[str], directory: Path) -> Outcome:
    """Returns what ``command`` gives when it is run in ``directory``."""
    finished = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return Outcome(finished.returncode, finished.stdout, finished.stderr)


def finish_fork(*arguments: str, directory: Path) -> Outcome:
    """Returns what ``python ARGUMENTS`` gives in ``directory``, from a process that has torch already."""
    done = forks.run(*arguments, cwd=directory)
    return Outcome(done.returncode, done.stdout, done.stderr)


def finish_hmpx(*arguments: str, directory: Path) -> Outcome:
    """Returns what ``hmpx ARGUMENTS`` gives."""
    return finish_fork("-m", "hmpx", *arguments, directory=directory)


def write(directory: Path, name: str, text: str) -> str:
    """Writes ``text`` to a file in ``directory`` and returns its name there."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return name


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty directory, the current one during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- check -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.py", "train.py is not an op list: hmpx lint runs a program"),
        ("steps.jsonl", "steps.jsonl is not an op list: hmpx diff-runs compares two traces"),
        ("last.pt", "last.pt is not an op list: hmpx check --state compares"),
    ],
)
def test_check_names_the_command_for_other_files(
    name: str, said: str, capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    write(directory, name, "x = 1\n")
    with pytest.raises(SystemExit):
        cli.main(["check", name])
    assert said in capsys.readouterr().err


def test_check_judges_a_contract_by_its_name(
    capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    write(directory, "my.contract.yaml", "rules:\n- op: linear\n")
    assert cli.main(["check", "my.contract.yaml"]) == 1
    assert "unknown key 'rules' of a contract (expect)" in capsys.readouterr().out


def test_check_prints_every_fault_with_file_and_line(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown names, doubled lines and conflicts are all found in one go."""
    write(directory, "my_bf16.txt", "matmul\nmatmull\nmatmul\nsoftmax\n")
    write(directory, "my_fp32.txt", "div\nF.softmax\n")
    assert cli.main(["check", "my_bf16.txt", "my_fp32.txt", "absent.txt"]) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "absent.txt: no such file; give the path of an op list",
        "my_bf16.txt:2: unknown op 'matmull'; did you mean 'matmul'?",
        "my_bf16.txt:3: 'matmul' is already in this list, at my_bf16.txt:1; "
        "remove one of the lines",
        "my_fp32.txt:2: 'F.softmax' is in two lists: it is the op 'softmax', as 'softmax' at "
        "my_bf16.txt:4 is; keep one of the lines",
    ]


def test_check_counts_files_and_ops_of_clean_lists(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clean lists give one line and status 0."""
    write(directory, "my_bf16.txt", "matmul\n")
    write(directory, "my_fp32.txt", "softmax\ndiv\n")
    assert cli.main(["check", "my_bf16.txt", "my_fp32.txt"]) == 0
    assert cli.main(["check", "my_bf16.txt"]) == 0
    assert capsys.readouterr().out == "2 files, 3 ops: no faults\n1 file, 1 op: no faults\n"


def test_check_reads_policy_files(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML and JSON beside op lists; ops of sections count, and so do all unknown names."""
    write(directory, "p.yaml", "low: [mm]\nsections:\n- ndim: 2\n  fp32: [exp, tan]\n")
    write(directory, "gaudi_config.json", '{"hmp_bf16_ops": ["mm"]}')
    write(directory, "my_bf16.txt", "sum accumulate=float32 output=float32\nconv2d float16\n")
    assert cli.main(["check", "p.yaml", "gaudi_config.json", "my_bf16.txt"]) == 0
    assert capsys.readouterr().out == "3 files, 6 ops: no faults\n"
    write(directory, "bad.yml", "low: [matmull, mm, mm]\nfp32:\n- soft_max\n")
    write(directory, "worse.yaml", "low: [mm]\nfp32: [mm]\nlowe: 1\n")
    write(directory, "bad.json", '{\n"hmp_bf16_op": []}')
    write(directory, "bad.txt", "mm float31\n")
    assert cli.main(["check", "bad.yml", "worse.yaml", "bad.json", "bad.txt", "none.yaml"]) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "bad.json:2: unknown key 'hmp_bf16_op' of a Gaudi configuration; did you mean 'hmp_bf16_ops'?",
        "bad.txt:1: low_precision_type must be torch.bfloat16 or torch.float16, or a number format, "
        "not 'float31'; did you mean 'float32'?",
        "bad.yml:1: 'mm' is already in this list, at bad.yml:1; remove one of the lines",
        "bad.yml:1: unknown op 'matmull'; did you mean 'matmul'?",
        "bad.yml:3: unknown op 'soft_max'; did you mean 'softmax'?",
        "none.yaml: no such file; give the path of a policy file",
        "worse.yaml:2: 'mm' is in two lists: it is the op 'mm', as 'mm' at worse.yaml:1 is; keep one "
        "of the lines",
        "worse.yaml:3: unknown key 'lowe' of a policy; did you mean 'low'?",
    ]


# --- ops ---------------------------------------------------------------------------------------


def table(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Returns the rows, without the header, that ``hmpx ops`` prints, cell by cell."""
    assert cli.main(["ops", *arguments]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    starts = [header.index(title) for title in ("op", "policy", "reason", "call sites")]
    ends = [*starts[1:], None]
    return [[row[a:b].strip() for a, b in zip(starts, ends, strict=True)] for row in rows]


def test_ops_shows_policy_reason_and_call_sites(capsys: pytest.CaptureFixture[str]) -> None:
    """The row of an op says what is done, by which line, and where the op is called."""
    name, policy, reason, sites = table(["softmax"], capsys)[0]
    assert (name, policy) == ("softmax", "FP32")
    assert reason.startswith("lists/hmpx/fp32.txt:")
    assert sites.split(", ") == [
        "torch.softmax",
        "torch.Tensor.softmax",
        "torch.special.softmax",
        "torch.nn.functional.softmax",
    ]


def test_ops_holds_every_op_a_list_may_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a pattern the table is complete, and every op has a call site."""
    rows = table([], capsys)
    torchs = {name for name in ops.table() if ops.is_castable(name)}
    in_default = {"torch.nn.attention.flex_attention.flex_attention"}
    assert {row[0] for row in rows} == torchs | in_default | set(oplists.of_libraries().ops)
    assert all(row[3] for row in rows)


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("truediv", "truediv"),
        ("F.gelu", "gelu"),
        ("torch.nn.functional.softmax", "softmax"),
        ("divide", "div"),
        ("Tensor.__iadd__", "iadd"),
        ("aten::nll_loss2d", "nll_loss"),
    ],
)
def test_ops_resolves_spellings(
    pattern: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any way to write an op finds it, before the ops that merely contain the pattern."""
    assert table([pattern], capsys)[0][0] == first


def test_ops_takes_globs_and_parts_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    """A glob matches whole names or call sites, a plain pattern any part of a name."""
    convs = {"conv1d", "conv2d", "conv3d"}
    assert {row[0] for row in table(["conv?d"], capsys)} == convs
    assert convs < {row[0] for row in table(["conv"], capsys)}
    assert "linalg_inv" in {row[0] for row in table(["torch.linalg.*"], capsys)}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("sofmax", "hmpx: no op matches 'sofmax'; did you mean 'softmax'?\n"),
        ("zzz", "hmpx: no op matches 'zzz'; hmpx ops without a pattern shows all\n"),
        (
            "is_contiguous",
            "hmpx: 'is_contiguous' computes nothing from tensors, so there is nothing to cast\n",
        ),
    ],
)
def test_ops_says_why_nothing_matches(
    pattern: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern without a match gives a message on stderr and status 1."""
    assert cli.main(["ops", pattern]) == 1
    assert capsys.readouterr() == ("", message)


def test_ops_follows_the_list_options(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options change what the table says: another type, another level, another file, another set."""
    write(directory, "bf16.txt", "softmax\n")
    assert table(["--low-precision-type", "float16", "linear"], capsys)[0][1] == "LOW fp16"
    assert table(["--opt-level", "O2", "softplus"], capsys)[0][1] == "FP32"
    assert table(["--lists", ".", "softmax"], capsys)[0][1:3] == ["LOW bf16", "bf16.txt:1"]
    write(directory, "mine.txt", "erf\n")
    assert table(["--fp16", "mine.txt", "erf"], capsys)[0][1:3] == ["LOW fp16", "mine.txt:1"]


def test_ops_shows_what_a_policy_file_says(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dtypes, FOLLOW, and below an op what sections do with it."""
    write(
        directory,
        "p.yaml",
        """\
lists: none
low: [sum accumulate=float32 output=float64, conv2d float16]
follow: [avg_pool2d]
sections:
- {module: head, fp32: [sum], pass: [conv2d]}
- {mode: eval, low_precision_type: float16, low: [sum]}
""",
    )
    rows = table(["--policy", "p.yaml", "sum"], capsys)
    assert [row[:3] for row in rows[:3]] == [
        ["sum", "LOW bf16 accumulate=fp32 output=fp64", "p.yaml:2"],
        ["", "FP32", "p.yaml:5"],
        ["", "LOW fp16", "p.yaml:6"],
    ]
    assert [row[3] for row in rows[1:3]] == ["", ""]
    rows = table(["--policy", "p.yaml", "F.conv2d"], capsys)
    assert [row[:3] for row in rows[:2]] == [
        ["conv2d", "LOW fp16", "p.yaml:2"],
        ["", "-", "p.yaml:5"],
    ]
    assert table(["--policy", "p.yaml", "avg_pool2d"], capsys)[0][1] == "FOLLOW"
    assert cli.main(["ops", "--policy", "p.yaml", "--bf16", "x.txt"]) == 2
    assert capsys.readouterr().err == (
        "hmpx: policy holds every decision; leave out lists, paths and opt_level\n"
    )


# --- errors and help ---------------------------------------------------------------------------


def test_completion_knows_commands_options_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each shell; bash says so in a program that bash reads."""
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh", "tcsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "doctor" in script and "habana-shim" in script
        if shell == "bash":
            done = subprocess.run(["bash", "-n"], input=script, text=True, check=False)
            assert done.returncode == 0
            assert "_shtab_hmpx_check_pos_0_COMPGEN=_shtab_compgen_files" in script


@pytest.mark.parametrize(
    "command",
    ["run", "report", "plan", "tune", "check", "ops", "doctor", "completion"],
)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help explains its exit status and gives an example."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "exit status:" in text
    assert f"  hmpx {command} " in text.partition("example")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune"],
        ["check"],
        ["run"],
        ["run", "-m"],
        ["run", "--verbose", "--verbose-once", "x.py"],
        ["run", "--opt-level", "O3", "x.py"],
    ],
)
def test_wrong_arguments_give_usage_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the parser refuses ends in the usage and status 2."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hmpx")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "To start: hmpx run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checks", "x.txt"], "there is no command 'checks'; did you mean 'check'?"),
        (["train.py"], "there is no command 'train.py'; did you mean `hmpx run train.py`?"),
        (
            ["explain", "mm"],
            "in Python it is hmpx.explain(), on the command line hmpx ops --why OP",
        ),
        (["freeze"], "there is no command 'freeze'; in Python it is hmpx.freeze()"),
        (["xyzzy"], "there is no command 'xyzzy'; commands are run, report, compare"),
        (["run", "--dtype", "x.py"], "did you mean '--low-precision-type'?"),
        (["run", "--verbose=once", "x.py"], "argument --verbose: it takes no value, not 'once'"),
    ],
)
def test_a_wrong_word_gets_a_hint(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_shipped_lists_are_shown_copied_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hmpx check DIR` reads the lists of a directory, without reports in it."""
    folder = str(tmp_path / "mine")
    assert cli.main(["lists"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 20
    assert cli.main(["lists", "lean", "--copy", folder]) == 0
    assert cli.main(["lists", "--copy", folder]) == 2
    (tmp_path / "mine" / "report.txt").write_text("not a list\n")
    assert cli.main(["check", folder, f"{folder}/report.txt"]) == 0
    assert cli.main(["check", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("3 files, ")
    assert "is there already; name another directory" in printed.err
    assert "holds neither bf16.txt" in printed.err


def test_an_unknown_option_is_answered_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With the usage of the command, and the nearest option."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--verbos", "x.py"])
    assert caught.value.code == 2
    usage, _, message = capsys.readouterr().err.rpartition("hmpx run: error: ")
    assert usage.startswith("usage: hmpx run [options] SCRIPT")
    assert message == "unrecognized arguments: --verbos; did you mean '--verbose'?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "absent.py"], "absent.py: no such file; give the path of a Python script"),
        (["run", "--", "absent.py"], "absent.py: no such file; give the path of a Python script"),
        (
            ["run", "--bf16", "absent.txt", "x.py"],
            "absent.txt: no such file; give the path of an op list",
        ),
        (
            ["run", "--strict", "--bf16", "bad.txt", "x.py"],
            "bad.txt:1: unknown op 'matmull'; did you mean 'matmul'?",
        ),
        (
            ["ops", "--strict", "--bf16", "bad.txt"],
            "bad.txt:1: unknown op 'matmull'; did you mean 'matmul'?",
        ),
        (
            ["run", "--device-types", "cpu,cudo", "x.py"],
            "device_types: torch has no device type 'cudo'; did you mean 'cuda'?",
        ),
        (
            ["run", "-m", "absent_module"],
            "-m absent_module: no such module; give a name that python -m can run",
        ),
        (["run", "."], ".: no __main__.py in it; give the path of a Python script"),
    ],
)
def test_errors_are_lines_on_stderr_and_status_2(
    arguments: list[str],
    message: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is missing or wrong is said in one line, and nothing is run."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(directory, "x.py", "raise AssertionError('must not run')")
    write(directory, "bad.txt", "matmull\n")
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"hmpx: {message}\n")


# --- run ---------------------------------------------------------------------------------------

REPORT = """
import json, pickle, sys, types
import neighbour
from pathlib import Path

class Pickled:
    def __eq__(self, other):
        return type(other) is Pickled

main = sys.modules["__main__"]
assert main.__dict__ is globals() and isinstance(main, types.ModuleType)
assert pickle.loads(pickle.dumps(Pickled())) == Pickled()
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "file": __file__,
    "name": __name__,
    "package": __package__,
    "spec": __spec__ and [__spec__.name, __spec__.origin],
    "loader": type(__loader__).__name__,
    "builtins": str(__builtins__),
    "doc": __doc__,
    "cached": globals().get("__cached__"),
    "code": sys._getframe().f_code.co_filename,
}))
"""


def test_run_is_like_python(directory: Path) -> None:
    """A script, a linked one, a directory and a module see what python would show them."""
    write(directory, "script.py", REPORT)
    write(directory, "neighbour.py", "")
    write(directory, "package/__main__.py", REPORT)
    write(directory, "package/neighbour.py", "")
    (directory / "links").mkdir()
    (directory / "links" / "link.py").symlink_to("../script.py")
    programs = [
        ["script.py", "--verbose", "-m", "--", "x"],
        ["links/link.py"],
        ["package", "--help"],
        ["-m", "package", "-m", "y"],
    ]
    for program in programs:
        actual = finish_hmpx("run", *program, directory=directory)
        expected = finish([*PYTHON, *program], directory)
        assert (expected.status, expected.err) == (actual.status, actual.err) == (0, "")
        assert json.loads(actual.out) == json.loads(expected.out)


def test_run_ends_as_python_does(directory: Path) -> None:
    """Exit status and stderr are python's: sys.exit, interrupts, exceptions, syntax errors."""
    write(directory, "number.py", "import sys\nsys.exit(7)")
    write(directory, "text.py", "import sys\nsys.exit('bye')")
    write(directory, "interrupt.py", "def f():\n    raise KeyboardInterrupt\nf()")
    write(directory, "syntax.py", "x = (\n")
    write(directory, "hook.py", "import sys\nsys.excepthook = lambda *a: print(a[1])\n1 / 0")
    write(directory, "bad_hook.py", "import sys\nsys.excepthook = lambda *a: a[9]\n1 / 0")
    names = sorted(path.name for path in directory.iterdir())
    outcomes = {name: finish_hmpx("run", name, directory=directory) for name in names}
    outcomes["interrupt.py"] = finish([*RUN, "interrupt.py"], directory)  # the interpreter's status
    for name, actual in outcomes.items():
        assert actual == finish([*PYTHON, name], directory), name
    statuses = {name: outcome.status for name, outcome in outcomes.items()}
    assert statuses["number.py"] == 7
    assert statuses["text.py"] == statuses["syntax.py"] == statuses["hook.py"] == 1
    if os.name == "posix":
        assert statuses["interrupt.py"] == -signal.SIGINT


def test_run_converts_by_the_lists_given(directory: Path) -> None:
    """The script's ops cast as the lists say; warnings and the log are lines of their own."""
    write(directory, "my_bf16.txt", "softmax\nsoftmaxx\n")
    write(directory, "my_fp32.txt", "tanh\n")
    script = write(
        directory,
        "script.py",
        "import torch\nx = torch.ones(2, 2)\nprint(torch.softmax(x, 0).dtype, (x @ x).dtype)\n",
    )
    options = ["--bf16", "my_bf16.txt", "--fp32", "my_fp32.txt", "--device-types", "cpu,cuda"]
    options += ["--legalize", "never"]
    actual = finish_hmpx("run", *options, "--verbose-once", script, directory=directory)
    assert actual.status == 0
    assert actual.err.splitlines() == [
        "hmpx: warning: left out of the op lists:",
        "hmpx:   my_bf16.txt:2: unknown op 'softmaxx'; did you mean 'softmax'?",
    ]
    log, *_, output = actual.out.splitlines()
    assert output == "torch.bfloat16 torch.float32"
    assert log.startswith("casting  softmax(fp32)  to_bf16  LOW by my_bf16.txt:1  at ")
    assert log.endswith("script.py:3")


def test_run_converts_by_a_policy_file(directory: Path) -> None:
    """Lists, sections and accumulate dtypes; a traceback shows no frame of hmpx there either."""
    write(
        directory,
        "p.yaml",
        """\
lists: none
low: [matmul accumulate=float32 output=float32, softmaxx]
sections: [{module_class: Linear, low: [linear accumulate=float32]}]
""",
    )
    script = write(
        directory,
        "script.py",
        "import torch\nx = torch.ones(2, 2)\n"
        "print((x @ x).dtype, torch.nn.Linear(2, 2)(x).dtype)\n"
        "torch.nn.Linear(2, 2)(torch.ones(3, 3) @ torch.ones(3, 3))\n",
    )
    expected = finish_fork(script, directory=directory)
    options = ["--policy", "p.yaml", "--device-types", "cpu,cuda"]
    actual = finish_hmpx("run", *options, script, directory=directory)
    assert actual.status == 1
    assert actual.out == "torch.float32 torch.bfloat16\n"
    warning, unknown, *traceback = actual.err.splitlines()
    assert warning == "hmpx: warning: left out of the op lists:"
    assert unknown.startswith("hmpx:   p.yaml:2: unknown op 'softmaxx'; did you mean ")
    assert traceback[:-1] == expected.err.splitlines()[:-1]  # the message may speak of dtypes
    write(directory, "bad.yaml", "lowe: 1\n")
    assert finish_hmpx("run", "--policy", "bad.yaml", script, directory=directory) == Outcome(
        2, "", "hmpx: bad.yaml:1: unknown key 'lowe' of a policy; did you mean 'low'?\n"
    )


# --- doctor -------------------------------------------------------------------------------------


def test_doctor_lists_what_stays_uncast(tmp_path: Path) -> None:
    """With the path to it and the remedy; a status that scripts can use."""
    (tmp_path / "early.py").write_text(
        "import torch.nn.functional as F\n"
        "LAYERS = {'relu': F.relu, 'linear': F.linear}\n"
        "class Block:\n"
        "    project = staticmethod(F.linear)\n"
    )
    (tmp_path / "clean.py").write_text("import torch.nn.functional as F\n")
    early, clean, missing, plain = (
        finish_hmpx("doctor", *modules, directory=tmp_path)
        for modules in (["early"], ["clean"], ["none"], [])
    )
    assert (early.status, early.err) == (1, "")
    capabilities = plain.out.splitlines()[4:]
    assert early.out.splitlines()[1:3] == [
        f"relies on {len(torch_parts.parts())} parts of torch that it does not document: "
        "all as expected",
        "casts tensors on: cpu",
    ]
    assert early.out.splitlines()[4 + len(capabilities) :] == [
        "early.Block.project keeps <built-in function linear>, which is not cast",
        "take these functions from torch where they are called, or after hmpx.convert()",
    ]
    assert (clean.status, clean.err) == (0, "")
    assert clean.out.splitlines()[4 + len(capabilities) :] == ["1 module: nothing stays uncast"]
    assert (missing.status, missing.out) == (2, "")
    assert missing.err == "hmpx: can't import 'none': No module named 'none'\n"
    assert (plain.status, plain.err) == (0, "")
    assert plain.out.splitlines()[:4] == early.out.splitlines()[:4]


def test_doctor_shows_what_the_machine_does_natively(tmp_path: Path) -> None:
    """What torch reports of each device's hardware, and each kind of op as measured."""
    actual = finish_hmpx("doctor", "--low-precision-type", "float16", directory=tmp_path)
    assert (actual.status, actual.err) == (0, "")
    kernels, nodes, float8, said, what, head, *rows = actual.out.splitlines()[3:]
    assert kernels.startswith("compiled kernels of number formats: ")
    assert nodes.startswith("compiled nodes of linear: ")
    assert float8 == "products in float8: emulated, no device has them"
    assert re.fullmatch(r"float16 on cpu: torch reports that the hardware (has|lacks) it", said)
    assert (
        what
        == "  time of the native kernel divided by that of fp32 with casts; slow kernels are not used"
    )
    assert head.split() == ["ops", "inference", "training"]
    assert [row.split()[0] for row in rows] == list(capability.KINDS)
    for row in rows:
        assert re.fullmatch(r" +\w+( +\d+\.\d){2}( +slow)?", row)


def test_doctor_shows_whether_nodes_are_in_use(tmp_path: Path) -> None:
    """And otherwise why not, and the command that gets them."""
    found = nodes_in_use()
    shown = str(found.path) if found.path else f"none, torch has its own: {found.fault}"
    actual = finish_hmpx("doctor", directory=tmp_path)
    [line] = [each for each in actual.out.splitlines() if each.startswith("compiled nodes of")]
    assert line.startswith(f"compiled nodes of linear: {shown}")
    assert ("pip install --no-build-isolation" in line) is (found.path is None)


def test_doctor_gives_data(tmp_path: Path) -> None:
    """The same as the text, for scripts."""
    (tmp_path / "early.py").write_text(
        "import torch\nclass Block:\n    f = staticmethod(torch.mm)\n"
    )
    actual = finish_hmpx("doctor", "--json", "early", directory=tmp_path)
    assert (actual.status, actual.err) == (1, "")
    found = json.loads(actual.out)
    assert found["hmpx"] == hmpx.__version__
    assert found["torch"] == torch.__version__
    assert found["low_precision_type"] == "bfloat16"
    assert [each["place"] for each in found["uncast"]] == ["early.Block.f"]
    assert found["devices"]["cpu"]["native_over_fp32"].keys() == set(capability.KINDS)
    assert all(part["fault"] == "" for part in found["parts"])


_NATIVE, _SLOW, _MISSING = (0.8, 0.9), (0.7, 16.14), (math.inf, math.inf)


def test_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its bits, range and precision; and they may stand for the low type."""
    assert cli.main(["ops", "--formats"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {name: cells for name, *cells in lines[1:]}
    assert rows["float8_e4m3fn"] == ["8", "448", "0.125", "0.015625", "0.00195312"]
    assert rows["posit16_1"] == ["16", "2.68435e+08", "0.000244141", "3.72529e-09", "3.72529e-09"]
    for name in ("posit16_1", "e6m3"):  # registered, or as long as its name says
        assert cli.main(["ops", "--low-precision-type", name, "F.linear"]) == 0
        assert f"linear LOW {name}" in " ".join(capsys.readouterr().out.split())
