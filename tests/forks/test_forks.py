"""A forked program meets what it would meet in a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

PROGRAM = """
import os, sys, warnings
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("GIVEN"), repr(sys.stdin.read()))
print(sys.modules["__main__"].__dict__ is globals())
warnings.warn("beware")

def fail():
    raise KeyError("x")

if "exit" in sys.argv:
    sys.exit(3)
if "fail" in sys.argv:
    fail()
"""


@pytest.mark.parametrize("how", ["-c", "-m", "file"])
@pytest.mark.parametrize(
    ("options", "word"), [([], "end"), ([], "exit"), ([], "fail"), (["-W", "error"], "end")]
)
def test_a_program_is_run_as_by_python(
    how: str, options: list[str], word: str, tmp_path: Path
) -> None:
    """Names, paths, input, warnings, errors and status are the same."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = {"-c": ["-c", PROGRAM], "-m": ["-m", "program"], "file": ["program.py"]}[how]
    arguments = [*options, *program, word]
    environment = {**os.environ, "GIVEN": "this"}
    expected = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    actual = forks.run(*arguments, cwd=tmp_path, env=environment)
    assert actual.returncode == expected.returncode
    assert actual.stdout == expected.stdout
    lines, expected_lines = (
        [line for line in text.splitlines() if "<frozen runpy>" not in line]
        for text in (actual.stderr, expected.stderr)
    )
    assert [line.replace(f"{tmp_path}/", "") for line in lines] == [
        line.replace(f"{tmp_path}/", "") for line in expected_lines
    ]


#: Counts what hmpx left in torch, threads, and modules that only other libraries' programs need.
LEFT = """
import sys, threading, torch
from hmpx import ops, torch_state
owners = {site.owner for op in ops.table().values() for site in op.sites}
slots = [slot for owner in owners for slot in list(vars(owner).values())]
print(len(slots) > 1000, sum("__hmpx_site__" in getattr(slot, "__dict__", ()) for slot in slots))
print(torch_state.in_force(), threading.active_count(), torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype)
print([name for name in sys.modules if name.startswith("hmpx.integrations.")])
"""


def test_torch_is_as_without_hmpx() -> None:
    """The process that programs are forked from has converted, and reverted."""
    run = forks.run("-c", LEFT)
    assert run.stdout == "True 0\nNone 1 torch.float32\n[]\n", run.stderr
