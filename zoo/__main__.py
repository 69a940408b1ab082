"""Sweeps the zoo: ``python -m zoo --help``."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import catalogue, running, table
from .entry import Entry
from .measuring import SEED
from .modes import DEFAULT, MODES
from .results import ROOT, Results, version
from .trained import models as trained_models
from .trained import running as trained
from .trained import table as trained_table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="PATTERN", help="names, families, libraries")
    parser.add_argument("--modes", nargs="+", metavar="MODE")
    parser.add_argument(
        "--trained",
        action="store_true",
        help="models with trained weights: docs/evidence/trained.md",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sample", type=int, metavar="N", help="so many models of all families")
    parser.add_argument(
        "--seeds", type=int, default=4, metavar="N", help="more, for models over what is accepted"
    )
    parser.add_argument("--again", action="store_true", help="run what has results, too")
    parser.add_argument("--results", type=Path, default=ROOT / "zoo" / "results.jsonl")
    parser.add_argument("--table", type=Path, help="default: that in docs/ after a whole sweep")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of one mode")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB", help="of one process")
    options = parser.parse_args(arguments)
    known = trained.MODES if options.trained else tuple(MODES)
    if not {*(options.modes or ())} <= {*known}:
        parser.error(f"--modes must be of {', '.join(known)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs what is asked for and has no results yet, writes the table; 1 if hmpx stopped a model."""
    options = parse(arguments)
    results = Results(options.results)
    if options.trained:
        return _run_trained(options, results)
    wanted_modes = options.modes or DEFAULT
    chosen = [
        entry
        for entry in catalogue.entries()
        if not options.models
        or any(
            fnmatch.fnmatchcase(name, pattern)
            for pattern in options.models
            for name in (entry.name, entry.family, entry.library)
        )
    ]
    if options.sample is not None:
        chosen = catalogue.sample(chosen, options.sample)
    versions = {mode: version(mode) for mode in MODES}
    start = time.monotonic()
    running.warm_up({entry.library for entry in chosen}, options.device)

    def sweep(wanted: Mapping[Entry, Iterable[str]], seed: int) -> None:
        work: list[tuple[Entry, list[str]]] = []
        for entry, modes in wanted.items():
            left = [
                mode
                for mode in modes
                if options.again
                or not results.is_known((entry.library, entry.name, mode, seed), versions[mode])
            ]
            if left:
                work.append((entry, left))

        def report(entry: Entry, mode: str, measured: dict[str, Any]) -> None:
            results.add({
                "library": entry.library, "family": entry.family, "model": entry.name,
                "mode": mode, "seed": seed, "version": versions[mode], **measured,
            })  # fmt: skip
            print(
                f"{time.monotonic() - start:6.0f} s  {entry.name:32} "
                f"{table.line_of(mode, measured)}",
                flush=True,
            )

        running.sweep(
            work,
            report,
            seed=seed,
            device=options.device,
            jobs=options.jobs,
            limit_s=options.limit,
            memory_bytes=int(options.memory * 2**30),
        )

    sweep(dict.fromkeys(chosen, wanted_modes), SEED)
    models = table.by_model(results.lines.values())
    over = {
        entry: [each for mode in modes for each in (MODES[mode].peer, mode)]
        for entry in chosen
        if (modes := table.modes_over(models.get((entry.library, entry.name), {})))
    }
    for seed in range(SEED + 1, SEED + 1 + options.seeds):
        sweep(over, seed)
    is_whole = not options.models and options.sample is None
    path = options.table or (ROOT / "docs" / "evidence" / "zoo.md" if is_whole else None)
    keys = {(entry.library, entry.name) for entry in chosen}
    lines = [line for key, line in results.lines.items() if key[:2] in keys]
    if path is not None:
        path.write_text(table.document(lines), encoding="utf-8")
    print(table.summary(lines))
    return 1 if table.stops(lines, "hmpx") else 0


def _run_trained(options: argparse.Namespace, results: Results) -> int:
    """Runs trained models and writes their table; 1 if a mode of hmpx stopped one."""
    tasks = trained.chosen(trained_models.tasks(), options.models)
    trained.sweep(tasks, results, options.modes, again=options.again)
    path = options.table or (None if options.models else ROOT / "docs" / "evidence" / "trained.md")
    text = trained_table.document(results.lines.values(), {task.name: task.about for task in tasks})
    if path is not None:
        path.write_text(text, encoding="utf-8")
    else:
        print(text)
    names = {task.name for task in tasks}
    return int(
        any(
            line["errors"] and line["mode"].startswith("hmpx")
            for line in results.lines.values()
            if line["model"] in names
        )
    )


if __name__ == "__main__":
    sys.exit(main())
