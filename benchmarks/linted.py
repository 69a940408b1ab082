"""What `hmpx.lint` finds in models under torch.autocast, and whether written contracts hold on other weights.

    python benchmarks/linted.py [NAME ...] [--count 80] [--save]

Models that don't run under torch.autocast are left out. With ``--save``, the figures and all findings go to
benchmarks/results/linted-cpu.json.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import hmpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo.catalogue import entries, sample
from zoo.entry import Entry


def runner(entry: Entry, seed: int) -> Any:
    """Returns a function that runs a new model forward and backward."""
    torch.manual_seed(seed)
    model = entry.build()
    entry.compared_mode(model)
    batch = entry.batch(model)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = entry.forward(model, batch)
        leaves = tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
        losses = [
            each.float().square().mean()
            for each in leaves
            if isinstance(each, Tensor) and each.requires_grad and each.is_floating_point()
        ]
        if losses:
            torch.stack(losses).sum().backward()

    return run


def look(entry: Entry) -> dict[str, Any]:
    """Returns the findings in a model, and what breaks the contract that another instance keeps."""
    run = runner(entry, 0)
    run()
    with hmpx.lint() as findings:
        run()
    with tempfile.TemporaryDirectory() as folder:
        contract = Path(folder) / "contract.yaml"
        contract.write_text(hmpx.expect.of(run, ()), "utf-8")
        again = runner(entry, 1)
        with torch.no_grad(), hmpx.expect(contract, mode="collect") as seen:
            again()
    return {"findings": [*map(str, findings)], "breaches": [*map(str, seen.breaches)]}


def main() -> None:
    """Prints a line for each model, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: a sample")
    parser.add_argument("--count", type=int, default=80, help="of the sample")
    parser.add_argument("--save", action="store_const", const=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [each for each in entries() if each.name in options.names]
    models: dict[str, Any] = {}
    for entry in chosen or sample(entries(), options.count):
        try:
            runner(entry, 0)()
        except Exception as error:  # also without hmpx
            print(f"{entry.name}: left out: {type(error).__name__}", flush=True)
            continue
        models[entry.name] = look(entry)
        print(
            entry.name, *models[entry.name]["findings"], *models[entry.name]["breaches"], sep="\n  "
        )
    found = [each for model in models.values() for each in model["findings"]]
    codes = collections.Counter(each.partition(": HP")[2][:3] for each in found)
    figures = {
        "models": len(models),
        "findings": len(found),
        "broken": sum(bool(model["breaches"]) for model in models.values()),
        "codes": {f"HP{code}": count for code, count in sorted(codes.items())},
    }
    print(figures)
    timing.save(
        options.save, "linted", {"figures": figures, "models": models}, device="cpu", threads=1
    )


if __name__ == "__main__":
    main()
