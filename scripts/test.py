"""Runs every check of the project, the cheapest first, up to the first that fails.

    python3 scripts/test.py                  # all of it
    python3 scripts/test.py -k casting       # pytest alone, with these arguments
    python3 scripts/test.py --cov            # the lines and branches that no test reaches

Needs Python 3.10 or newer and pip; makes an environment in ``.venv`` or uses the one that is there.
"""

from __future__ import annotations

import os
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


def test() -> None:
    """Runs the tests but for conformance."""
    run([PYTHON, *PYTEST, "-m", "not opinfo and not slow", "--durations", "20"])


def test_conformance() -> None:
    """Runs each sample of torch's OpInfo database."""
    run([PYTHON, *PYTEST, "-m", "opinfo", "tests/integration/test_opinfo_conformance.py"])


def test_wheel() -> None:
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


def command(*words: str) -> Callable[[], None]:
    """Returns a step that runs a program of the environment."""
    return lambda: run([program(words[0]), *words[1:]])


STEPS: dict[str, Callable[[], None]] = {
    "format": command("ruff", "format", "--check", "."),
    "lint": command("ruff", "check", "."),
    "spelling": command("codespell"),
    "layers": command("lint-imports"),
    "types": command("mypy", "--strict", "hmpx"),
    "tests": test,
    "conformance": test_conformance,
    "wheel": test_wheel,
}


def main() -> None:
    """Runs all steps, or pytest with the arguments given."""
    os.environ.pop("PYTHONPATH", None)  # else it could supply another hmpx
    environment.prepare("test")
    if sys.argv[1:]:
        run([PYTHON, *PYTEST, *sys.argv[1:]])
        return
    start = time.perf_counter()
    for name, step in STEPS.items():
        print(f"== {name}", flush=True)
        step_start = time.perf_counter()
        step()
        print(f"== {name}: passed in {time.perf_counter() - step_start:.1f} s\n", flush=True)
    print(f"All {len(STEPS)} steps passed in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
