"""Types and errors of the nodes that `hmpx.export` writes for models of transformers, in float16.

    python benchmarks/exported.py [NAME ...] [--count 40] [--save]

Models that torch's exporter refuses without hmpx, too, are counted apart. With ``--save``, the figures go to
benchmarks/results/exported-cpu.json.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import timing
import torch

import hmpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo.catalogue import entries, sample
from zoo.entry import Entry, call
from zoo.measuring import built


def exported(entry: Entry) -> dict[str, Any]:
    """Returns the figures of one model; its ``error`` if it can't be exported."""
    model = built(entry)
    entry.compared_mode(model)
    model.config.use_cache = False  # caches are not tensors
    batch = dict(entry.batch(model))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            found = hmpx.export(model, batch, path, low_precision_type="float16", verify=True)
        except hmpx.OptionError as error:
            return {"error": str(error), "alone": refused(model, batch)}
    errors = [node.error for node in found.nodes if node.error is not None]
    return {
        "nodes": len(found.nodes),
        "casts": sum(node.op_type == "Cast" for node in found.nodes),
        "low": sum(node.dtype == "float16" for node in found.nodes),
        "faults": [*found.faults],
        "compared": len(errors),
        "largest_error": max(errors),
    }


def refused(model: Any, batch: dict[str, Any]) -> bool:
    """Whether torch's exporter refuses the model without hmpx, too."""
    try:
        torch.onnx.export(model, (), kwargs=batch, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError:
        return True
    return False


def main() -> None:
    """Prints a line for each model, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: a sample")
    parser.add_argument("--count", type=int, default=40, help="of the sample of all libraries")
    parser.add_argument("--save", action="store_const", const=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    chosen = [each for each in entries() if each.name in options.names]
    models: dict[str, Any] = {}
    for entry in chosen or sample(entries(), options.count):
        if entry.library == "transformers" and entry.forward is call:
            models[entry.name] = exported(entry)
            print(entry.name, models[entry.name], flush=True)
    done = [each for each in models.values() if "nodes" in each]
    figures = {
        "models": len(done),
        "refused_by_torch": sum(each.get("alone", False) for each in models.values()),
        "refused": sum(not each.get("alone", True) for each in models.values()),
        "nodes": sum(each["nodes"] for each in done),
        "faults": sum(len(each["faults"]) for each in done),
        "largest_error": max(each["largest_error"] for each in done),
    }
    print(figures)
    timing.save(
        options.save, "exported", {"figures": figures, "models": models}, device="cpu", threads=1
    )


if __name__ == "__main__":
    main()
