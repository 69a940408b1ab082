"""``hmpx doctor``: what hmpx finds on this machine, and what it can't reach."""

from __future__ import annotations

import argparse
import importlib
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import __version__, compute, session, torch_internals
from ..errors import said_by, shown
from . import output
from .options import add_command, add_list_options, list_options


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx doctor``."""
    parser = add_command(
        commands,
        "doctor",
        run,
        help="what hmpx finds on this machine, and what it can't reach",
        usage="hmpx doctor [options] [MODULES...]",
        description="Prints the versions and devices that count. Then imports MODULES, converts, and"
        "\nprints where they keep functions of torch that were taken before and stay uncast.",
        epilog="""\
exit status:
  0 all is reached; 1 something stays uncast, or torch is not as expected; 2 wrong arguments, or a
  module can't be imported

examples:
  hmpx doctor
  hmpx doctor --torch
  hmpx doctor my_package.model transformers.models.bert.modeling_bert""",
    )
    parser.add_argument(
        "modules", nargs="*", metavar="MODULES", help="modules to import, by dotted name"
    )
    parser.add_argument(
        "--torch",
        action="store_true",
        help="try each part of torch that hmpx relies on and torch does not document, and exit",
    )
    add_list_options(parser)


def run(options: argparse.Namespace) -> int:
    """Prints versions, devices and what stays uncast; status 1 if something does."""
    if options.torch:
        return _doctor_of_torch()
    sys.path.insert(0, "")  # as `python -m` does
    for name in options.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module raises
            reason = str(error) if isinstance(error, ImportError) else said_by(error)
            output.complain(f"can't import {shown(name)}: {reason}")
            return 2
    with output.with_warnings_shown(session.convert, **list_options(options)) as active:
        lines = [
            f"hmpx {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            _summary(torch_internals.parts()),
            f"casts tensors on: {', '.join(sorted(active.device_types))}",
        ]
        missed = sorted(active.missed())
        low_type = active.policy.low_precision_type
        for device_type in sorted(active.device_types):
            if isinstance(low_type, torch.dtype):
                lines += _capability_lines(device_type, low_type)
            else:
                lines.append(f"{low_type.name} on {device_type}: emulated")
    for path, function in missed:
        lines.append(f"{path} keeps {function!r}, which is not cast")
    if missed:
        lines.append(
            "take these functions from torch where they are called, or after hmpx.convert()"
        )
    elif options.modules:
        lines.append(f"{output.counted(len(options.modules), 'module')}: nothing stays uncast")
    return output.show(lines, status=1 if missed else 0)


def _summary(parts: Sequence[torch_internals.Part]) -> str:
    faults = sum(1 for part in parts if part.fault)
    known = "all as expected" if not faults else f"{faults} not as expected; see doctor --torch"
    return f"relies on {len(parts)} parts of torch that it does not document: {known}"


def _doctor_of_torch() -> int:
    """Shows each undocumented part of torch that hmpx relies on, after trying it."""
    imported, later = torch_internals.parts(), [*torch_internals.later_parts()]
    parts = [*imported, *later, *torch_internals.tries()]
    lines = [f"hmpx {__version__}, torch {torch.__version__}", _summary(parts)]
    width = max(len(part.feature) for part in parts)
    for part in parts:
        said = f"{part.fault}; {part.without}" if part.fault else "as expected"
        lines.append(f"  {part.feature:{width}}  {said}")
    return output.show(lines, status=1 if any(part.fault for part in parts) else 0)


def _capability_lines(device_type: str, dtype: torch.dtype) -> Iterator[str]:
    """Yields lines on ``dtype`` on the device: whether the hardware has it, and how fast it was measured to be."""
    name = str(dtype).removeprefix("torch.")
    said = {
        True: "torch reports that the hardware has it",
        False: "torch reports that the hardware lacks it",
        None: "torch does not report whether the hardware has it",
    }
    yield f"{name} on {device_type}: {said[compute.reported(device_type, dtype)]}"
    found = {kind: compute.capability(kind, device_type, dtype) for kind in compute.KINDS}
    if all(known.inference is None for known in found.values()):
        yield "  not measured: every op runs in its native kernel"
        return
    yield "  time of the native kernel divided by that of fp32 with casts; slow kernels are not used"
    yield f"  {'ops':14}{'inference':>13}{'training':>13}"
    for kind, known in found.items():
        cells = [_measured(known, training=training) for training in (False, True)]
        yield f"  {kind:14}{cells[0]:>13}{cells[1]:>13}".rstrip()


def _measured(known: compute.Capability, *, training: bool) -> str:
    """Returns a cell, padded such that numbers with and without a remark line up."""
    ratio = known.training if training else known.inference
    if ratio is None:
        return f"{'-':6}"
    if math.isinf(ratio):
        return "no kernel"
    return f"{ratio:.1f}{' slow' if known.is_slow(training=training) else '':5}"
