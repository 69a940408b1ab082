"""Runs every check of the project, the cheapest first, up to the first that fails.

    python3 scripts/test.py                  # all of it
    python3 scripts/test.py -k casting       # pytest alone, with these arguments
    python3 scripts/test.py --cov            # the lines and branches that no test reaches
    HMPX_GATE_BUDGET_S=720 python3 scripts/test.py   # all of it, and fails if it takes longer

Prints the seconds of each step and the slowest tests, and writes them to ``.ci/durations.txt``. Needs
Python 3.10 or newer and pip; makes an environment in ``.venv`` or uses the one that is there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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

package = Path(hmpx.__file__).resolve().parent
assert package.is_relative_to(Path(sys.prefix).resolve()), f"hmpx comes from {package}"
missing = [name for name in sys.argv[1:] if not (package / "lists" / name).is_file()]
assert not missing, f"the wheel lacks the lists {missing}"
session = hmpx.convert(device_types={"cpu"})
assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.bfloat16
assert session.policy["linear"].reason.startswith("lists/hmp/bf16.txt:")
hmpx.revert()
assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float32
print(f"hmpx {hmpx.__version__} from {package}")
"""


def test(slowest: list[str]) -> None:
    """Runs the tests but for conformance."""
    slowest += run_timed([PYTHON, *PYTEST, "-m", "not opinfo and not slow"])


def test_conformance(slowest: list[str]) -> None:
    """Runs each sample of torch's OpInfo database."""
    conformance = "tests/integration/test_opinfo_conformance.py"
    slowest += run_timed([PYTHON, *PYTEST, "-m", "opinfo", conformance])


def run_timed(pytest: list[str]) -> list[str]:
    """Runs pytest and returns its lines of the slowest tests; ends this program if a test fails."""
    command = [*pytest, "--durations", str(SLOWEST)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        found = []
        for line in process.stdout:
            print(line, end="", flush=True)
            if DURATION.match(line):
                found.append(line.rstrip("\n"))
    if process.returncode:
        sys.exit(process.returncode)
    return found


def test_wheel(slowest: list[str]) -> None:
    """Builds the wheel, installs it elsewhere and tries it there, outside the repository."""
    with tempfile.TemporaryDirectory() as directory:
        elsewhere = Path(directory)
        venv = elsewhere / "venv"
        build = [PYTHON, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory]
        run(build)
        (wheel,) = elsewhere.glob("*.whl")
        environment.make(venv)
        pip = [program("python", venv), "-m", "pip", "install", "--quiet", "--no-deps"]
        run([*pip, str(wheel)])
        borrow_packages(venv)
        lists = [
            path.relative_to(ROOT / "lists").as_posix() for path in ROOT.glob("lists/**/*.txt")
        ]
        run([program("python", venv), "-c", SMOKE_TEST, *lists], cwd=elsewhere)
        run([program("hmpx", venv), "ops", "softmax"], cwd=elsewhere)
        my_list = elsewhere / "my_bf16.txt"
        my_list.write_text("@hmp\n-mul\n", encoding="utf-8")
        run([program("hmpx", venv), "check", str(my_list)], cwd=elsewhere)


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


def command(*words: str) -> Callable[[list[str]], None]:
    """Returns a step that runs a program of the environment."""
    return lambda slowest: run([program(words[0]), *words[1:]])


#: Each is given the list that it adds its slowest tests to, as pytest prints them.
STEPS: dict[str, Callable[[list[str]], None]] = {
    "format": command("ruff", "format", "--check", "."),
    "lint": command("ruff", "check", "."),
    "spelling": command("codespell"),
    "layers": command("lint-imports"),
    "types": command("mypy", "--strict", "hmpx"),
    "tests": test,
    "conformance": test_conformance,
    "wheel": test_wheel,
}


def durations(steps: dict[str, float], slowest: list[str]) -> str:
    """Returns the seconds of each step and of the slowest tests, the longest first."""
    by_length = sorted(slowest, key=lambda line: -float(line.partition("s ")[0]))
    took = [f"{seconds:8.1f} s  {name}" for name, seconds in steps.items()]
    return (
        "\n".join([*took, f"{sum(steps.values()):8.1f} s  in all", "", *by_length[:SLOWEST]]) + "\n"
    )


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
    """Runs all steps, or pytest with the arguments given."""
    os.environ.pop("PYTHONPATH", None)  # else it could supply another hmpx
    environment.prepare("test")
    if sys.argv[1:]:
        run([PYTHON, *PYTEST, *sys.argv[1:]])
        return
    DURATIONS.parent.mkdir(exist_ok=True)
    took_s: dict[str, float] = {}
    slowest: list[str] = []
    for name, step in STEPS.items():
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        step(slowest)
        took_s[name] = time.perf_counter() - start
        print(f"== {name}: passed in {took_s[name]:.1f} s\n", flush=True)
        DURATIONS.write_text(durations(took_s, slowest), encoding="utf-8")
    print(durations(took_s, slowest))
    print(f"All {len(STEPS)} steps passed in {sum(took_s.values()):.1f} s")
    if fault := over_budget(sum(took_s.values())):
        sys.exit(fault)


if __name__ == "__main__":
    main()
