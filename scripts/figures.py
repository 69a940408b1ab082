"""Writes the figures of speed and size in the documents anew, from what benchmarks have saved.

    python scripts/figures.py

In a text a figure, or a range, is followed by where it comes from: ``4 to 27<!-- train-cpu: PATH -->``.
PATH is keys of ``results/train-cpu.json`` joined by dots, where ``*`` means every key, or one path
``over`` or ``less`` another; a range goes from the least to the largest value. The tables of
docs/evidence/speed.md come from `TABLES`. Figures keep the number of decimals that they are written with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]

FIGURE = r"\d+(?:\.\d+)?"
SOURCED = re.compile(rf"({FIGURE})(?:(\s+to\s+)({FIGURE}))?(<!--\s*([\w-]+): ([^>]+?)\s*-->)")


def result(name: str) -> Any:
    """Returns what a benchmark has saved."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def values(tree: Any, keys: list[str]) -> Iterator[float]:
    """Yields the numbers at a path."""
    if not keys:
        yield float(tree)
        return
    for key in tree if keys[0] == "*" else [keys[0]]:
        if key in tree or keys[0] != "*":
            yield from values(tree[key], keys[1:])


def measured(name: str, path: str) -> list[float]:
    """Returns what is at ``path`` in a result, or at one path over, or less, what is at another."""
    first, word, second = [*re.split(r" (over|less) ", path, maxsplit=1), "", ""][:3]
    found = list(values(result(name), first.split(".")))
    if not word:
        return found
    (other,) = values(result(name), second.split("."))
    return [value / other if word == "over" else value - other for value in found]


def like(figure: str, value: float) -> str:
    """Returns ``value`` with as many decimals as ``figure``."""
    return f"{value:.{len(figure.partition('.')[2])}f}"


def with_sourced_figures(text: str) -> str:
    """Returns a text with the figures that its sources say.

    Raises:
        ValueError: Several values stand behind one figure.
    """

    def said(match: re.Match[str]) -> str:
        low, word, high, source, name, path = match.groups()
        found = measured(name, " ".join(path.split()))
        if not high and len(found) != 1:
            raise ValueError(
                f"{match[0]}: there are {len(found)} values; write a range, as in 1 to 2"
            )
        last = f"{word}{like(high, max(found))}" if high else ""
        return f"{like(low, min(found))}{last}{source}"

    return SOURCED.sub(said, text)


# --- tables of docs/evidence/speed.md ----------------------------------------------------------------------

MODELS = {"GPT": "gpt", "Llama": "llama", "BERT": "bert", "ViT": "vit", "ResNet": "resnet"}
CASES = {
    "GPT, decoding one token": "decode",
    "GPT, 16 rows": "rows 16",
    "GPT, 256 rows": "rows 256",
    "ResNet-18, batch 1": "resnet 1",
    "ResNet-18, batch 32": "resnet 32",
}


def training(label: str) -> list[float]:
    """Returns the figures of a model: times over fp32's, and the share of bytes kept."""
    model, size = label.split(", ")
    times = result("train-cpu")["figures"][MODELS[model]][size]
    kept = result("memory-cpu")["figures"][MODELS[model]][size]["hmpx"]["saved_ratio"]
    return [*[times[name]["ratio"] for name in ("autocast", "hmpx", "hmpx fast")], kept]


def inference(label: str) -> list[float]:
    """Returns the figures of a case: times over fp32's, and the share of bytes of weights."""
    known = result("inference-cpu")["figures"][CASES[label]]["medium"]
    names = ("autocast", "bf16", "hmpx", "hmpx frozen")
    return [*[known[name]["ratio"] for name in names], known["hmpx frozen"]["weight_ratio"]]


def overhead(label: str) -> list[float]:
    """Returns the figures of an op: microseconds, and those that wrappers and casts add."""
    known = result("overhead-cpu")["ops_us"][label.partition(" ")[0]]
    over = [known[name] - known["raw"] for name in ("pass-through", "disabled", "naive")]
    return [known["raw"], *over, *[known[name] - known["raw"] for name in ("by hand", "casting")]]


#: The first word of a table's head -> the figures of a row, by its label.
TABLES: dict[str, Callable[[str], list[float]]] = {
    "training step": training,
    "inference": inference,
    "op": overhead,
}


def with_tables(text: str) -> str:
    """Returns docs/evidence/speed.md with the figures of its tables; remarks in cells stay."""
    for first, figures in TABLES.items():
        table = re.compile(rf"(^\| {first} \|.*\n\|[-|]+\|\n)((?:\|.*\n)+)", re.MULTILINE)
        (match,) = table.finditer(text)
        rows = [_row(line, figures) for line in match[2].splitlines(keepends=True)]
        text = f"{text[: match.start(2)]}{''.join(rows)}{text[match.end(2) :]}"
    return text


def _row(line: str, figures: Callable[[str], list[float]]) -> str:
    label, *cells = [cell.strip() for cell in line.strip("|\n").split("|")]
    new = [_cell(cell, value) for cell, value in zip(cells, figures(label), strict=True)]
    return f"| {' | '.join([label, *new])} |\n"


def _cell(cell: str, value: float) -> str:
    match = re.match(rf"(\+?)({FIGURE})", cell)
    if match is None:
        raise ValueError(f"no figure in {cell!r}")
    if match[0] == "0" and abs(value) < 0.05:  # microseconds
        return cell
    return f"{match[1]}{like(match[2], value)}{cell[match.end() :]}"


def updated(path: Path) -> str:
    """Returns the text of a document with the figures of the results."""
    text = with_sourced_figures(path.read_text("utf-8"))
    return with_tables(text) if path.name == "speed.md" else text


def main() -> None:
    """Writes the documents that differ, and prints their names."""
    for path in DOCUMENTS:
        text = updated(path)
        if text != path.read_text("utf-8"):
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
