"""``hmpx compare``, ``draw``, ``export``, ``plan`` and ``bench``: tools for the user's model or step."""

from __future__ import annotations

import argparse
import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from .. import session
from ..arguments import has_run
from ..errors import short
from ..torch_state import seed_all
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

_EXPORT: Final = f"""\
write a model as an ONNX file whose nodes have their types, or as a checkpoint for servers
---
hmpx export FILE.py:FUNCTION [--inputs FUNCTION] [--onnx FILE | --checkpoint DIR] [options]
       hmpx export MODULE:FUNCTION ...
---
Converts torch, and writes an ONNX file in which casts are nodes and weights have the type in which they
are used, for engines that take types from the graph. Prints its nodes, or what is wrong with them.
With --checkpoint, freezes the model and writes its weights as codes and scales, which vLLM and transformers load.
---
{functions.MODEL}
--onnx FILE=model.onnx  the file to write; default: model.onnx
--checkpoint DIR  write a checkpoint of compressed-tensors instead
--outputs fp32|keep  cast low outputs to float32, the default, or leave them
--opset N  ONNX's opset; default: torch's, or 22 with bfloat16
--verify  compare each node's values with torch's, as hmpx check --model does with a finished file
--verify-file
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
  hmpx export my_package.models:build --policy policy.yaml --onnx build.onnx --html build.html
  hmpx export train.py:build_model --policy fp8.yaml --checkpoint served"""


@functions.on_program
def _export(options: argparse.Namespace, given: dict[str, Any]) -> int:
    if options.verify_file:
        options.parser.error("--verify-file is now hmpx check FILE.onnx --model FILE.py:FUNCTION")
    if options.checkpoint and (options.verify or options.opset or options.outputs):
        options.parser.error(
            "--outputs, --opset and --verify are for ONNX files, not for --checkpoint"
        )
    if options.checkpoint:
        return _checkpoint(options, given["model"](), given["inputs"]())
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
    lines = [*str(exported).splitlines(), *output.written(options, exported)]
    return output.show(lines, status=1 if exported.faults else 0)


def _checkpoint(options: argparse.Namespace, model: Any, inputs: Any) -> int:
    from ..checkpoints import read_checkpoint  # slow to import
    from ..freezing import freeze

    converted = session.convert(**list_options(options), **device_options(options))
    with converted, freeze(model, inputs) as frozen:
        frozen.save(options.checkpoint)
    found = read_checkpoint(options.checkpoint, model)
    lines = [*str(found).splitlines(), *output.written(options, found)]
    return output.show(lines, status=1 if found.faults else 0)


EXPORT: Final = Command(
    _EXPORT,
    _export,
    {"verify-file": {"help": argparse.SUPPRESS}},
    writes=("onnx", "html", "json", "csv"),
)

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


# --- bench ---------------------------------------------------------------------------------------

#: Arguments of `hmpx.bench` that are options of the same names.
_SETTINGS: Final = ("runs", "warmup", "run_s", "threads", "clock", "seed")

_BENCH: Final = """\
time your own step in float32, under torch.autocast and under hmpx
---
hmpx bench FILE.py:FUNCTION [--variants NAME ...] [options]
       hmpx bench MODULE:FUNCTION ...
---
Runs your step in float32, under torch.autocast and under hmpx, in turns within one process,
and prints the time of each over that of float32, the loss, and the memory of a step.
---
step FILE.py:FUNCTION  the function that makes the step, see below
--inputs FUNCTION  function that returns the model's inputs; default: inputs
--variants NAME+  variants to run, with blanks or commas between them, of fp32, autocast, auto, fast, frozen, fixes, always, never;
  default: the first four, and frozen for models
--runs N  runs of each variant; default: 10
--warmup N  steps before the first run; default: 3
--run-s SECONDS  shortest time of a run, which repeats short steps; default: 0.2
--threads N  number of torch's threads
--clock wall|cpu  wall time, the default; or cpu, the processor time of this process, for busy machines
--device TYPE  device of the step; default: the accelerator, else cpu
--seed N  seed of all variants; default: 0
--json FILE  write the figures as JSON
--no-progress  print only the table
list options
---
FUNCTION is one of these:
  make_step    returns the step: a function without arguments, with a model, an optimizer and data of
               its own; a number that the step returns is the loss
  step         is the step itself
  build_model  returns a model; its forward is timed, in evaluation mode and without gradients, on the
               result of the function of --inputs
The file runs again for each variant, with the same seed. Its own training belongs under
`if __name__ == "__main__":`.

exit status:
  0; 1 if the step fails in some variant; 2 if it fails in float32, or the arguments are wrong;
  130 after Ctrl-C, with a table of the runs until then

examples:
  hmpx bench train.py:make_step
  hmpx bench train.py:make_step --variants auto fast --runs 20 --threads 4 --json bench.json
  hmpx bench train.py:build_model --inputs make_batch --variants auto frozen"""


def _bench(options: argparse.Namespace) -> int:
    """Runs the variants, prints the table and writes the requested file."""
    source, name = functions.split(options.step)
    from ..planning import bench  # slow to import

    given = {name: getattr(options, name) for name in _SETTINGS}
    with functions.as_program(source):
        found = bench(
            _maker(source, name, has_inputs=options.inputs is not None),
            functools.partial(_inputs, source, options.inputs),
            variants=options.variants and re.split("[, ]+", " ".join(options.variants).strip(", ")),
            device=options.device,
            progress=not options.no_progress
            and functools.partial(print, file=sys.stderr, flush=True),
            **{key: value for key, value in given.items() if value is not None},
            **list_options(options),
        )
    output.show(str(found).splitlines())
    if options.json:  # after the table, so that a failure does not lose it
        output.show(["", *output.written(options, found)])
    return (
        output.INTERRUPTED
        if found.is_interrupted
        else int(any(each.error for each in found.variants))
    )


BENCH: Final = Command(_BENCH, _bench, writes=("json",))


def _inputs(source: str, name: str | None) -> Any:
    if name is None and not hasattr(functions.imported(source), "inputs"):
        raise functions.FunctionError(
            f"{short(source)} has no function `inputs`, which returns the model's inputs; write "
            "it, or name another with --inputs"
        )
    return functions.found(*functions.split(name or "inputs", source))[1]()


def _maker(source: str, name: str, *, has_inputs: bool) -> Callable[[], Any]:
    """Returns a step factory: it runs the file again, and calls the function unless that is the step."""
    is_step = False

    def made_again() -> tuple[types.ModuleType, Any]:
        module, function = functions.found(source, name, again=True)
        if not callable(function):
            raise functions.FunctionError(f"{short(source)}:{name} is not a function")
        return module, function

    def make() -> Any:
        nonlocal is_step
        if not is_step:
            seed = torch.initial_seed()
            module, function = made_again()
            made = has_run(f"{short(source)}:{name}", function())
            if isinstance(made, nn.Module):
                return made
            if has_inputs:
                raise functions.FunctionError(
                    "--inputs is for a function that returns a model; this one returns no model"
                )
            if callable(made):
                return _within(module, made)
            is_step = True  # and it has run once, so its effects are repeated
            seed_all(seed)
        return _within(*made_again())

    return make


def _within(module: types.ModuleType, step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a step whose module is found by name, mainly by pickle, though later ones have that name too."""

    def step_of_module() -> Any:
        sys.modules[module.__name__] = module
        return step()

    return step_of_module
