"""Times candidates against each other, each in a process of its own, and keeps the figures.

Knows nothing of models, casting or memory: a candidate is an object with a method ``run``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

import hmpx

RESULTS = Path(__file__).parent / "results"

#: Variables that take instructions away from the kernels of torch, oneDNN and MKL.
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

#: A fork of the program itself would share its threads and its CUDA context, and so not work.
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"

#: Name -> for each round the durations of its steps in seconds, none where it sat out.
Turns = dict[str, list[list[float]]]


class Caller(Protocol):
    """What takes turns."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns what the candidate's ``method`` returns."""


class Worker:
    """A process that holds one candidate, and works only while it is asked to.

    A conversion holds for a whole process and makes torch.compile start anew; so candidates cannot
    take turns inside of one. Memory, too, is measured per process.
    """

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any, threads: int) -> None:
        """Starts the process, and returns before the candidate is ready.

        Args:
            name: Of the candidate, for errors.
            make: A function of a module, which returns the candidate; called in the process.
            arguments: What it is called with.
            threads: Of torch.
        """
        context = multiprocessing.get_context(_METHOD)
        if _METHOD == "forkserver":
            # Imported once for all. Not hmpx: the server looks in the current directory first.
            context.set_forkserver_preload(["torch"])
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, threads, make, arguments))
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Returns the next answer.

        Raises:
            SystemExit: The candidate failed, or its process ended.
        """
        try:
            is_good, answer = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise SystemExit(f"the process of {self.name} ended with {code}") from None
        if not is_good:
            raise SystemExit(f"{self.name} failed in its process:\n{answer}")
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns what the candidate's ``method`` returns."""
        self._connection.send((method, arguments))
        return self.receive()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    connection: Connection, threads: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):  # the parent is gone
        try:
            candidate = make(*arguments)
            connection.send((True, None))
            while True:
                method, values = connection.recv()
                connection.send((True, getattr(candidate, method)(*values)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception:
            connection.send((False, traceback.format_exc()))


@contextlib.contextmanager
def workers(
    names: Iterable[str], make: Callable[..., Any], *arguments: Any, threads: int
) -> Iterator[dict[str, Worker]]:
    """Yields a worker for each name, ready to be asked; ``make`` is called with the name first."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name in names:
            started[name] = Worker(name, make, name, *arguments, threads=threads)
            stack.callback(started[name].close)
        for worker in started.values():
            worker.receive()
        yield started


def durations(step: Callable[[], Any], budget_s: float, device: str) -> list[float]:
    """Returns the seconds that each of some steps took: one step, and more while time is left.

    On one thread of the CPU they are processor time, which what else the machine does changes less.
    """
    is_alone = device == "cpu" and torch.get_num_threads() == 1
    now = time.process_time if is_alone else time.perf_counter
    found: list[float] = []
    end = time.perf_counter() + budget_s
    while not found or time.perf_counter() < end:
        start = now()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(now() - start)
    return found


def warm_up(callers: Mapping[str, Caller], budget_s: float) -> None:
    """Lets each run once, which compiles where that is due, and then for ``budget_s``.

    Some of hmpx's means come into use once a program has computed so many elements: tables of activations,
    compiled kernels.
    """
    for caller in callers.values():
        caller.call("run", 0.0)
        caller.call("run", budget_s)


def take_turns(
    callers: Mapping[str, Caller], *, base: str, rounds: int, turn_s: float, limit_s: float
) -> Turns:
    """Lets each run for ``turn_s`` in every round, the order reversed each time.

    Args:
        callers: Name -> what runs steps for so many seconds, and returns the duration of each.
        base: The one whose turns the others are compared with; it never sits out.
        rounds: How many turns each gets.
        turn_s: Seconds of a turn, or a single step if that takes longer.
        limit_s: Who has used up so many seconds sits out from the second round on.
    """
    used_s = dict.fromkeys(callers, 0.0)
    turns: Turns = {name: [] for name in callers}
    names = list(callers)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            sits_out = number > 0 and name != base and used_s[name] >= limit_s
            found = [] if sits_out else callers[name].call("run", turn_s)
            used_s[name] += sum(found)
            turns[name].append(found)
    return turns


def summarize(turns: Turns, base: str) -> dict[str, dict[str, float]]:
    """Returns name -> figures; a turn counts with the median of its steps.

    ``ratio`` is the median over the rounds of a turn divided by the base's turn of that round,
    ``ratio_min`` and ``ratio_max`` are the extremes.
    """
    summary = {}
    for name, rounds in turns.items():
        medians = [statistics.median(turn) for turn in rounds if turn]
        ratios = [
            statistics.median(turn) / statistics.median(base_turn)
            for turn, base_turn in zip(rounds, turns[base], strict=True)
            if turn
        ]
        summary[name] = {
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "median_s": statistics.median(medians),
            "min_s": min(min(turn) for turn in rounds if turn),
            "rounds": len(medians),
            "steps": sum(map(len, rounds)),
        }
    return summary


def fastest(
    candidates: Mapping[str, Callable[[], Any]], calls: int, repeats: int
) -> dict[str, float]:
    """Returns the fewest microseconds of one call, candidates of one process interleaved."""
    best_us = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            best_us[name] = min(best_us[name], (time.perf_counter() - start) / calls * 1e6)
    return best_us


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(documentation or "").split("\n")[0])
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        const=RESULTS,
        help="write the figures as JSON, into benchmarks/results if no folder is given",
    )
    return parser


def add_device_options(
    parser: argparse.ArgumentParser, cases: Sequence[str], candidates: Sequence[str], what: str
) -> None:
    """Adds what to run, and where.

    Args:
        parser: What to add to.
        cases: All that there are.
        candidates: All that there are.
        what: The option's name for the cases.
    """
    parser.add_argument(f"--{what}", nargs="+", choices=cases, default=cases, metavar="NAME")
    parser.add_argument(
        "--sizes", nargs="+", choices=("small", "medium"), default=("small", "medium")
    )
    parser.add_argument("--candidates", nargs="+", choices=candidates, metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


def add_time_options(parser: argparse.ArgumentParser) -> None:
    """Adds for how long to measure, and whether compiled, too."""
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--warm-up", type=float, default=5.0, metavar="SECONDS", help="of each candidate, before"
    )
    parser.add_argument("--turn", type=float, default=0.5, metavar="SECONDS", help="in each round")
    parser.add_argument(
        "--limit", type=float, default=10.0, metavar="SECONDS", help="for a candidate in all rounds"
    )
    parser.add_argument("--compile", action="store_true", help="add candidates under torch.compile")
    parser.add_argument("--backend", default="inductor", help="torch.compile's")


def machine(device: str, threads: int) -> dict[str, Any]:
    """Returns what the figures depend on."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    without = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {**found, "environment": without} if without else found


def header(device: str, threads: int) -> dict[str, Any]:
    """Returns how figures came about."""
    return {
        "machine": machine(device, threads),
        "torch": torch.__version__,
        "hmpx": hmpx.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def save(
    folder: Path | None, name: str, figures: Mapping[str, Any], *, device: str, threads: int
) -> None:
    """Writes the figures and how they came about; does nothing without a folder."""
    if folder is not None:
        write(folder, f"{name}-{device}", {**header(device, threads), **figures})


def write(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Writes a header and figures."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def with_tables(text: str, tables: Mapping[str, str], document: Path) -> str:
    """Returns a document's text with new tables between their marks, ``<!-- name -->`` and an end.

    Raises:
        SystemExit: A table has no marks, or several.
    """
    for name, table in tables.items():
        mark = rf"(<!-- {name}(?:: .*?)? -->\n\n).*?(\n<!-- end -->)"
        text, count = re.subn(mark, lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{document} has {count} tables marked {name!r}, not one")
    return text


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def show(
    title: str, rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[str]
) -> None:
    """Prints a table; what ends in ``_s`` in milliseconds, what ends in ``_bytes`` in MiB."""
    heads = [column.replace("_bytes", "_MiB") for column in columns]
    heads = [f"{head[:-2]}_ms" if head.endswith("_s") else head for head in heads]
    widths = [max(len(head), 9) + 2 for head in heads]
    print(f"\n{title}")
    print(f"  {'':22}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    for name, row in rows.items():
        cells = "".join(f"{_cell(c, row[c]):>{w}}" for c, w in zip(columns, widths, strict=True))
        print(f"  {name:22}{cells}", flush=True)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    if column.endswith("_s"):
        return f"{value * 1e3:.2f}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if "ratio" in column else f"{value:.2e}"
