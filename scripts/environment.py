"""The virtual environment that `demo.py` and `test.py` run in; needs nothing but Python and pip.

Knows how to make it, what to install in what order, and where its programs are.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
#: What builds hmpx where torch can be imported: `pip install --no-build-isolation`.
BUILD = ("hatchling>=1.26", "editables")


def program(name: str, venv: Path = VENV) -> str:
    """Returns the path of a program of ``venv``: ``"python"``, ``"pip"``, ``"ruff"``."""
    if os.name == "nt":
        return str(venv / "Scripts" / f"{name}.exe")
    return str(venv / "bin" / name)


def make(venv: Path) -> None:
    """Makes a virtual environment with pip in it."""
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    run([sys.executable, "-m", "venv", *([] if has_ensurepip else ["--without-pip"]), str(venv)])
    if not has_ensurepip:  # Debian splits it off into a package of its own
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.check_output([program("python", venv), "-c", code], text=True).strip()
        run([sys.executable, "-m", "pip", "install", "--quiet", "--target", packages, "pip"])


def prepare(extra: str) -> None:
    """Makes `VENV` unless it is there, and installs hmpx with ``extra`` unless it is up to date."""
    if sys.version_info < (3, 10):  # noqa: UP036  # the one place that tells
        sys.exit(f"hmpx needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
    if not Path(program("python")).exists():
        print(f"Making {VENV}", flush=True)
        make(VENV)
    # What is compiled when hmpx is installed.
    compiled = sorted([*ROOT.glob("hmpx/*/kernels/*.[ch]"), *ROOT.glob("hmpx/*/nodes/*.[ch]*")])
    sources = (ROOT / "pyproject.toml", ROOT / "hatch_build.py", CONSTRAINTS, *compiled)
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = VENV / f"installed-{extra}.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
        return
    install = [program("python"), "-m", "pip", "install", "--disable-pip-version-check"]
    # Python compiles the modules that it imports; pip would compile all the others too.
    install += ["--no-compile", "-c", str(CONSTRAINTS)]
    print(f"Installing torch into {VENV}, once: some minutes, 1.5 GB (step 1 of 2)", flush=True)
    # Separately, so that no other package decides the version of torch; hmpx is built with both.
    run([*install, "torch", *BUILD])
    print(f"Installing hmpx[{extra}] (step 2 of 2)", flush=True)
    run([*install, "--no-build-isolation", "-e", f"{ROOT}[{extra}]"])
    stamp.write_text(state, encoding="utf-8")


def run(command: list[str], cwd: Path = ROOT) -> None:
    """Runs ``command``; ends this program with its exit status if it fails."""
    status = subprocess.run(command, cwd=cwd, check=False).returncode
    if status:
        print(f"\nThis failed with status {status}:\n  {' '.join(command)}", file=sys.stderr)
        sys.exit(status)
