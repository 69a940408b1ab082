"""Runs the system's C compiler: with a time limit, and never longer than this process lives.

Whatever is wrong with a compiler is a `KernelsError`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from ...errors import KernelsError

#: For all that is tried.
LIMIT_S = 120.0

#: None of them changes a value. OpenMP comes with the threads that torch has running already.
FLAGS: Final = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fopenmp-simd",
)

_LINKING: Final = ("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()

#: Of a compiler's messages.
_MOST_BYTES: Final = 1 << 16
_MOST_SHOWN: Final = 300

#: Runs a command whose process group is killed as soon as standard input ends, which it does when
#: this process ends, whatever ended it.
_GUARDED: Final = (
    "exec 3<&0 </dev/null; "
    "{ read -r line <&3; kill -KILL 0; } >/dev/null 2>&1 & "
    '"$@" 3<&-; status=$?; kill -KILL $!; exit $status'
)

_lock = threading.RLock()  # a signal may interrupt what holds it
_running: subprocess.Popen[bytes] | None = None
_is_stopped = False


class StoppedError(KernelsError):
    """The process is about to end; there is nothing to report."""


def find_compiler() -> tuple[str, ...]:
    """Returns the command of a C compiler: ``CC``, or the first of cc, gcc and clang.

    Raises:
        KernelsError: There is none.
    """
    setting = os.environ.get("CC", "")
    try:
        chosen = tuple(shlex.split(setting))
    except ValueError as error:
        raise KernelsError(
            f"CC={shown_command(setting)} can't be split into words: {error}"
        ) from error
    for command in [chosen] if chosen else [("cc",), ("gcc",), ("clang",)]:
        if shutil.which(command[0]) is not None:
            return command
    names = shown_command(" ".join(chosen)) if chosen else "cc, gcc or clang"
    raise KernelsError(f"no C compiler {names} was found")


def libraries(
    source: Path, scratch: Path, variants: Sequence[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Yields sets of flags and the shared libraries that they give, without those that fail.

    Args:
        source: The C file.
        scratch: An empty folder for what the compiler writes.
        variants: Tried in turn: not every compiler knows every machine, nor has the OpenMP that
            torch runs on.

    Raises:
        KernelsError: After the last variant, if it failed; or the time limit is reached.
    """
    command = find_compiler()
    deadline = time.monotonic() + LIMIT_S
    for number, flags in enumerate(variants):
        objects, built = scratch / f"{number}.o", scratch / f"{number}.so"
        try:
            _run((*command, *FLAGS, *flags, "-c", str(source), "-o", str(objects)), deadline)
            # Linked without OpenMP: its functions are found in what torch has loaded. A runtime of
            # its own would have threads of its own.
            _run((*command, "-shared", *_LINKING, str(objects), "-o", str(built), "-lm"), deadline)
            library = built.read_bytes()
        except (_FailedError, OSError) as error:
            if number == len(variants) - 1:
                raise KernelsError(
                    f"{shown_command(shlex.join(command))} failed: {error}"
                ) from error
            continue
        yield flags, library


def stop() -> None:
    """Kills a running compiler; no other will start, since this process is about to end."""
    global _is_stopped
    with _lock:
        _is_stopped = True
        if _running is not None:
            _kill(_running)


def shown_command(text: str) -> str:
    """Returns the text without characters that a terminal or a log can't show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:_MOST_SHOWN]


class _FailedError(Exception):
    """The compiler did not do what it was asked to."""


def _run(command: tuple[str, ...], deadline: float) -> None:
    """Runs a command of the compiler's.

    Raises:
        _FailedError: It failed.
        KernelsError: The time limit is reached.
    """
    with _started(command) as process:
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        said = b""
        # Not until the pipe is closed: a process that the compiler left behind may hold it.
        while process.poll() is None:
            said += _available(process.stderr, _MOST_BYTES - len(said))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
            if time.monotonic() > deadline:
                raise KernelsError(
                    f"{shown_command(command[0])} was still running after {LIMIT_S:g} s and was stopped"
                )
        said += _available(process.stderr, _MOST_BYTES - len(said))
    if _is_stopped:
        raise StoppedError
    if process.returncode:
        lines = said.decode(errors="backslashreplace").strip().splitlines()
        errors = [line for line in lines if "error" in line]
        raise _FailedError(shown_command((*errors, *lines, f"exit status {process.returncode}")[0]))


@contextlib.contextmanager
def _started(command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command in a process group of its own, which is killed if it has not ended then."""
    global _running
    with _lock:  # lest the process end in between
        if _is_stopped:
            raise StoppedError
        process = _running = subprocess.Popen(
            ("/bin/sh", "-c", _GUARDED, "sh", *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with _lock:
            _running = None
            _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stderr):
            assert pipe is not None
            pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # else the number may be another process's by now
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def _available(pipe: IO[bytes], count: int) -> bytes:
    """Returns up to ``count`` bytes that can be read at once, and drops the rest of them."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # a pipe's worth each; what writes without end is to be timed, too
            more = os.read(pipe.fileno(), _MOST_BYTES)
            if not more:
                break
            found += more[: count - len(found)]
    return found


def _leave_to_parent() -> None:
    """Makes a forked process forget the compiler, which belongs to its parent."""
    global _lock, _running
    _lock = threading.RLock()
    if _running is not None and _running.stdin is not None:
        _running.stdin.close()  # else the compiler would live as long as this process
    _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
