"""``hmpx compare``, ``draw`` and ``plan``: tools for the user's model."""

from __future__ import annotations

import argparse
from typing import Any, Final

import torch

from .. import session
from ..errors import short
from . import functions, output
from .options import DEVICE_TYPES, Command, device_options, list_options

_COMPARE: Final = f"""\
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


@functions.on_program
def _compare(options: argparse.Namespace, given: dict[str, Any]) -> int:
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
    return output.show([*str(compared).splitlines(), *output.written(options, compared)])


COMPARE: Final = Command(_COMPARE, _compare, writes=("html", "json", "csv"))

_DRAW: Final = f"""\
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


@functions.on_program
def _draw(options: argparse.Namespace, given: dict[str, Any]) -> int:
    from ..recording import draw  # slow to import

    model, inputs = given["model"](), given["inputs"]()
    with session.convert(**list_options(options), **device_options(options)):
        drawing = draw(model, inputs, max_nodes=options.max_nodes, fold=not options.no_fold)
    drawing.save(options.output)
    return output.show([str(drawing), f"wrote {short(options.output)}"])


DRAW: Final = Command(_DRAW, _draw, writes=("output",))

_PLAN: Final = f"""\
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


@functions.on_program
def _plan(options: argparse.Namespace, given: dict[str, Any]) -> int:
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
    written = [*output.written(options, found)]
    return output.show([*lines, *([""] if options.html else []), *written])


PLAN: Final = Command(_PLAN, _plan, writes=("html", "json"))
