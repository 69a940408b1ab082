"""Programs run as ``python ARGUMENTS`` would, but in forks of a process that has imported torch.

Imports of torch and of its compiler, which optimizers and reports need, take seconds, more than most
programs of the tests do. Tests of what happens before, while or because something is imported start a
Python of their own.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")

#: What the process imports that programs are forked from.
IMPORTED = ("torch._inductor.compile_fx", "hmpx")


class Server:
    """A process that forks a child for each program."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SERVER), *IMPORTED],
            cwd=SERVER.parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, arguments: list[str], cwd: str, env: Mapping[str, str], timeout: int
    ) -> subprocess.CompletedProcess[str]:
        """Returns what a program gives; see `run`."""
        process, number = self._process, next(self._numbers)
        assert process.stdin is not None and process.stdout is not None
        out, err = (self._folder / f"{number}.{name}" for name in ("out", "err"))
        request = [arguments, cwd, dict(env), str(out), str(err), timeout]
        print(json.dumps(request), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, "the process that forks has ended"
        texts = (path.read_text(encoding="utf-8") for path in (out, err))
        return subprocess.CompletedProcess(["python", *arguments], int(answer), *texts)

    def end(self) -> None:
        """Waits for the process, and removes its files."""
        self._process.communicate()
        shutil.rmtree(self._folder)


_servers: list[Server] = []  # at most one


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 300,
) -> subprocess.CompletedProcess[str]:
    """Returns the outcome of ``python ARGUMENTS``, as `subprocess.run` does.

    Args:
        arguments: ``-W`` options, then ``-c CODE``, ``-m MODULE`` or a file, and what that gets.
        cwd: The program's directory; by default that of this process.
        env: Its environment; by default that of this process.
        timeout: In seconds; after it the program is ended by SIGALRM.
    """
    if not hasattr(os, "fork"):
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            cwd=cwd,
            env=env,
            text=True,
            timeout=timeout,
            check=False,
        )
    if not _servers:
        _servers.append(Server())
    environment = dict(os.environ if env is None else env)
    return _servers[0].run([*arguments], str(cwd or Path.cwd()), environment, timeout)


@atexit.register
def end() -> None:
    """Ends the process that programs are forked from."""
    while _servers:
        _servers.pop().end()
