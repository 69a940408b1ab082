"""``hmpx plan``: plans a training step of a model without its device or its memory."""

from __future__ import annotations

import argparse
from typing import Final

from ..errors import HmpxError
from . import functions, output, scripts
from .options import list_options

TEXT: Final = """\
estimate a training step: dtypes, memory, casts
---
hmpx plan FILE.py:FUNCTION [--inputs FUNCTION] [--device TYPE] [options]
       hmpx plan MODULE:FUNCTION ...
---
Runs a training step on tensors without values: in float32, under torch.autocast and under
hmpx. Prints the ops in low precision and the memory of tensors. It needs neither the device
nor the memory, whatever the size of the model.
---
model FILE.py:FUNCTION  the function that returns the model
--inputs FUNCTION=inputs  function that returns its inputs; default: inputs
--loss FUNCTION  function of the model's output that returns the loss
--device TYPE  cpu, cuda, hpu, ..., present or not; default: the one here
--optimizer NAME=AdamW  of torch.optim, also with options: "SGD momentum=0.9"; none for none; default: AdamW
--inference  plan a forward instead of a training step
--small  run on real tensors, for models whose computation depends on values; use a small config
--world-size N  also print the memory of each of N processes
--html FILE  write a page that needs no network
--json FILE  write the figures as JSON
list options
---
FUNCTION returns the model. That of --inputs returns its inputs: a tuple of arguments, a dict of arguments
by name, or a tensor. --inputs and --loss name functions of the same file, or have a FILE.py: or
MODULE: of their own. The file is imported, so its training belongs under `if __name__ == "__main__":`.

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
    source, name = functions.split(options.model)
    with functions.as_program(source):
        return _run(options, source, name)


def _run(options: argparse.Namespace, source: str, name: str) -> int:
    model = functions.found(source, name)
    inputs = functions.found(*functions.split(options.inputs, source))
    loss = options.loss and functions.found(*functions.split(options.loss, source))
    from ..planning import plan  # slow to import

    try:
        found = plan(
            model,
            inputs,
            options.device,
            loss_fn=loss,
            optimizer=None if options.optimizer.lower() == "none" else options.optimizer,
            training=False if options.inference else None,
            small=options.small,
            **list_options(options),
        )
    except HmpxError:
        raise
    except Exception as error:  # from the model, or another function of the program
        scripts.show_uncaught(error)
        return 2
    lines = str(found).splitlines()
    if options.world_size is not None:
        lines += ["", *found.ranks(options.world_size).splitlines()]
    written = [*output.written(options, html=found.to_html, json=found.to_json)]
    return output.show([*lines, *([""] if options.html else []), *written])
