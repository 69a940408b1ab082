"""Runs the gate's tests with several versions of torch, and writes docs/evidence/versions.md.

    python3 scripts/versions.py                          # the lowest, the pinned, and the newest
    python3 scripts/versions.py --torch 2.14.1           # these; the rows of others stay
    python3 scripts/versions.py --python 2.14.1=/path/to/python
    python3 scripts/versions.py --torch 2.14.1 --failed  # only what failed before

Each version has an environment of its own under ``.versions/``, gigabytes large where torch is built
for CUDA. Without ``--torch``: the lower bound in pyproject.toml, the version in constraints.txt, and
the newest that pip finds. With ``--python`` the tests run in an environment that is there.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import environment
from environment import BUILD, CONSTRAINTS, ROOT, program, run

#: Results by version, from which the page is written.
RESULTS = ROOT / "scripts" / "versions.json"
PAGE = ROOT / "docs" / "evidence" / "versions.md"
ENVIRONMENTS = ROOT / ".versions"

HEAD = """\
# Versions of torch

What the gate's tests give with each version, as `python scripts/versions.py` ran them; don't edit.
hmpx relies on parts of torch that torch does not document. It looks them up when it is imported: with
a torch that lacks one, `convert()` says what it does without, or refuses. `hmpx doctor --torch` looks
up all of them, those of torch.compile too.

| torch | Python | date | passed | failed | skipped |
|---|---|---|---|---|---|
"""


def default_versions() -> list[str]:
    """Returns the lower bound, the pinned version and the newest one."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    lowest = re.search(r'"torch>=([\d.]+)"', project)
    pinned = re.search(r"^torch==([\d.]+)", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert lowest is not None
    assert pinned is not None
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    newest = re.search(r"torch \(([\d.]+)\)", listed)
    assert newest is not None
    lowest_release = ".".join([*lowest[1].split("."), "0", "0"][:3])
    return list(dict.fromkeys([lowest_release, pinned[1], newest[1]]))


def python_of(version: str) -> str:
    """Returns the Python of an environment with that torch; makes it unless it is there."""
    venv = ENVIRONMENTS / f"torch-{version}"
    python = program("python", venv)
    if not Path(python).exists():
        environment.make(venv)
        pip = [python, "-m", "pip", "install", "--quiet"]
        run([*pip, f"torch=={version}", *BUILD])
        run([*pip, "--no-build-isolation", f"torch=={version}", "-e", f"{ROOT}[test]"])
    return python


def outcomes(python: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs the gate's tests with ``python``; returns what came of them.

    Args:
        python: Path of a Python that has torch and what the tests need.
        before: What came of them before: only those that failed run again.
    """
    code = "import torch, platform; print(torch.__version__, platform.python_version())"
    told = subprocess.check_output([python, "-c", code], text=True).split()
    chosen = [] if before is None else before["failed"]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        tests = [
            python, "-m", "pytest", "-n", str(os.cpu_count() or 1), "--dist", "worksteal",
            "-m", "not opinfo and not slow", "-v", f"--junitxml={report}",
            *[f"tests/{module}.py::{name}" for module, _, name in (n.partition("::") for n in chosen)],
        ]  # fmt: skip
        # So that the tests' own children find this hmpx, and no other one.
        subprocess.run(tests, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        cases = list(ET.parse(report).iter("testcase"))
    failed = sorted({name_of(case) for case in cases if has_failed(case)})
    skipped = collections.Counter(
        (file_of(case), reason_of(case)) for case in cases if case.find("skipped") is not None
    )
    passed = len({name_of(case) for case in cases}) - len(failed) - sum(skipped.values())
    if before is not None:
        passed += before["passed"]
        skipped.update({(module, reason): count for module, reason, count in before["skipped"]})
    return {
        "torch": told[0],
        "python": told[1],
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "passed": passed,
        "failed": failed,
        "skipped": [[*key, count] for key, count in sorted(skipped.items())],
    }


def has_failed(case: ET.Element) -> bool:
    """Whether a test failed, or what it needs could not be set up or taken down."""
    return case.find("failure") is not None or case.find("error") is not None


def name_of(case: ET.Element) -> str:
    """Returns a test's name as pytest shows it, below ``tests/`` and without ``.py``."""
    return f"{file_of(case)}::{case.attrib['name']}"


def file_of(case: ET.Element) -> str:
    """Returns the path of a test's file below ``tests/``, without ``.py``."""
    return case.attrib["classname"].removeprefix("tests.").replace(".", "/")


def reason_of(case: ET.Element) -> str:
    """Returns why a test was skipped."""
    skipped = case.find("skipped")
    return "" if skipped is None else " ".join(skipped.attrib.get("message", "").split())


def page(results: dict[str, dict[str, Any]]) -> str:
    """Returns the page that ``results`` by version make."""
    newest_first = sorted(results, key=lambda v: [int(n) for n in v.split(".")], reverse=True)
    rows, details = [], []
    for version in newest_first:
        found = results[version]
        count = sum(count for *_, count in found["skipped"])
        cells = [
            found["torch"],
            found["python"],
            found["date"],
            found["passed"],
            len(found["failed"]),
            count,
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
        lines = [f"- {name} fails" for name in found["failed"]]
        lines += [
            f"- {module}, {count} skipped: {reason}" for module, reason, count in found["skipped"]
        ]
        details.append(
            f"\n## torch {found['torch']}\n\n" + "\n".join(lines or ["All pass."]) + "\n"
        )
    return HEAD + "".join(rows) + "".join(details)


def main() -> None:
    """Runs the tests with the versions asked for, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="versions of torch")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="VERSION=PATH",
        help="environments that are there",
    )
    parser.add_argument(
        "--failed", action="store_true", help="run only what failed before with these versions"
    )
    options = parser.parse_args()
    given = dict(each.split("=", 1) for each in options.python)
    versions = options.torch or list(given) or default_versions()
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for version in versions:
        print(f"== torch {version}", flush=True)
        before = results.get(version) if options.failed else None
        results[version] = outcomes(given.get(version) or python_of(version), before)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(results), encoding="utf-8")
    if any(results[version]["failed"] for version in versions):
        sys.exit(f"some tests fail: see {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
