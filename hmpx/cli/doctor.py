"""``hmpx doctor``: shows what hmpx finds on this machine, and what stays uncast."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from .. import compute, number_formats, phases, session, torch_internals
from ..errors import raised_here, said_by, shown
from ..version import TESTED_TORCH, __version__
from . import functions, output
from .options import Command, list_options

_TEXT: Final = """\
show versions, devices, and functions that stay uncast
---
hmpx doctor [options] [MODULES...]
---
Prints versions, devices, and the speed of the low type. Then imports MODULES, converts,
and prints the functions of torch that they took before the conversion, which stay uncast.
---
modules MODULES*  modules to import, by dotted name
--torch  check each undocumented part of torch that hmpx relies on, and exit
--json  print JSON
list options
---
exit status:
  0 all functions are cast; 1 some stay uncast, or torch is not as expected; 2 wrong arguments, or a
  module can't be imported

examples:
  hmpx doctor
  hmpx doctor --json
  hmpx doctor --torch
  hmpx doctor my_package.model transformers.models.bert.modeling_bert"""


def _doctor(options: argparse.Namespace) -> int:
    """Prints versions, devices and uncast functions; status 1 if there are such."""
    if options.torch:
        parts = [*torch_internals.parts(), *torch_internals.later_parts()]
        is_ok = not any(part.fault for part in parts)
        return _show(_versions(parts), options.json, _torch_lines, is_ok)
    sys.path.insert(0, "")  # as `python -m` does
    for name in options.modules:
        phases.enter(f"import of {name}")
        try:
            with functions.as_program(name):
                importlib.import_module(name)
        except raised_here(Exception, SystemExit) as error:  # the module may raise anything
            reason = str(error) if isinstance(error, ImportError) else said_by(error)
            output.complain(f"can't import {shown(name)}: {reason}")
            return 2
    with output.with_warnings_shown(session.convert, **list_options(options)) as active:
        missed = sorted(active.missed())
        low_type = active.policy.low_precision_type
        kernels, nodes = number_formats.kernels_in_use(), compute.nodes_in_use()
        found = {
            **_versions(torch_internals.parts()),
            "low_precision_type": str(getattr(low_type, "name", low_type)).removeprefix("torch."),
            "devices": {
                device_type: _capabilities(device_type, low_type)
                for device_type in sorted(active.device_types)
            },
            "float8": [
                device_type
                for device_type in sorted(active.device_types)
                if (products := compute.kernels_on(torch.device(device_type))) is not None
                and products.is_hardware
            ],
            "kernels": {"path": kernels.path and str(kernels.path), "fault": kernels.fault},
            "nodes": {"path": nodes.path and str(nodes.path), "fault": nodes.fault},
            "modules": options.modules,
            "uncast": [{"place": place, "function": repr(each)} for place, each in missed],
        }
    return _show(found, options.json, _lines, not missed)


DOCTOR: Final = Command(_TEXT, _doctor)


def _show(
    found: dict[str, Any],
    as_json: bool,
    text: Callable[[dict[str, Any]], Iterable[str]],
    is_ok: bool,
) -> int:
    lines = json.dumps(found, indent=1).splitlines() if as_json else text(found)
    return output.show(lines, status=int(not is_ok))


def _versions(parts: Iterable[torch_internals.TorchPart]) -> dict[str, Any]:
    keys = ("feature", "fault", "without")
    return {
        "hmpx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tested_torch": list(TESTED_TORCH),
        "parts": [{key: getattr(part, key) for key in keys} for part in parts],
    }


def _capabilities(device_type: str, dtype: Any) -> dict[str, Any]:
    if not isinstance(dtype, torch.dtype):
        return {"emulated": True}
    found = {}
    for kind in compute.KINDS:
        phases.enter(f"speed of {kind} on {device_type}")
        found[kind] = compute.capability(kind, device_type, dtype)
    return {
        "emulated": False,
        "reported": compute.reported(device_type, dtype),
        "native_over_fp32": {
            kind: {
                "inference": _finite(known.inference),
                "training": _finite(known.training),
                "is_slow": known.is_slow,
            }
            for kind, known in found.items()
        },
    }


def _finite(ratio: float | None) -> float | str | None:
    return "no kernel" if ratio is not None and math.isinf(ratio) else ratio


def _head(found: dict[str, Any]) -> Iterator[str]:
    """Yields the versions, and how many undocumented parts of torch work."""
    tested = ", ".join(found["tested_torch"])
    is_tested = found["torch"].startswith(tuple(f"{each}." for each in found["tested_torch"]))
    known = "" if is_tested else f" (the tests were run with {tested})"
    yield f"hmpx {found['hmpx']}, torch {found['torch']}{known}, Python {found['python']}"
    faults = sum(1 for part in found["parts"] if part["fault"])
    known = "all as expected" if not faults else f"{faults} not as expected; see doctor --torch"
    yield f"relies on {len(found['parts'])} parts of torch that it does not document: {known}"


def _torch_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each undocumented part of torch that hmpx relies on, after trying it."""
    parts = found["parts"]
    yield from _head(found)
    width = max(len(part["feature"]) for part in parts)
    for part in parts:
        said = f"{part['fault']}; {part['without']}" if part["fault"] else "as expected"
        yield f"  {part['feature']:{width}}  {said}"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found)
    yield f"casts tensors on: {', '.join(found['devices'])}"
    kernels = found["kernels"]
    why = kernels["fault"] or "HMPX_KERNELS=off"
    yield f"compiled kernels of number formats: {kernels['path'] or f'none, torch ops round: {why}'}"
    nodes = found["nodes"]
    why = "HMPX_NODES=off"
    if nodes["fault"]:
        why = (
            f"{nodes['fault']}; get them by `pip install --no-build-isolation .` in hmpx's directory, after "
            "`pip install hatchling`"
        )
    yield f"compiled nodes of linear: {nodes['path'] or f'none, torch has its own: {why}'}"
    float8 = ", ".join(found["float8"])
    yield f"products in float8: {f'in hardware on {float8}' if float8 else 'emulated, no device has them'}"
    for device_type, known in found["devices"].items():
        yield from _capability_lines(device_type, found["low_precision_type"], known)
    for each in found["uncast"]:
        yield f"{each['place']} keeps {each['function']}, which is not cast"
    if found["uncast"]:
        yield "take these functions from torch where they are called, or after hmpx.convert()"
    elif found["modules"]:
        yield f"{output.counted(len(found['modules']), 'module')}: nothing stays uncast"


def _capability_lines(device_type: str, name: str, known: dict[str, Any]) -> Iterator[str]:
    """Yields lines on the low type on a device: hardware support, and measured speed."""
    if known["emulated"]:
        yield f"{name} on {device_type}: emulated"
        return
    said = {
        True: "torch reports that the hardware has it",
        False: "torch reports that the hardware lacks it",
        None: "torch does not report whether the hardware has it",
    }
    yield f"{name} on {device_type}: {said[known['reported']]}"
    kinds = known["native_over_fp32"]
    if all(each["inference"] is None for each in kinds.values()):
        yield "  not measured: every op runs in its native kernel"
        return
    yield "  time of the native kernel divided by that of fp32 with casts; slow kernels are not used"
    yield f"  {'ops':14}{'inference':>11}{'training':>11}"
    for kind, each in kinds.items():
        found = [each[phase] for phase in ("inference", "training")]
        cells = [f"{ratio:.1f}" if isinstance(ratio, float) else ratio or "-" for ratio in found]
        yield f"  {kind:14}{cells[0]:>11}{cells[1]:>11}{'  slow' if each['is_slow'] else ''}"
