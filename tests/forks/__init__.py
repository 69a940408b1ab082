"""Programs run as ``python ARGUMENTS`` would, but in forks of a process that has imported torch.

Imports of torch and of its compiler, which optimizers and reports need, take seconds, more than most
programs of the tests do; so would hmpx's first conversion. Tests of what happens before, while or because
something is imported take the process that has imported torch alone, or start a Python of their own; so
do those of what a first conversion does.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: Arguments and environment.
Program = tuple[Sequence[str], Mapping[str, str]]

SERVER = Path(__file__).with_name("server.py")

#: What the process imports that programs are forked from: all that they may need, or torch alone.
ALL, TORCH = ("torch._inductor.compile_fx", "hmpx"), ("torch",)


class Server:
    """A process that forks a child for each program."""

    def __init__(self, imported: tuple[str, ...]) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SERVER), *imported],
            cwd=SERVER.parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, programs: Sequence[Program], cwd: str, timeout: int
    ) -> list[subprocess.CompletedProcess[str]]:
        """Returns what programs give that run together; see `run_together`."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        files = [
            [self._folder / f"{number}.{name}" for name in ("out", "err")]
            for _, number in zip(programs, self._numbers, strict=False)
        ]
        orders = [
            [arguments, cwd, dict(env), *map(str, paths), timeout]
            for (arguments, env), paths in zip(programs, files, strict=True)
        ]
        print(json.dumps(orders), file=process.stdin, flush=True)
        answer = process.stdout.readline().split()
        assert answer, "the process that forks has ended"
        return [
            subprocess.CompletedProcess(
                ["python", *arguments], int(status), *(path.read_text("utf-8") for path in paths)
            )
            for (arguments, _), status, paths in zip(programs, answer, files, strict=True)
        ]

    def end(self) -> None:
        """Waits for the process, and removes its files."""
        self._process.communicate()
        shutil.rmtree(self._folder)


#: What it has imported -> the process.
_servers: dict[tuple[str, ...], Server] = {}


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 300,
    imported: tuple[str, ...] = ALL,
) -> subprocess.CompletedProcess[str]:
    """Returns the outcome of ``python ARGUMENTS``, as `subprocess.run` does.

    Args:
        arguments: ``-W`` options, then ``-c CODE``, ``-m MODULE`` or a file, and what that gets.
        cwd: The program's directory; by default that of this process.
        env: Its environment; by default that of this process.
        timeout: In seconds; after it the program is ended by SIGALRM.
        imported: `ALL`, or `TORCH` for programs that tell what they import.
    """
    program = [*arguments], os.environ if env is None else env
    return run_together([program], cwd=cwd, timeout=timeout, imported=imported)[0]


def run_together(
    programs: Sequence[Program],
    cwd: Path | None = None,
    timeout: int = 300,
    imported: tuple[str, ...] = ALL,
) -> list[subprocess.CompletedProcess[str]]:
    """Returns the outcomes of programs that need each other: once one fails, the others are killed.

    Args:
        programs: Of each the arguments, and the environment; see `run`.
        cwd: Their directory; by default that of this process.
        timeout: In seconds.
        imported: As in `run`.
    """
    if not hasattr(os, "fork"):
        with ThreadPoolExecutor(len(programs)) as pool:
            return [*pool.map(functools.partial(_run_anew, cwd=cwd, timeout=timeout), programs)]
    if imported not in _servers:
        _servers[imported] = Server(imported)
    return _servers[imported].run(programs, str(cwd or Path.cwd()), timeout)


def _run_anew(program: Program, cwd: Path | None, timeout: int) -> subprocess.CompletedProcess[str]:
    """Returns what a program gives in a Python of its own."""
    arguments, env = program
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, cwd=cwd, env=env, text=True, timeout=timeout, check=False
    )


@atexit.register
def end() -> None:
    """Ends the processes that programs are forked from."""
    while _servers:
        _servers.popitem()[1].end()
