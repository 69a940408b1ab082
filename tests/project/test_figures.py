"""Figures of speed and size in the documents are those of benchmarks/results: see scripts/figures.py."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


documents = _loaded()
DOCUMENTS: list[Path] = documents.DOCUMENTS
SOURCES = sorted((ROOT / "hmpx").rglob("*.py"))

#: How much slower or faster something is, as a sentence says it.
COMPARISON = re.compile(
    rf"(?:{documents.FIGURE}|\b(?:ten|twenty|a hundred|a thousand))\s+times\s+(?:slower|faster|as\s+long)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_those_of_the_results(document: Path) -> None:
    """Those with a source, and those of the tables in docs/speed.md."""
    written = document.read_text("utf-8").splitlines()
    assert written == documents.updated(document).splitlines(), "run python scripts/figures.py"


def test_figures_are_written_as_the_results_say(tmp_path: Path) -> None:
    """With as many decimals as before; a range from the least to the largest."""
    times = {"a": {"ratio": 1.234}, "b": {"ratio": 5.678}}
    figures = {"train-cpu": {"figures": times}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "result", figures.__getitem__)
        for before, after in (
            (
                "9.99<!-- train-cpu: figures.a.ratio --> x",
                "1.23<!-- train-cpu: figures.a.ratio --> x",
            ),
            (
                "9 to\n0.1<!-- train-cpu: figures.*.ratio -->",
                "1 to\n5.7<!-- train-cpu: figures.*.ratio -->",
            ),
            (
                "9.0<!-- train-cpu: figures.b.ratio over figures.a.ratio -->",
                "4.6<!-- train-cpu: figures.b.ratio over figures.a.ratio -->",
            ),
            (
                "9.0<!-- train-cpu: figures.b.ratio\nless figures.a.ratio -->",
                "4.4<!-- train-cpu: figures.b.ratio\nless figures.a.ratio -->",
            ),
            ("9.99 <!-- a remark -->", "9.99 <!-- a remark -->"),
        ):
            assert documents.with_sourced_figures(before) == after
        with pytest.raises(ValueError, match="there are 2 values; write a range"):
            documents.with_sourced_figures("9<!-- train-cpu: figures.*.ratio -->")
    assert documents._cell("+4.28 (weights stay fp32)", 3.0) == "+3.00 (weights stay fp32)"
    assert documents._cell("0 (torch promotes)", 0.02) == "0 (torch promotes)"
    assert documents._cell("0 (torch promotes)", 0.7) == "1 (torch promotes)"


@pytest.mark.parametrize(
    "document", DOCUMENTS + SOURCES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_how_much_slower_something_is_is_said_with_its_source(document: Path) -> None:
    """Elsewhere it is said without a number."""
    text = document.read_text("utf-8")
    unsourced = documents.SOURCED.sub("", text)
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


def test_compiled_casts_cost_what_casts_by_hand_cost() -> None:
    """Within the 2 % that docs/speed.md says, and with equal results."""
    text = (ROOT / "docs" / "speed.md").read_text("utf-8")
    assert "Under torch.compile the two are equal within 2 %, with bit-equal results" in " ".join(
        text.split()
    )
    known = documents.result("compiled-cpu")
    assert known["bit_equal"]
    for ratios in known["ratios"].values():
        assert abs(ratios["hmpx, compiled / by hand, compiled"] - 1) < 0.02
