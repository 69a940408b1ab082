"""Types and errors of the nodes that `hmpx.export` writes for models of transformers, in float16.

    python benchmarks/exported.py [NAME ...] [--count 40] [--modelopt PYTHON] [--save]

Models that torch's exporter refuses without hmpx, too, are counted apart. With ``--modelopt``, ModelOpt's AutoCast in
another Python (``pip install 'nvidia-modelopt[onnx]'``) converts torch's float32 file of each model, calibrated on the
same inputs and on its noise. With ``--save``, the figures go to benchmarks/results/exported-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import timing
import torch

import hmpx
from hmpx.exporting import OnnxFile, read_onnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo.catalogue import entries, sample
from zoo.entry import Entry, call
from zoo.measuring import built

#: Runs in another Python: converts a float32 file by AutoCast, as the rows of a JSON file tell. Prints errors.
AUTOCAST = """
import json, sys, onnx
from modelopt.onnx.autocast import convert_to_mixed_precision
source, rows = sys.argv[1:]
for target, options in json.load(open(rows)).items():
    try:
        onnx.save(convert_to_mixed_precision(source, "fp16", keep_io_types=True, **options), target)
    except Exception as error:
        print(target, type(error).__name__, str(error).replace(chr(10), " ")[:200])
"""


def exported(entry: Entry, modelopt: str | None) -> dict[str, Any]:
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
        errors = [(node.output_dtypes[0], node.error) for node in found.nodes]
        figures = counted(found) | {
            "faults": [*found.faults],
            "compared": sum(error is not None for _, error in errors),
            "largest_error": largest("float16", errors),
            "largest_fp32_error": largest("float32", errors),
        }
        if modelopt:
            figures |= compared(model, batch, path, found, modelopt)
    return figures


def largest(dtype: str, errors: list[tuple[str, float | None]]) -> float:
    """Returns the largest error of nodes with results of a type, in ulps of it."""
    return max((error or 0.0 for each, error in errors if each == dtype), default=0.0)


def counted(found: OnnxFile) -> dict[str, Any]:
    """Returns the numbers of nodes in a file."""
    return {
        "nodes": len(found.nodes),
        "casts": sum(node.op_type == "Cast" for node in found.nodes),
        "low": sum(node.dtype == "float16" for node in found.nodes),
        "fp32": sum(node.dtype == "float32" and node.op_type != "Cast" for node in found.nodes),
    }


def compared(
    model: Any, batch: dict[str, Any], path: Path, found: OnnxFile, modelopt: str
) -> dict[str, Any]:
    """Returns the error of a file's outputs, and AutoCast's figures, also with the types of its nodes."""
    ours = [node for node in found.nodes if node.op_type != "Cast"]
    wide, inputs = path.with_name("fp32.onnx"), path.with_name("inputs.npz")
    try:
        torch.onnx.export(model, (), wide, kwargs=batch, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:  # only without casts
        return {"autocast_inputs": {"error": f"torch exports no float32 file: {error}"[:80]}}
    values = [each.numpy() for each in batch.values() if isinstance(each, torch.Tensor)]
    names = [each.name for each in session(wide).get_inputs()]
    given = dict(zip(names, values, strict=True))
    numpy.savez(inputs, **given)
    expected = session(wide).run(None, given)
    figures: dict[str, Any] = {"output_error": output_error(path, given, expected)}
    lean = path.with_name("lean.onnx")
    found = hmpx.export(model, batch, lean, low_precision_type="float16", lists="lean")
    figures["lean"] = counted(found) | {"output_error": output_error(lean, given, expected)}
    options = {
        "inputs": {"calibration_data": str(inputs)},
        "noise": {},
        "same": {  # our decisions
            f"nodes_to_{word}": [
                f"^{re.escape(node.name)}$" for node in ours if node.dtype == dtype
            ]
            for word, dtype in (("exclude", "float32"), ("include", "float16"))
        },
    }
    targets = {name: path.with_name(f"{name}.onnx") for name in options}
    rows = path.with_suffix(".json")
    rows.write_text(json.dumps({str(targets[name]): each for name, each in options.items()}))
    command = [modelopt, "-c", AUTOCAST, wide, rows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for name, target in targets.items():
        if not target.exists():
            figures[f"autocast_{name}"] = {"error": (done.stdout + done.stderr).strip()[-300:]}
            continue
        found = read_onnx(target)
        figures[f"autocast_{name}"] = counted(found) | {
            "faults": len(found.faults),
            "output_error": output_error(target, given, expected),
        }
    return figures


def session(path: Path) -> Any:
    """Returns onnxruntime's session of a file, which computes its types as they are."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def output_error(path: Path, given: dict[str, Any], expected: list[Any]) -> float | str:
    """Returns the largest relative error of floating outputs, by norms; the message if the file can't run."""
    try:
        outputs = session(path).run(None, given)
    except Exception as error:  # of any kernel
        return f"{type(error).__name__}: {error}"[:200]
    errors = [
        numpy.linalg.norm(got.astype("f8") - want) / max(numpy.linalg.norm(want), 1e-30)
        for got, want in zip(outputs, expected, strict=True)
        if want.dtype.kind == "f"
    ]
    return float(max(errors))


def refused(model: Any, batch: dict[str, Any]) -> bool:
    """Whether torch's exporter refuses the model without hmpx, too."""
    try:
        torch.onnx.export(model, (), kwargs=batch, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError:
        return True
    return False


def summed(models: dict[str, Any]) -> dict[str, Any]:
    """Returns the sums over models."""
    done = [each for each in models.values() if "nodes" in each]
    figures = {
        "models": len(done),
        "refused_by_torch": sum(each.get("alone", False) for each in models.values()),
        "refused": sum(not each.get("alone", True) for each in models.values()),
        "nodes": sum(each["nodes"] for each in done),
        "faults": sum(len(each["faults"]) for each in done),
        "compared": sum(each["compared"] for each in done),
        "largest_error": max(each["largest_error"] for each in done),
        "largest_fp32_error": max(each["largest_fp32_error"] for each in done),
    }
    kinds = ("lean", "autocast_inputs", "autocast_noise", "autocast_same")
    runs = [[each, *[each.get(kind, {}) for kind in kinds]] for each in done]
    runs = [run for run in runs if all(isinstance(e.get("output_error"), float) for e in run)]
    for name, rows in zip(("ours", *kinds), zip(*runs, strict=True), strict=False):
        figures[name] = {
            "models": len(rows),
            **{key: sum(each[key] for each in rows) for key in ("casts", "fp32", "low")},
            "largest_output_error": max(each["output_error"] for each in rows),
        }
    return figures


def main() -> None:
    """Prints a line for each model, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: a sample")
    parser.add_argument("--count", type=int, default=40, help="of the sample of all libraries")
    parser.add_argument("--modelopt", metavar="PYTHON", help="one with nvidia-modelopt[onnx]")
    parser.add_argument("--save", action="store_const", const=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    chosen = [each for each in entries() if each.name in options.names]
    models: dict[str, Any] = {}
    for entry in chosen or sample(entries(), options.count):
        if entry.library == "transformers" and entry.forward is call:
            models[entry.name] = exported(entry, options.modelopt)
            print(entry.name, models[entry.name], flush=True)
    figures = summed(models)
    print(figures)
    timing.save(
        options.save, "exported", {"figures": figures, "models": models}, device="cpu", threads=1
    )


if __name__ == "__main__":
    main()
