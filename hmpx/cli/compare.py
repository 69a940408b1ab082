"""``hmpx compare``: ranks the ops of a model by the effect of their rounding."""

from __future__ import annotations

import argparse
from typing import Any, Final

import torch

from . import functions, output
from .options import DEVICE_TYPES, device_options, list_options

TEXT: Final = f"""\
rank ops by the effect of their rounding on the loss
---
hmpx compare FILE.py:FUNCTION [--inputs FUNCTION] [--loss-fn FUNCTION] [options]
       hmpx compare MODULE:FUNCTION ...
---
Runs the model forward and backward in low precision and in float32, where each call also runs in low
precision. Prints the ops with the largest effect on the loss, or without --loss-fn on the outputs.
---
{functions.PROGRAM}
--reference float32|float64=float32  compare each call with float32, the default, or with float64
--passes N=1  spread the comparison over N runs, which need less memory
--seed N=0  seed of the random projections; default: 0
{DEVICE_TYPES}
--html FILE  write a page that needs no network
--json FILE  write the figures as JSON
--csv FILE  write a table
list options
---
{functions.ABOUT_PROGRAM}

exit status:
  0; 2 if the model can't be compared, or the arguments are wrong

examples:
  hmpx compare train.py:build_model --inputs make_batch --forward-step forward_step --loss-fn loss_fn
  hmpx compare my_package.models:build --inputs my_package.data:batch --lists hmp --html comparison.html"""


def run(options: argparse.Namespace) -> int:
    """Compares, prints the result and writes the requested files."""
    for name in ("html", "json", "csv"):
        output.check_writable(f"--{name}", getattr(options, name))
    return functions.run_on(options, _run)


def _run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    from ..comparing import compare  # slow to import

    model, inputs = given.pop("model")(), given.pop("inputs")()
    compared = compare(
        model,
        inputs,
        **given,
        reference=getattr(torch, options.reference),
        passes=options.passes,
        seed=options.seed,
        **list_options(options),
        **device_options(options),
    )
    lines = str(compared).splitlines()
    writers = {"html": compared.to_html, "json": compared.to_json, "csv": compared.to_csv}
    return output.show([*lines, *output.written(options, **writers)])
