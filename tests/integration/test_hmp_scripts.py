"""Training scripts of the shapes that HMP's had, under the stand-in and without it.

Those in ``hmp_scripts`` have the imports, the arguments and the order of things of Habana's public
references: digits, images, language, segmentation, fine-tuning. What they print is compared bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hmpx
from hmpx.integrations.devices import device_type
from tests import forks

SCRIPTS = Path(__file__).with_name("hmp_scripts")
DEVICE = device_type()

#: Forks a child a run, so that torch is imported once for all of them: under ``hmpx run``, or plainly.
FORKING = """
import json, os, runpy, sys
from hmpx import cli
import torch._dynamo

for number, (is_plain, arguments) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        if is_plain:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
            sys.exit()
        sys.exit(cli.main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

#: Script and its arguments -> the switches that all its runs get.
CASES: dict[str, list[str]] = {
    "mnist.py": ["--use_lazy_mode"],
    "resnet.py": [],
    "bert.py": [],
    "bert.py lamb": ["--use_fused_lamb"],
    "unet.py": ["--run_lazy_mode"],
    "glue.py": [],
}


def runs(case: str, lists: list[str]) -> list[tuple[bool, list[str]]]:
    """Returns the runs of a case: baseline on hpu, plainly; converted on hpu, plainly by hmpx."""
    script = str(SCRIPTS / case.split(maxsplit=1)[0])
    common = CASES[case]
    if case.split(maxsplit=1)[0] not in ("unet.py", "glue.py"):
        common = [*common, *lists]
    shim = ["run", "--habana-shim", script]
    never = ["run", "--habana-shim", "--legalize", "never", script]
    return [
        (False, [*shim, *common]),
        (True, [script, "--device", DEVICE, *common]),
        (False, [*never, "--hmp", *common]),
        (True, [script, "--device", DEVICE, "--hmpx", *common]),
    ]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[tuple[int, str, str]]]:
    """Returns case -> status, output and errors of its runs, for the cases that were selected."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [case for case in CASES if any(a and a.params.get("case") == case for a in asked)]
    directory = tmp_path_factory.mktemp("hmp_scripts")
    (directory / "bf16.txt").write_text(
        "addmm\nbmm\nconv2d\nlinear\nlayer_norm\nmatmul\nmm\nrelu\n"
    )
    (directory / "fp32.txt").write_text(
        "log_softmax\nnll_loss\ncross_entropy\nsoftmax\nembedding\n"
    )
    lists = ["--hmp-bf16", "bf16.txt", "--hmp-fp32", "fp32.txt"]
    everything = [run for case in cases for run in runs(case, lists)]
    paths = [str(Path(hmpx.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = forks.run("-c", FORKING, json.dumps(everything), cwd=directory, env=environment)
    assert done.returncode == 0, done.stderr
    found = [
        (int(status), *((directory / f"{i}.{name}").read_text() for name in ("out", "err")))
        for i, status in enumerate(done.stdout.split())
    ]
    return {case: found[4 * i : 4 * i + 4] for i, case in enumerate(cases)}  # type: ignore[misc]


SELECTED = [
    case if case == "mnist.py" else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]

needs_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="each run is a forked child")


@needs_forks
@pytest.mark.parametrize("case", SELECTED)
def test_a_baseline_is_bit_equal_to_plain_torch(case: str, outcomes: dict[str, Any]) -> None:
    """Nothing is cast under the stand-in before hmp.convert(), which is not called."""
    (status, actual, errors), (plain_status, expected, plain_errors) = outcomes[case][:2]
    assert (status, plain_status) == (0, 0), errors + plain_errors
    assert actual == expected
    assert actual and "nan" not in actual
    assert errors == plain_errors


@needs_forks
@pytest.mark.parametrize("case", SELECTED)
def test_conversions_are_equal_by_either_import(case: str, outcomes: dict[str, Any]) -> None:
    """Hmp of habana_frameworks under the stand-in, and hmpx as hmp."""
    (status, actual, errors), (plain_status, expected, plain_errors) = outcomes[case][2:]
    assert (status, plain_status) == (0, 0), errors + plain_errors
    assert actual == expected
    assert actual != outcomes[case][0][1]  # it is cast


@pytest.mark.slow
def test_images_train_with_lars(tmp_path: Path) -> None:
    """Which torch has no optimizer for."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hmpx.__file__).parent.parent)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hmpx", "run", "--habana-shim"),
            *(str(SCRIPTS / "resnet.py"), "--optimizer", "lars", "--hmp", "--hmp-verbose"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    assert len(losses) == 6 and "nan" not in done.stdout
    assert "> to_bf16\n" in done.stdout
