"""Writes the contract that a model keeps today."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import yaml
from torch import nn

from ..comparing import contents, is_readable, may_read
from ..observers import Attached, OpCall
from ..ops import facts
from ..session import observable
from ..tensors import HasName, long_name
from ..torch_internals import uncompiled
from ..torch_state import named_tensors
from .contract_lines import real

_Dtypes = dict[Any, None]  # an ordered set


def contract_of(
    run: Callable[[], object], model: nn.Module | None
) -> dict[str, list[dict[str, Any]]]:
    """Returns the contract that the calls of ``run``, and the tensors of ``model``, keep."""
    computed: dict[tuple[str, str], _Dtypes] = defaultdict(dict)
    returned: dict[tuple[str, str], _Dtypes] = defaultdict(dict)

    def note(call: OpCall, /, *_: object) -> None:
        if call.op in facts("converting") or not may_read():
            return
        key = call.op, call.module
        computed[key].update(dict.fromkeys(call.computed))
        returned[key].update(dict.fromkeys(call.output_dtypes))

    with observable(), Attached(note, every_op=True, values=True, kernels=True), uncompiled():
        run()
    lines: list[dict[str, Any]] = []
    for op in dict.fromkeys([op for op, _ in returned]):
        modules = [module for name, module in returned if name == op]
        found = {}
        for outer in ["", *modules]:
            # A line about a module is about the modules inside it, too.
            inside = [(op, each) for each in modules if _is_inside(each, outer)]
            found[outer] = _texts(
                compute=[computed[each] for each in inside],
                output=[returned[each] for each in inside],
            )
        is_one = "" in modules or all(found[each] == found[modules[0]] for each in modules)
        for module in [""] if is_one else modules:
            place = {"module": _literal(module)} if module else {}
            lines += [{**place, "op": op, **found[module]}] if found[module] else []
    return {"expect": [*lines, *_of_tensors(model)]}


def _is_inside(module: str, outer: str) -> bool:
    return not outer or f"{module}.".startswith(f"{outer}.")


def _texts(**found: list[_Dtypes]) -> dict[str, Any]:
    """Returns key -> dtype names of floating dtypes; one name instead of a list of one."""
    texts = {
        key: [*dict.fromkeys([long_name(real(e)) for of in several for e in of if _is_number(e)])]
        for key, several in found.items()
    }
    return {key: each[0] if len(each) == 1 else each for key, each in texts.items() if each}


def _is_number(dtype: torch.dtype | HasName) -> bool:
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex


def _literal(name: str) -> str:
    """Returns the glob that matches only this name, and modules inside it."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def _of_tensors(model: nn.Module | None) -> list[dict[str, Any]]:
    """Returns the lines about contents of parameters and buffers, one for each dtype if one is rare."""
    if model is None:
        return []
    by_contents: dict[str, list[str]] = defaultdict(list)
    for name, tensor in named_tensors(model):
        if is_readable(tensor) and (found := contents(tensor)) is not None:
            by_contents[long_name(found)].append(_literal(name))
    return [{"tensor": names, "contents": dtype} for dtype, names in by_contents.items()]


def as_yaml(contract: Mapping[str, Any]) -> str:
    """Returns the text of a contract's file."""
    return yaml.safe_dump(dict(contract), sort_keys=False, width=100)
