"""``hmpx export``: writes a model as an ONNX file whose nodes have the types of the lists."""

from __future__ import annotations

import argparse
from typing import Any, Final

from . import functions, output
from .options import DEVICE_TYPES, device_options, list_options

TEXT: Final = f"""\
write a model as an ONNX file whose nodes have their types
---
hmpx export FILE.py:FUNCTION [--inputs FUNCTION] [--onnx FILE] [options]
       hmpx export MODULE:FUNCTION ...
---
Converts torch, and writes an ONNX file in which casts are nodes and weights have the type in which they
are used, for engines that take types from the graph. Prints its nodes, or what is wrong with them.
---
{functions.MODEL}
--onnx FILE=model.onnx  the file to write; default: model.onnx
--outputs fp32|keep  cast low outputs to float32, the default, or leave them
--opset N  ONNX's opset; default: torch's, or 22 with bfloat16
--verify  compare each node's values with torch's, by onnxruntime or ONNX's reference
{DEVICE_TYPES}
--html FILE  write a page that needs no network
--json FILE  write the nodes as JSON
--csv FILE  write a table of the nodes
list options
---
{functions.ABOUT_PROGRAM}

exit status:
  0; 1 faults in the file; 2 if the model can't be exported, or the arguments are wrong

examples:
  hmpx export train.py:build_model --inputs make_batch --low-precision-type float16
  hmpx export my_package.models:build --policy policy.yaml --onnx build.onnx --html build.html"""


def run(options: argparse.Namespace) -> int:
    """Exports, prints the nodes and writes the requested files."""
    for name in ("onnx", "html", "json", "csv"):
        output.check_writable(f"--{name}", getattr(options, name))
    return functions.run_on(options, _run)


def _run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    from ..exporting import export  # slow to import

    exported = export(
        given["model"](),
        given["inputs"](),
        options.onnx,
        outputs=options.outputs or "fp32",
        opset_version=options.opset,
        verify=options.verify,
        **list_options(options),
        **device_options(options),
    )
    writers = {"html": exported.to_html, "json": exported.to_json, "csv": exported.to_csv}
    lines = [*str(exported).splitlines(), *output.written(options, **writers)]
    return output.show(lines, status=1 if exported.faults else 0)
