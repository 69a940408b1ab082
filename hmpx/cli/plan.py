"""``hmpx plan``: plans a training step of a model without its device or its memory."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import HmpxError
from . import functions, output, scripts
from .options import add_command, add_list_options, list_options, option


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx plan``."""
    parser = add_command(
        commands,
        "plan",
        run,
        help="show what a training step would take: precision, memory, casts",
        usage="hmpx plan FILE.py:FUNCTION [--inputs FUNCTION] [--device TYPE] [options]\n"
        "       hmpx plan MODULE:FUNCTION ...",
        description="Runs a training step on tensors without values, in float32, as torch.autocast casts and\n"
        "as hmpx does, and prints what runs in low precision and the memory of tensors. It needs\n"
        "neither the device nor the memory, whatever the size of the model.",
        epilog="""\
FUNCTION returns the model, and that of --inputs what it is called with: a tuple of arguments, a dict
of those by name, or a tensor. --inputs and --loss name functions of the same file, or have a FILE.py: or
MODULE: of their own. The file is imported: what it runs belongs under `if __name__ == "__main__":`.

exit status:
  0; 2 if the model can't be planned, or the arguments are wrong

examples:
  hmpx plan train.py:build_model --inputs make_batch --device hpu
  hmpx plan models/llama.py:build_70b --optimizer Adafactor --world-size 8 --html plan.html
  hmpx plan my_package.models:build --inference --lists hmp""",
    )
    parser.add_argument("model", metavar="FILE.py:FUNCTION", help="what returns the model")
    option(
        parser, "--inputs FUNCTION", "what returns its inputs; default: inputs", default="inputs"
    )
    option(parser, "--loss FUNCTION", "gets what the model returns, and returns the loss")
    where = "cpu, cuda, hpu, ..., here or not; default: the one here"
    option(parser, "--device TYPE", where)
    option(
        parser,
        "--optimizer NAME",
        'of torch.optim, also with options: "SGD momentum=0.9"; none for none; default: AdamW',
        default="AdamW",
    )
    option(parser, "--inference", "a forward instead of a step")
    small = "run on real tensors, for a small model that computes what depends on values"
    option(parser, "--small", small)
    option(parser, "--world-size N", "also print what each of N processes holds", type=int)
    option(parser, "--html FILE", "write a page that needs no network")
    option(parser, "--json FILE", "write the figures")
    add_list_options(parser)


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
