"""Runs every check of the project, the cheapest first and together, up to the first that fails.

    python3 scripts/test.py                  # all of it
    python3 scripts/test.py -k casting       # pytest alone, with these arguments
    python3 scripts/test.py --cov            # the lines and branches that no test reaches
    HMPX_GATE_BUDGET_S=720 python3 scripts/test.py   # all of it, and fails if it takes longer

Prints the seconds of each step, of the slowest tests and of their files, and writes them to
``.ci/durations.txt``. Needs Python 3.10 or newer and pip; makes an environment in ``.venv`` or uses the
one that is there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

import environment
from environment import ROOT, program, run

PYTHON = program("python")
PYTEST = ["-m", "pytest", "-n", str(os.cpu_count() or 1), "--dist", "worksteal"]

DURATIONS = ROOT / ".ci" / "durations.txt"
SLOWEST = 30

#: A line of pytest's: ``1.23s call     tests/casting/test_casting.py::test_it[case]``.
DURATION = re.compile(r"^([\d.]+)s (call|setup|teardown) +(\S.*)$")

#: Runs where only the wheel's hmpx can be found; the arguments are the lists that it must hold.
SMOKE_TEST = """
import sys
from pathlib import Path
import hmpx, torch
from hmpx.reports import Report

package = Path(hmpx.__file__).resolve().parent
assert package.is_relative_to(Path(sys.prefix).resolve()), f"hmpx comes from {package}"
missing = [name for name in sys.argv[1:] if not (package / "lists" / name).is_file()]
assert not missing, f"the wheel lacks the lists {missing}"
session = hmpx.convert(device_types={"cpu"})
assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.bfloat16
assert session.policy["linear"].reason.startswith("lists/hmpx/bf16.txt:")
assert Report(()).to_html().rstrip().endswith("</html>")  # its files are data
hmpx.revert()
assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float32
print(f"hmpx {hmpx.__version__} from {package}")
"""


def run_timed(pytest: list[str]) -> tuple[list[str], list[str], float]:
    """Runs pytest; ends this program if a test fails.

    Returns:
        Its lines of the slowest tests, lines of the slowest test files, and how many seconds it took.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.xml")
        command = [*pytest, "--durations", str(SLOWEST), "--junit-xml", str(results)]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8"
        ) as process:
            assert process.stdout is not None
            found = []
            for line in process.stdout:
                print(line, end="", flush=True)
                if DURATION.match(line):
                    found.append(line.rstrip("\n"))
        if process.returncode:
            sys.exit(process.returncode)
        return found, slowest_files(results), time.perf_counter() - start


def slowest_files(results: Path) -> list[str]:
    """Returns the seconds that the tests of each file took together, the longest first."""
    sums: dict[str, float] = {}
    cases: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        name = case.attrib["classname"]
        sums[name] = sums.get(name, 0.0) + float(case.attrib["time"])
        cases[name] += 1
    return [
        f"{seconds:8.1f} s  {cases[name]:5} tests  {name}"
        for name, seconds in sorted(sums.items(), key=lambda each: -each[1])[:SLOWEST]
    ]


class StepError(Exception):
    """A command's status is not 0."""


def output(command: list[str], cwd: Path = ROOT) -> str:
    """Returns what ``command`` prints; raises `StepError` with it if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        end = f"This failed with status {done.returncode}:\n  {' '.join(command)}"
        raise StepError(f"{done.stdout}\n{end}")
    return done.stdout


def test_wheel() -> str:
    """Builds the wheel, installs it elsewhere and tries it there, outside the repository."""
    with tempfile.TemporaryDirectory() as directory:
        elsewhere = Path(directory)
        venv = elsewhere / "venv"
        build = [PYTHON, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory]
        printed = output(build)
        (wheel,) = elsewhere.glob("*.whl")
        printed += output([sys.executable, "-m", "venv", "--without-pip", str(venv)])
        pip = [PYTHON, "-m", "pip", "--python", program("python", venv), "install", "--quiet"]
        printed += output([*pip, "--no-deps", "--no-compile", str(wheel)])
        borrow_packages(venv)
        lists = [
            path.relative_to(ROOT / "lists").as_posix() for path in ROOT.glob("lists/**/*.txt")
        ]
        printed += output([program("python", venv), "-c", SMOKE_TEST, *lists], elsewhere)
        printed += output([program("hmpx", venv), "ops", "softmax"], elsewhere)
        my_list = elsewhere / "my_bf16.txt"
        my_list.write_text("@hmp\n-mul\n", encoding="utf-8")
        return printed + output([program("hmpx", venv), "check", str(my_list)], elsewhere)


def test_sdist() -> str:
    """Builds the source distribution, and installs it elsewhere without compilers, which it has to do without."""
    with tempfile.TemporaryDirectory() as directory:
        elsewhere = Path(directory)
        venv = elsewhere / "venv"
        printed = output(
            [PYTHON, "-m", "build", "--sdist", "--no-isolation", "--outdir", directory]
        )
        (sdist,) = elsewhere.glob("*.tar.gz")
        printed += output([sys.executable, "-m", "venv", "--without-pip", str(venv)])
        borrow_packages(venv)
        pip = [PYTHON, "-m", "pip", "--python", program("python", venv), "install", "--quiet"]
        pip += ["--no-deps", "--no-compile", "--no-build-isolation", str(sdist)]
        printed += output(["env", "CC=missing", "CXX=missing", *pip])
        return printed + output([program("python", venv), "-c", SMOKE_TEST], elsewhere)


def borrow_packages(venv: Path) -> None:
    """Lets ``venv`` import what the main environment has, torch above all, after its own.

    A ``.pth`` file adds a directory to the path, but doesn't run the ``.pth`` files in there; so
    the editable install of hmpx stays out.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here, there = (
        Path(subprocess.check_output([python, "-c", code], text=True).strip())
        for python in (PYTHON, program("python", venv))
    )
    (there / "borrowed.pth").write_text(f"{here}\n", encoding="utf-8")


def command(*words: str) -> Callable[[], str]:
    """Returns a step that runs a program of the environment."""
    return lambda: output([program(words[0]), *words[1:]])


#: What runs beside each other before the tests; each returns what it prints.
STEPS: dict[str, Callable[[], str]] = {
    "format": command("ruff", "format", "--check", "."),
    "lint": command("ruff", "check", "."),
    "spelling": command("codespell"),
    "layers": command("lint-imports"),
    "syntax": command(
        *("vermin", "--quiet", "-t=3.10-", "--violations", "--eval-annotations", "--no-tips"),
        *("hmpx", "scripts", "tests", "examples", "benchmarks"),
    ),
    "types for Python 3.10": command("mypy", "--python-version", "3.10", "hmpx"),
    "types for Python 3.13": command("mypy", "--python-version", "3.13", "hmpx"),
    "site": command("mkdocs", "build", "--strict", "--quiet"),
    "wheel": test_wheel,
    "sdist": test_sdist,
}


def timed(step: Callable[[], str]) -> tuple[str, float]:
    """Returns what a step prints, and how many seconds it takes."""
    start = time.perf_counter()
    return step(), time.perf_counter() - start


def run_steps() -> dict[str, float]:
    """Runs `STEPS` and returns the seconds of each; ends this program at the first that fails."""
    took_s: dict[str, float] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(timed, step): name for name, step in STEPS.items()}
        for done in as_completed(running):
            name = running[done]
            print(f"== {name}", flush=True)
            try:
                printed, took_s[name] = done.result()
            except StepError as failure:
                print(failure, flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                sys.exit(1)
            print(f"{printed}== {name}: passed in {took_s[name]:.1f} s\n", flush=True)
    return took_s


def durations(
    steps: dict[str, float], in_all_s: float, slowest: list[str], files: list[str]
) -> str:
    """Returns the seconds of each step, of all, of the slowest tests and files, the longest first."""
    by_length = sorted(slowest, key=lambda line: -float(line.partition("s ")[0]))
    took = [f"{seconds:8.1f} s  {name}" for name, seconds in steps.items()]
    in_all = f"{in_all_s:8.1f} s  in all"
    return "\n".join([*took, in_all, "", *by_length[:SLOWEST], "", *files]) + "\n"


def over_budget(took_s: float) -> str | None:
    """Returns what to say if all took longer than ``HMPX_GATE_BUDGET_S``; without that, None."""
    budget = os.environ.get("HMPX_GATE_BUDGET_S")
    if budget is None or took_s <= float(budget):
        return None
    return (
        f"All steps passed, but in {took_s:.0f} s, over the {float(budget):.0f} s that "
        f"HMPX_GATE_BUDGET_S allows; {DURATIONS.relative_to(ROOT)} names what is slow"
    )


def main() -> None:
    """Runs all steps and the tests, or pytest with the arguments given."""
    os.environ.pop("PYTHONPATH", None)  # else it could supply another hmpx
    # Else each of a hundred processes would compile hmpx, and pytest its tests, anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.prepare("test")
    if sys.argv[1:]:
        run([PYTHON, *PYTEST, *sys.argv[1:]])
        return
    start = time.perf_counter()
    took_s = run_steps()
    print("== tests", flush=True)
    slowest, files, took_s["tests"] = run_timed([PYTHON, *PYTEST])
    in_all_s = time.perf_counter() - start
    report = durations(took_s, in_all_s, slowest, files)
    DURATIONS.parent.mkdir(exist_ok=True)
    DURATIONS.write_text(report, encoding="utf-8")
    print(report)
    print(f"All {len(took_s)} steps passed in {in_all_s:.1f} s")
    if fault := over_budget(in_all_s):
        sys.exit(fault)


if __name__ == "__main__":
    main()
