"""Each example runs as its docstring says, and shows what it promises to show."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hmpx import policy
from tests import forks

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))

#: One thread, because tests run in parallel; any warning is an error but torchviz's own.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WARNINGS = ("-W", "error", "-W", "ignore:distutils Version classes:DeprecationWarning")


def run(*command: str, cwd: Path) -> str:
    """Returns what ``python COMMAND`` prints; nothing may go to stderr."""
    result = forks.run(*WARNINGS, *command, cwd=cwd, env=ENVIRONMENT)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


def run_anew(*command: str, cwd: Path) -> str:
    """As `run`, in a process that imports torch and hmpx itself: their imports may not warn either."""
    result = subprocess.run(
        [sys.executable, *WARNINGS, *command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    return run(str(EXAMPLES / name), *arguments, cwd=cwd)


def gpt_losses(output: str) -> list[tuple[float, float]]:
    """Returns the (fp32, hmpx) losses that train_gpt.py printed."""
    rows = re.findall(r"^ +\d+ +(\d+\.\d+) +(\d+\.\d+) +[+-]\d+\.\d+%$", output, re.MULTILINE)
    return [(float(fp32), float(mixed)) for fp32, mixed in rows]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_docstring_names_the_command(script: Path) -> None:
    """The docstring of every example holds the command that runs it from the repository."""
    documentation = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    relative = script.relative_to(EXAMPLES.parent).as_posix()
    assert re.search(
        rf"^    (python|hmpx run|torchrun) (.* )?{re.escape(relative)}", documentation, re.M
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_example_is_run(script: Path) -> None:
    """No example is left out: this file or another one of the tests runs it."""
    tests = "".join(
        path.read_text("utf-8") for path in Path(__file__).parents[1].glob("*/test_*.py")
    )
    assert f'{script.name}"' in tests


def test_lists_have_no_faults() -> None:
    """The list files beside the examples pass what `hmpx check` checks, pair by pair."""
    pairs = sorted(
        path.parent / path.name[: -len("bf16.txt")] for path in EXAMPLES.rglob("*bf16.txt")
    )
    assert len(pairs) == 2
    for stem in pairs:
        files = {"low": (f"{stem}bf16.txt",), "fp32": (f"{stem}fp32.txt",)}
        assert policy.check_files(files) == []


def test_hmp_linear(tmp_path: Path) -> None:
    """The loss falls, the output is bf16, the weight stays fp32."""
    output = run_anew(str(EXAMPLES / "hmp_linear.py"), cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]
    assert "output torch.bfloat16, weight torch.float32" in output
    assert re.search(r"^linear: lists/hmpx/bf16.txt:\d+$", output, re.M)
    assert "after revert: output torch.float32" in output


def test_train_gpt(tmp_path: Path) -> None:
    """The mixed-precision losses follow those of fp32, but aren't the same; both fall.

    The sample of decisions has the op, its input dtypes, the outcome, and the line that says so.
    """
    output = run_example("train_gpt.py", "--steps", "30", cwd=tmp_path)
    losses = gpt_losses(output)
    assert len(losses) == 11
    assert any(fp32 != mixed for fp32, mixed in losses)
    for fp32, mixed in losses:
        assert mixed == pytest.approx(fp32, rel=0.02)  # bf16 has 8 bits, 2**-8 a rounding
    assert losses[-1][0] < 0.8 * losses[0][0]
    for decision in (
        r"layer_norm\(fp32, fp32, fp32\) +to_fp32 +FP32 by lists/hmpx/fp32.txt:\d+ ",
        r"linear\(fp32, fp32, fp32\) +to_bf16 +LOW by lists/hmpx/bf16.txt:\d+ +in blocks.0.atten",
        r"matmul\(fp32, bf16\) +to_bf16 +LOW by lists/hmpx/bf16.txt:\d+ +in blocks.0.attention ",
        r"add\(fp32, bf16\) +to_fp32 +WIDEST by lists/hmp/widest.txt:\d+ +in blocks.0 ",
        r"cross_entropy\(bf16\) +to_fp32 +FP32 by lists/hmpx/fp32.txt:\d+ +at (examples/)?train_gpt.py:\d+",
    ):
        assert re.search(f"^  {decision}", output, re.MULTILINE), decision


def test_custom_lists(tmp_path: Path) -> None:
    """Each kind of list line does what its comment says, and the misspelt name is an error."""
    output = run_example("custom_lists/custom_lists.py", cwd=tmp_path)
    output = output.replace("examples/custom_lists/", "")  # relative to where the program started
    decisions = dict(re.findall(r"^(\w+) +([A-Z0-9]+ +\S.*)$", output, re.M))
    assert decisions["linear"].startswith("LOW     lists/hmp/bf16.txt:")
    assert decisions["gelu"] == "LOW     my_bf16.txt:3"
    assert decisions["layer_norm"] == "FP32    my_fp32.txt:3"
    assert decisions["mul"].startswith("WIDEST  lists/hmp/widest.txt:")
    assert decisions["softmax"] == "FP32    my_fp32.txt:2"
    assert decisions["truediv"] == "FP32    my_fp32.txt:5"
    assert decisions["div"].startswith("WIDEST  lists/hmp/widest.txt:")
    assert decisions["exp"] == "PASS    in no list"
    dtypes = dict(re.findall(r"^(\w+) +(bfloat16|float32)$", output, re.M))
    assert dtypes == {
        "x": "float32",
        "normed": "float32",
        "hidden": "bfloat16",
        "scores": "float32",
        "weights": "float32",
        "mixed": "float32",
    }
    assert "misspelt.txt:2: unknown op 'sofmax'; did you mean 'softmax'?" in output
    assert output.endswith("torch is as it was\n")


HMP_SCRIPT = "hmp_script/train_mnist.py"


def run_hmp_script(*arguments: str, cwd: Path) -> str:
    command = ("-m", "hmpx", "run", "--habana-shim", str(EXAMPLES / HMP_SCRIPT), *arguments)
    return run(*command, cwd=cwd)


def test_hmp_script_learns(tmp_path: Path) -> None:
    """A script written for Gaudi and HMP trains to a good accuracy, as it stands."""
    output = run_hmp_script(cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[-1] < 0.5 * losses[0]
    accuracy = re.search(r"test accuracy (\d+\.\d)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 90


def test_graph(tmp_path: Path) -> None:
    """Seven casts under hmpx, none in fp32, and a picture of each graph."""
    output = run_anew(str(EXAMPLES / "graph.py"), "--out", "pictures", cwd=tmp_path)
    assert re.search(r"^fp32: 0 casts ", output, re.M)
    assert re.search(r"^hmpx: 7 casts ", output, re.M)
    assert re.findall(r"^  (.+ -> .+)$", output, re.M) == [
        "0.bias -> AddmmBackward0",
        "0.weight -> TBackward0",
        "3.bias -> AddmmBackward0",
        "3.weight -> TBackward0",
        "output of AddmmBackward0 -> LogSoftmaxBackward0",
        "output of AddmmBackward0 -> NativeLayerNormBackward0",
        "output of ReluBackward0 -> AddmmBackward0",
    ]
    has_dot = shutil.which("dot") is not None
    files = [tmp_path / "pictures" / f"graph_{name}" for name in ("fp32", "hmpx")]
    fp32, mixed = (
        path.with_suffix(".svg" if has_dot else ".dot").read_text(encoding="utf-8")
        for path in files
    )
    assert (fp32.count("ToCopyBackward0"), mixed.count("ToCopyBackward0")) == (0, 7)
    assert (fp32.count("orange"), mixed.count("orange")) == (0, 7)
    assert ("dot -Tsvg" in output) is not has_dot


def test_reports(tmp_path: Path) -> None:
    """A page for the model that was asked for, and its verdict."""
    pytest.importorskip("transformers")
    output = run_example("reports.py", "resnet", "--to", str(tmp_path), cwd=tmp_path)
    assert output.startswith("resnet: 100 % of FLOPs, ")
    assert "conv2d" in (tmp_path / "resnet.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_tune(tmp_path: Path) -> None:
    """The lists that it writes pass what `hmpx check` checks."""
    output = run_example("tune.py", "--tolerance", "0.005", "--to", "lists", cwd=tmp_path)
    assert "candidates stay in fp32 under bfloat16" in output
    assert "On inputs that the search has not seen" in output
    files = {
        kind: (str(tmp_path / f"lists/{name}.txt"),)
        for kind, name in (("low", "bf16"), ("fp32", "fp32"))
    }
    assert policy.check_files(files) == []
