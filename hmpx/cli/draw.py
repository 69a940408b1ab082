"""``hmpx draw``: draws the graph of a model with its casts."""

from __future__ import annotations

import argparse
from typing import Any, Final

from .. import session
from . import functions, output
from .options import DEVICE_TYPES, device_options, list_options

TEXT: Final = f"""\
draw the graph of a model: ops by dtype, casts, modules
---
hmpx draw FILE.py:FUNCTION [--inputs FUNCTION] [--output FILE] [options]
       hmpx draw MODULE:FUNCTION ...
---
Converts torch, calls the model once, and draws the autograd graph of its output.
---
{functions.MODEL}
--output FILE=graph.dot  a picture: .dot, or with graphviz .svg, .png or .pdf; default: graph.dot
--max-nodes N=1000  draw the N nodes nearest to the output; default: 1000
--no-fold  draw each of similar modules
{DEVICE_TYPES}
list options
---
{functions.ABOUT_PROGRAM}

exit status:
  0; 2 if there is no graph, or the arguments are wrong

examples:
  hmpx draw train.py:build_model --inputs make_batch
  hmpx draw my_package.models:build --lists lean --output graph.svg"""


def run(options: argparse.Namespace) -> int:
    """Draws, and writes the picture."""
    output.check_writable("--output", options.output)
    return functions.run_on(options, _run)


def _run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    from ..recording import draw  # slow to import

    model, inputs = given["model"](), given["inputs"]()
    with session.convert(**list_options(options), **device_options(options)):
        drawing = draw(model, inputs, max_nodes=options.max_nodes, fold=not options.no_fold)
    return output.show([str(drawing), *output.written(options, output=drawing.save)])
