"""What a step asks of a GPU, counted without one: kernels, casts and bytes beside torch.autocast.

    python benchmarks/kernel_counts.py [--models gpt2 t5] [--save] [--document]

Runs on a CUDA device whose tensors have no values: tests/fake_cuda. Needs a torch built for CPUs, a C++ compiler,
hmpx's compiled nodes and transformers. `--document` writes the tables into docs/evidence/speed.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import timing

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from hmpx import compute  # noqa: E402
from tests import fake_cuda  # noqa: E402
from tests.fake_cuda import candidates, models  # noqa: E402

#: Model -> candidate -> figure -> number.
Figures = Mapping[str, Mapping[str, Mapping[str, int]]]

DOCUMENT = ROOT / "docs" / "evidence" / "speed.md"
COLUMNS = ("kernels", "casts", "casts_of_parameters", "bytes", "cast_bytes", "waits")
TABLES = {"training": tuple(candidates.TRAINING), "inference": tuple(candidates.INFERENCE)}


def measure(names: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the figures of all candidates, each model in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        guard = fake_cuda.build(Path(folder))
        return {name: fake_cuda.call(guard, candidates.figures, name) for name in names}


def table(figures: Figures, chosen: tuple[str, ...]) -> str:
    """Returns a Markdown table of kernels and megabytes (10^6 bytes), a row for each model."""
    heads = [name.removeprefix("inference, ") for name in chosen]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(chosen) + 1) + "|"]
    for model, row in figures.items():
        cells = [f"{row[c]['kernels']} · {row[c]['bytes'] / 1e6:.0f} MB" for c in chosen]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def documented(text: str, figures: Figures) -> str:
    """Returns the text of docs/evidence/speed.md with new tables."""
    tables = {name: table(figures, chosen) for name, chosen in TABLES.items()}
    return timing.with_tables(text, tables, DOCUMENT)


def main() -> None:
    """Prints the tables; with ``--save`` and ``--document`` also writes them."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=models.NAMES)
    parser.add_argument(
        "--document", action="store_true", help="write docs/evidence/speed.md's tables"
    )
    options = parser.parse_args()
    reason = fake_cuda.missing()
    if reason is not None:
        raise SystemExit(f"kernel_counts.py {reason}")
    if options.document and tuple(options.models) != models.NAMES:
        raise SystemExit("docs/evidence/speed.md has all models: leave out --models")
    if compute.nodes_in_use().module is None:
        raise SystemExit("kernel_counts.py needs compiled nodes: run python hatch_build.py")
    figures = measure(list(options.models))
    for name, rows in figures.items():
        timing.show(name, rows, COLUMNS)
    timing.save(options.save, "kernel_counts", {"figures": figures}, device="fake_cuda", threads=1)
    if options.document:
        DOCUMENT.write_text(documented(DOCUMENT.read_text("utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
