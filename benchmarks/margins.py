"""Margins that `hmpx.diff_runs` needs: by how much differences of sound models exceed their explanation.

    python benchmarks/margins.py [MODEL ...] [--save]

Every sixth model of the zoo, or those that are named, runs forward and backward in float32 and converted to bfloat16. A row's difference is divided
by what its types and inputs explain without a margin; the margin must be larger than almost all of these ratios.
`hmpx/tracing/judging.py` has the margins in use.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Final

import timing
from planted import model_of, run

import hmpx
from hmpx.tracing.judging import GRADIENT_MARGIN, MARGIN

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo.catalogue import entries
from zoo.entry import Entry

#: Phase -> the margin in use.
MARGINS: Final = {"forward": MARGIN, "backward": GRADIENT_MARGIN}


def ratios(entry: Entry, folder: Path) -> dict[str, list[float]]:
    """Returns for each phase the margins that the rows of a model need, in order of size."""
    for name, precision in (("a", "fp32"), ("b", "bf16")):
        run(*model_of(entry), folder / name, precision)
    found: dict[str, list[float]] = {phase: [] for phase in MARGINS}
    for row in hmpx.diff_runs(folder / "a", folder / "b").rows:
        least = row.error - 2 * row.uncertainty
        if row.explained > 0 and 0 < least < math.inf:
            found[row.phase].append(
                MARGINS[row.phase] * math.log1p(least) / math.log1p(row.explained)
            )
    return {phase: sorted(several) for phase, several in found.items()}


def main() -> None:
    """Prints the margins that models need."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="default: every sixth of the zoo"
    )
    parser.add_argument("--save", action="store_const", const=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    every: dict[str, list[float]] = {phase: [] for phase in MARGINS}
    known = list(entries())
    for entry in [each for each in known if each.name in options.models] or known[::6]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = ratios(entry, Path(folder))
            except (
                RuntimeError,
                TypeError,
                ImportError,
            ) as error:  # without gradients, or not installed
                print(f"{entry.name:20}left out: {str(error)[:100]}", flush=True)
                continue
        largest = [max(each, default=0.0) for each in found.values()]
        rows.append([entry.name, *(len(each) for each in found.values()), *largest])
        print(f"{entry.name:20}forward {largest[0]:6.2f}   backward {largest[1]:6.2f}", flush=True)
        for phase, several in found.items():
            every[phase] += several
    figures = {
        phase: {
            "in use": MARGINS[phase],
            "rows": len(several),
            "most": max(several),
            "of 999 in 1000": sorted(several)[len(several) * 999 // 1000],
        }
        for phase, several in every.items()
    }
    print(figures)
    timing.save(
        options.save, "margins", {"figures": figures, "rows": rows}, device="cpu", threads=1
    )


if __name__ == "__main__":
    main()
