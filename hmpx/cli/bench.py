"""``hmpx bench``: the user's own step in float32, under torch.autocast and under hmpx, timed in turns."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from ..arguments import has_run
from ..errors import short
from ..torch_state import seed_all
from . import functions, output
from .options import Command, list_options

#: Arguments of `hmpx.bench` that are options of the same names.
_SETTINGS: Final = ("runs", "warmup", "run_s", "threads", "clock", "seed")

_TEXT: Final = """\
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
--variants NAME+  variants to run, of fp32, autocast, auto, fast, frozen, always, never;
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
            variants=options.variants,
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


BENCH: Final = Command(_TEXT, _bench, writes=("json",))


def _inputs(source: str, name: str | None) -> Any:
    if name is None and not hasattr(functions.imported(source), "inputs"):
        raise functions.FunctionError(
            f"{short(source)} has no function `inputs`, which returns the model's inputs; write "
            "it, or name another with --inputs"
        )
    return functions.found(*functions.split(name or "inputs", source))()


def _maker(source: str, name: str, *, has_inputs: bool) -> Callable[[], Any]:
    """Returns a step factory: it runs the file again, and calls the function unless that is the step."""
    is_step = False

    def made_again() -> tuple[types.ModuleType, Any]:
        module = functions.imported(source, again=True)
        function = functions.function_of(module, source, name)
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
