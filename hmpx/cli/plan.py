"""``hmpx plan``: plans a training step of a model without its device or its memory."""

from __future__ import annotations

import argparse
from typing import Any, Final

from . import functions, output
from .options import list_options

TEXT: Final = f"""\
estimate a training step: dtypes, memory, casts
---
hmpx plan FILE.py:FUNCTION [--inputs FUNCTION] [--device TYPE] [options]
       hmpx plan MODULE:FUNCTION ...
---
Runs a training step on tensors without values: in float32, under torch.autocast and under
hmpx. Prints the ops in low precision and the memory of tensors. It needs neither the device
nor the memory, whatever the size of the model.
---
{functions.PROGRAM}
--device TYPE  cpu, cuda, hpu, ..., present or not; default: the one here
--optimizer NAME=AdamW  of torch.optim, also with options: "SGD momentum=0.9"; none for none; default: AdamW
--inference  plan a forward instead of a training step
--small  run on real tensors, for models whose computation depends on values; use a small config
--world-size N  also print the memory of each of N processes
--html FILE  write a page that needs no network
--json FILE  write the figures as JSON
list options
---
{functions.ABOUT_PROGRAM}

exit status:
  0; 2 if the model can't be planned, or the arguments are wrong

examples:
  hmpx plan train.py:build_model --inputs make_batch --device hpu
  hmpx plan models/llama.py:build_70b --optimizer Adafactor --world-size 8 --html plan.html
  hmpx plan my_package.models:build --inference --lists hmp"""


def run(options: argparse.Namespace) -> int:
    """Plans, prints the plan and writes the requested files."""
    output.check_writable("--html", options.html)
    output.check_writable("--json", options.json)
    return functions.run_on(options, _run)


def _run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    from ..planning import plan  # slow to import

    found = plan(
        **given,
        device=options.device,
        optimizer=None if options.optimizer.lower() == "none" else options.optimizer,
        training=False if options.inference else None,
        small=options.small,
        **list_options(options),
    )
    lines = str(found).splitlines()
    if options.world_size is not None:
        lines += ["", *found.ranks(options.world_size).splitlines()]
    written = [*output.written(options, html=found.to_html, json=found.to_json)]
    return output.show([*lines, *([""] if options.html else []), *written])
