"""What trainings reached in each mode beside fp32: statistics over seeds, tables, a picture.

Knows nothing of how they are trained: a row has a task, a mode, a seed, and numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
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


def compared(values: Sequence[float], base: Sequence[float]) -> dict[str, float | None]:
    """Returns mean and deviation of values, and how they differ from those of fp32, pair by pair.

    ``difference`` is the mean of the differences, ``low`` to ``high`` its 95 % interval, ``p`` that of the
    two-sided paired t-test, ``deviations`` the difference in standard deviations of ``base``. Values that are
    not finite differ.
    """
    from scipy.special import stdtr, stdtrit

    differences = [a - b for a, b in zip(values, base, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    found: dict[str, float | None] = {"mean": statistics.fmean(values), "difference": mean}
    if not all(map(math.isfinite, differences)):
        return {**found, "deviation": None, "p": 0.0}
    if count < 2:
        return {**found, "deviation": None, "p": None}
    error = statistics.stdev(differences) / math.sqrt(count)
    spread = statistics.stdev(base)
    half = error * float(stdtrit(count - 1, 1 - LEVEL / 2))
    p = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return {
        **found,
        "deviation": statistics.stdev(values),
        "low": mean - half,
        "high": mean + half,
        "p": p,
        "deviations": mean / spread if spread else None,
    }


def differs(figure: Mapping[str, float | None]) -> bool:
    """Whether a mode's values differ from fp32's at the 5 % level."""
    p = figure["p"]
    return p is not None and p < LEVEL


def printed(found: Figures) -> str:
    """Returns all comparisons as text, a line each."""
    head = f"{'task':10} {'mode':10} {'of':6} seeds {'mean':>10} {'deviation':>10} {'difference':>11} {'95 %':>23} {'p':>7}"
    lines = [f"{head}   time"]
    for task, modes in found.items():
        for mode, figure in modes.items():
            for name in ("metric", "loss"):
                it = figure[name]
                interval = f"{_number(it.get('low'))} to {_number(it.get('high'))}"
                lines.append(
                    f"{task:10} {mode:10} {name:6} {figure['seeds']:5} {_number(it['mean']):>10} "
                    f"{_number(it['deviation']):>10} {_number(it['difference']):>11} {interval:>23} "
                    f"{_number(it['p']):>7} {figure['time_ratio']:6.2f}"
                )
    return "\n".join(lines)


def tables(found: Figures, metrics: Mapping[str, str]) -> dict[str, str]:
    """Returns name -> Markdown table.

    Args:
        found: The figures.
        metrics: Task -> what its metric is called.
    """
    modes = list(dict.fromkeys(mode for rows in found.values() for mode in rows))
    others = [mode for mode in modes if mode != BASE]
    scores = [
        [f"{task}, {metrics[task]}", f"{found[task][BASE]['untrained']:.3g}"]
        + [_cell(found[task].get(mode, {}).get("metric")) for mode in modes]
        for task in found
    ]
    losses = [
        [task, *(_cell(found[task].get(mode, {}).get("loss")) for mode in modes)] for task in found
    ]
    times = [
        [task, *(f"{rows[mode]['time_ratio']:.2f}" if mode in rows else "-" for mode in modes)]
        for task, rows in found.items()
    ]
    return {
        "modes": _table(
            ["mode", "metrics that differ", "losses that differ", "time, median"],
            [[mode, *_total(found, mode)] for mode in others],
        ),
        "metrics": _table(["task, metric", "untrained", *modes], scores),
        "losses": _table(["task", *modes], losses),
        "times": _table(["task", *modes], times),
    }


def _total(found: Figures, mode: str) -> list[str]:
    there = [modes[mode] for modes in found.values() if mode in modes]
    counts = [
        f"{sum(differs(figure[name]) for figure in there)} of {len(there)}"
        for name in ("metric", "loss")
    ]
    return [*counts, f"{statistics.median(figure['time_ratio'] for figure in there):.2f}"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def _cell(figure: Mapping[str, float | None] | None) -> str:
    if figure is None:
        return "-"
    mean = f"{figure['mean']:.3g}"
    text = mean if figure["deviation"] is None else f"{mean} ± {figure['deviation']:.1g}"
    return f"**{text}**" if differs(figure) else text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


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

    columns = max(min(4, len(found)), 1)
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
