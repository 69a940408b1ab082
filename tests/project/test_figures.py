"""Figures of speed and size in the documents are those of benchmarks/results.

A figure, or a range, is followed by where it comes from: ``4 to 27<!-- train-cpu: PATH -->``. PATH is
keys joined by dots, where ``*`` means every key, or one path ``over`` or ``less`` another; a range goes
from the least to the largest value. Figures count with as many decimals as they are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
SOURCES = sorted((ROOT / "hmpx").rglob("*.py"))

FIGURE = r"\d+(?:\.\d+)?"
SOURCED = re.compile(rf"({FIGURE})(?:\s+to\s+({FIGURE}))?<!--\s*([\w-]+): ([^>]+?)\s*-->")

#: How much slower or faster something is, as a sentence says it.
COMPARISON = re.compile(
    rf"(?:{FIGURE}|\b(?:ten|twenty|a hundred|a thousand))\s+times\s+(?:slower|faster|as\s+long)"
)


def result(name: str) -> Any:
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
    """Returns what is at ``path`` in a result file, or at one path over, or less, what is at another."""
    first, word, second = [*re.split(r" (over|less) ", path, maxsplit=1), "", ""][:3]
    found = list(values(result(name), first.split(".")))
    if not word:
        return found
    (other,) = values(result(name), second.split("."))
    return [value / other if word == "over" else value - other for value in found]


def like(figure: str, value: float) -> str:
    """Returns ``value`` with as many decimals as ``figure``."""
    return f"{value:.{len(figure.partition('.')[2])}f}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sourced_figures_are_those_of_the_results(document: Path) -> None:
    """Each one, and both ends of a range."""
    faults = []
    for match in SOURCED.finditer(document.read_text("utf-8")):
        low, high, name, path = match.groups()
        found = measured(name, " ".join(path.split()))
        if not high and len(found) != 1:
            faults.append(f"{match[0]}: {len(found)} values; give a range")
        expected = (like(low, min(found)), like(high or low, max(found)))
        if (low, high or low) != expected:
            faults.append(f"{match[0]}: is {' to '.join(dict.fromkeys(expected))}")
    assert not faults


@pytest.mark.parametrize(
    "document", DOCUMENTS + SOURCES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_how_much_slower_something_is_is_said_with_its_source(document: Path) -> None:
    """Elsewhere it is said without a number."""
    text = document.read_text("utf-8")
    unsourced = SOURCED.sub("", text)
    assert not COMPARISON.findall(unsourced)


def test_most_figures_of_native_bf16_have_one_source() -> None:
    """The README, docs/speed.md and docs/legalize.md say how slow it is."""
    for document in (
        ROOT / "README.md",
        *(ROOT / "docs" / f"{n}.md" for n in ("legalize", "speed")),
    ):
        assert "<!-- train-cpu: figures.*.*.autocast.ratio --> times" in " ".join(
            document.read_text("utf-8").split()
        )


# --- tables of docs/speed.md ----------------------------------------------------------------------

MODELS = {"GPT": "gpt", "BERT": "bert", "ViT": "vit", "ResNet": "resnet"}
CASES = {
    "GPT, decoding one token": "decode",
    "GPT, 16 rows": "rows 16",
    "GPT, 256 rows": "rows 256",
    "ResNet-18, batch 1": "resnet 1",
    "ResNet-18, batch 32": "resnet 32",
}


def rows(first: str) -> dict[str, list[str]]:
    """Returns label -> cells of the table in docs/speed.md whose head begins so."""
    text = (ROOT / "docs" / "speed.md").read_text("utf-8")
    (body,) = re.findall(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]
    return {label: cells for label, *cells in lines}


def training(label: str) -> list[float]:
    model, size = label.split(", ")
    times = result("train-cpu")["figures"][MODELS[model]][size]
    kept = result("memory-cpu")["figures"][MODELS[model]][size]["hmpx"]["saved_ratio"]
    return [*[times[name]["ratio"] for name in ("autocast", "hmpx", "hmpx fast")], kept]


def inference(label: str) -> list[float]:
    known = result("inference-cpu")["figures"][CASES[label]]["medium"]
    names = ("autocast", "bf16", "hmpx", "hmpx frozen")
    return [*[known[name]["ratio"] for name in names], known["hmpx frozen"]["weight_ratio"]]


def overhead(label: str) -> list[float]:
    known = result("overhead-cpu")["ops_us"][label.partition(" ")[0]]
    over = [known[name] - known["raw"] for name in ("pass-through", "disabled", "naive")]
    return [known["raw"], *over, *[known[name] - known["raw"] for name in ("by hand", "casting")]]


@pytest.mark.parametrize(
    ("first", "expected"),
    [("training step", training), ("inference", inference), ("op", overhead)],
)
def test_tables_are_those_of_the_results(
    first: str, expected: Callable[[str], list[float]]
) -> None:
    """Each cell; remarks in it aside."""
    faults = []
    table = rows(first)
    for label, cells in table.items():
        for cell, value in zip(cells, expected(label), strict=True):
            figure = cell.split(" ")[0].removeprefix("+")
            is_zero = figure == "0" and abs(value) < 0.05
            if not is_zero and like(figure, value) != figure:
                faults.append(f"{label}: {cell} is {value:.3f}")
    assert not faults
    assert len(table) >= 5


def test_compiled_casts_cost_what_casts_by_hand_cost() -> None:
    """Within the 2 % that docs/speed.md says, and with equal results."""
    text = (ROOT / "docs" / "speed.md").read_text("utf-8")
    assert "Under torch.compile the two are equal within 2 %, with bit-equal results" in " ".join(
        text.split()
    )
    known = result("compiled-cpu")
    assert known["bit_equal"]
    for ratios in known["ratios"].values():
        assert abs(ratios["hmpx, compiled / by hand, compiled"] - 1) < 0.02
