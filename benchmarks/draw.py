"""Draws what train.py and inference.py have saved: time relative to fp32, as one SVG.

    python benchmarks/draw.py [--device cuda] [--folder FOLDER]

Reads train-DEVICE.json and inference-DEVICE.json, one of which may be missing, and writes
DEVICE.svg beside them. Needs matplotlib, which hmpx does not install. Its colours are readable on
white and on black.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

INK = "#6e7781"  # contrast of 4.5 with white and 4.1 with GitHub's dark background
COLORS = {
    "fp32": "#8c959f",
    "autocast": "#d4772c",
    "hmpx": "#3b82d6",
    "hmpx fast": "#2da44e",
    "hmpx frozen": "#9a6ae0",
}
SIZE = "medium"
TOP = 3.0  # times fp32; bars beyond are broken, and their figure is written above
BAR = 0.2  # width, of the distance between two groups

MODELS = {"gpt": "GPT", "llama": "Llama", "bert": "BERT", "vit": "ViT", "resnet": "ResNet"}
CASES = {"decode": "GPT, a token at a time"}


@dataclass(frozen=True)
class Panel:
    """Groups of bars; ``groups`` is label -> candidate -> ratio, None where it was not measured."""

    title: str
    candidates: tuple[str, ...]
    groups: dict[str, dict[str, float | None]]


def read_panels(folder: Path, device: str) -> list[Panel]:
    """Returns what there is to draw.

    Raises:
        SystemExit: Nothing is there.
    """
    panels = []
    for name, title, last, labels in (
        ("train", "Training step", "hmpx fast", MODELS),
        ("inference", "Inference", "hmpx frozen", CASES),
    ):
        path = folder / f"{name}-{device}.json"
        if not path.exists():
            continue
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        names = ("fp32", "autocast", "hmpx", last)
        groups = {
            label: {n: figures[key][SIZE].get(n, {}).get("ratio") for n in names}
            for key, label in labels.items()
            if SIZE in figures.get(key, {})
        }
        if groups:
            panels.append(Panel(title, names, groups))
    if not panels:
        raise SystemExit(
            f"nothing to draw: {folder} has no figures of size {SIZE} on {device}; "
            "run train.py and inference.py with --save"
        )
    return panels


def draw(panels: list[Panel], path: Path) -> None:
    """Writes the picture.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit("draw.py needs matplotlib: pip install matplotlib") from error
    mpl.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "hmpx",  # the same figures give the same file
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    counts = [len(panel.groups) for panel in panels]
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            1,
            len(panels),
            figsize=(2 + 1.75 * sum(counts), 3.6),
            width_ratios=[count + 0.4 for count in counts],
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            _draw_panel(axis, panel)
        axes[0][0].set_ylabel("time, fp32 = 1 (less is better)")
        shown = {name: COLORS[name] for panel in panels for name in panel.candidates}
        squares = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in shown.values()]
        figure.legend(
            squares, shown, loc="outside lower center", ncols=len(shown), frameon=False,
            handlelength=1, handleheight=1,
        )  # fmt: skip
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel) -> None:
    for group, ratios in enumerate(panel.groups.values()):
        for number, (name, ratio) in enumerate(ratios.items()):
            if ratio is None:
                continue
            x = group + (number - (len(ratios) - 1) / 2) * BAR
            height = min(ratio, TOP)
            axis.bar(x, height, BAR * 0.88, color=COLORS[name], zorder=2)
            if ratio > TOP:
                _break_bar(axis, x)
            text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
            axis.text(x, height + 0.05, text, ha="center", va="bottom", fontsize=9)
    axis.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axis.set_title(panel.title, fontsize=12, fontweight="bold")
    axis.set_xticks(range(len(panel.groups)), panel.groups)
    axis.set_xlim(-0.55, len(panel.groups) - 0.45)
    axis.set_ylim(0, TOP + 0.3)
    axis.set_yticks(range(int(TOP) + 1))
    axis.tick_params(length=0)
    axis.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6, zorder=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _break_bar(axis: Any, x: float) -> None:
    for y in (TOP - 0.36, TOP - 0.24):
        axis.plot(
            [x - BAR * 0.56, x + BAR * 0.56], [y - 0.05, y + 0.05], color=INK, linewidth=1.6, zorder=3
        )  # fmt: skip


def main() -> None:
    """Draws the picture and tells where it is."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the figures are")
    options = parser.parse_args()
    path = options.folder / f"{options.device}.svg"
    draw(read_panels(options.folder, options.device), path)
    print(path)


if __name__ == "__main__":
    main()
