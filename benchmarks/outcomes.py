"""What trainings reached in each mode beside fp32: statistics over seeds, tables, a picture.

Knows nothing of how they are trained: a row has a task, a mode, a seed, and numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Task -> mode -> figure -> number or numbers.
Figures = dict[str, dict[str, dict[str, Any]]]

BASE = "fp32"
LEVEL = 0.05  # of the tests


def figures(rows: Iterable[Mapping[str, Any]]) -> Figures:
    """Returns the figures of all tasks and modes, each over the seeds that fp32 has, too."""
    runs: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for row in rows:
        runs.setdefault(row["task"], {}).setdefault(row["mode"], {})[row["seed"]] = row
    found: Figures = {}
    for task, modes in runs.items():
        base = modes.get(BASE, {})
        for mode, by_seed in modes.items():
            seeds = sorted(by_seed.keys() & base.keys())
            if seeds:
                pairs = [(by_seed[seed], base[seed]) for seed in seeds]
                found.setdefault(task, {})[mode] = _summary(pairs)
    return found


def _summary(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    curves = [row["curve"] for row, _ in pairs]
    return {
        "seeds": len(pairs),
        **{
            name: compared([row[name] for row, _ in pairs], [base[name] for _, base in pairs])
            for name in ("metric", "loss")
        },
        "untrained": statistics.fmean(base["untrained"] for _, base in pairs),
        "seconds": statistics.median(row["seconds"] for row, _ in pairs),
        "time_ratio": statistics.median(row["seconds"] / base["seconds"] for row, base in pairs),
        "curve": [float(f"{statistics.fmean(losses):.5g}") for losses in zip(*curves, strict=True)],
    }


def compared(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Returns mean and deviation of values, and how they differ from those of fp32, pair by pair.

    ``difference`` is the mean of the differences, ``low`` to ``high`` its 95 % interval, ``p`` that of the
    two-sided paired t-test. ``differs`` where p is below 0.05 and the difference is larger than ``spread``, the
    standard deviation of ``base``. Values that are not finite differ.
    """
    from scipy.special import stdtr, stdtrit

    differences = [a - b for a, b in zip(values, base, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    found = {"mean": statistics.fmean(values), "difference": mean}
    if not all(map(math.isfinite, differences)):
        return {**found, "differs": True}
    if count < 2:
        return {**found, "differs": False}
    error, spread = statistics.stdev(differences) / math.sqrt(count), statistics.stdev(base)
    half = error * float(stdtrit(count - 1, 1 - LEVEL / 2))
    p = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return {
        **found,
        "deviation": statistics.stdev(values),
        "spread": spread,
        "low": mean - half,
        "high": mean + half,
        "p": p,
        "differs": p < LEVEL and abs(mean) > spread,
    }


def printed(found: Figures) -> str:
    """Returns all comparisons as text, a line each."""
    names = ("mean", "deviation", "difference", "low", "high", "p")
    head = "".join(f"{name:>11}" for name in names)
    lines = [f"{'task':10}{'mode':10}{'of':6}{'seeds':>6}{head}  differs   time"]
    for task, modes in found.items():
        for mode, figure in modes.items():
            for of in ("metric", "loss"):
                cells = "".join(f"{_number(figure[of].get(name)):>11}" for name in names)
                verdict = "yes" if figure[of]["differs"] else "no"
                time = f"{figure['time_ratio']:7.2f}"
                lines.append(
                    f"{task:10}{mode:10}{of:6}{figure['seeds']:6}{cells}{verdict:>9}{time}"
                )
    return "\n".join(lines)


def tables(found: Figures, labels: Mapping[str, str]) -> dict[str, str]:
    """Returns name -> Markdown table.

    Args:
        found: The figures.
        labels: Task -> what stands before its scores.
    """
    modes = list(dict.fromkeys(mode for rows in found.values() for mode in rows))

    def by_task(cell: Callable[[Mapping[str, Any]], str]) -> list[list[str]]:
        return [
            [task, *(cell(rows[mode]) if mode in rows else "-" for mode in modes)]
            for task, rows in found.items()
        ]

    scores = [
        [labels[task], f"{found[task][BASE]['untrained']:.3g}", *cells]
        for task, *cells in by_task(lambda figure: _cell(figure["metric"]))
    ]
    losses = by_task(lambda figure: _cell(figure["loss"]))
    times = by_task(lambda figure: f"{figure['time_ratio']:.2f}")
    totals = [
        [mode, *_total([rows[mode] for rows in found.values() if mode in rows])]
        for mode in modes
        if mode != BASE
    ]
    return {
        "modes": _table(["mode", "scores that differ", "losses that differ", "time"], totals),
        "scores": _table(["task", "untrained", *modes], scores),
        "losses": _table(["task", *modes], losses),
        "times": _table(["task", *modes], times),
    }


def _total(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = [
        f"{sum(figure[of]['differs'] for figure in figures)} of {len(figures)}"
        for of in ("metric", "loss")
    ]
    return [*counts, f"{statistics.median(figure['time_ratio'] for figure in figures):.2f}"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def _cell(figure: Mapping[str, Any]) -> str:
    text = f"{figure['mean']:.3g}"
    if "deviation" in figure:
        text += f" ± {figure['deviation']:.1g}"
    return f"**{text}**" if figure["differs"] else text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def draw(found: Figures, colors: Mapping[str, str], steps: Mapping[str, int], path: Path) -> None:
    """Draws the training losses, means over the seeds: a panel for each task, a line for each mode.

    Args:
        found: The figures.
        colors: Mode -> color.
        steps: Task -> of its training.
        path: An .svg or .png.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    columns = min(4, len(found))
    lines = math.ceil(len(found) / columns)
    style = {"svg.fonttype": "none", "svg.hashsalt": "hmpx", "font.size": 9}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(
            lines,
            columns,
            figsize=(3.2 * columns, 2.5 * lines + 0.3),
            layout="constrained",
            squeeze=False,
        )
        for panel in panels.flat[len(found) :]:
            panel.set_axis_off()
        for panel, (task, rows) in zip(panels.flat, found.items(), strict=False):
            for mode, color in colors.items():
                if mode in rows:
                    losses = rows[mode]["curve"]
                    places = [
                        (point + 0.5) * steps[task] / len(losses) for point in range(len(losses))
                    ]
                    panel.plot(places, losses, color=color, linewidth=1, label=mode)
            panel.set(title=task, xlabel="step")
            if all(loss > 0 for row in rows.values() for loss in row["curve"]):
                panel.set_yscale("log")
            panel.grid(alpha=0.3)
        panels[0, 0].set_ylabel("training loss")
        names = {
            label: line
            for panel in panels.flat
            for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            names.values(), names, loc="outside lower center", ncols=len(names), frameon=False
        )
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
