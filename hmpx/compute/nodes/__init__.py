"""`linear` with the casts of its inputs as one autograd node, instead of torch's seven: less work for the host.

Legalized `linear` and attention on CPUs are one node, too. The casts of another op's inputs are one node, and one launch on an accelerator. GELU of bfloat16 on CPUs is looked up in tables of torch's values, and a kernel reads a trace's tensors. The nodes are compiled for one torch, when hmpx is installed. Without them torch's nodes and kernels give the same bits.
``HMPX_NODES=off`` switches them off.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final

import torch
from torch.autograd.graph import Node

from ...errors import OptionError, printable, suggestion
from ...patching import ItemPatch
from .library import compiled, path_for

#: A call's inputs -> its result, or its inputs after casts; None for unusual calls, which take torch's way.
Fused = Callable[..., Any]

_LOGGER: Final = logging.getLogger("hmpx")


@dataclass(frozen=True)
class Nodes:
    """The compiled nodes of this process, or None; their path, and why there are none."""

    module: Any = None
    path: Path | None = None
    fault: str = ""  # empty if ``HMPX_NODES`` is off


@functools.cache
def nodes_in_use() -> Nodes:
    """Returns the nodes of this process, which are looked up once; raises `OptionError` for an invalid ``HMPX_NODES``."""
    setting = os.environ.get("HMPX_NODES", "").strip().lower()
    if setting not in {"", "on", "off"}:
        hint = suggestion(setting, ["on", "off"])
        raise OptionError(f"HMPX_NODES={printable(setting)}: it can be on or off{hint}")
    if setting == "off":
        return Nodes()
    path, found = path_for(torch.__version__), compiled()
    if path in found:
        return _loaded(path)
    if not found:
        return Nodes(fault="none were compiled when hmpx was installed")
    names = ", ".join([each.name for each in found])
    return _refused(f"{path.name} is needed for this torch, Python and hmpx, and there is {names}")


#: The byte that says whether GELU is looked up; None until nodes are loaded.
_looks_up: Any = None


def _loaded(path: Path) -> Nodes:
    global _looks_up
    spec = importlib.util.spec_from_file_location(f"{__name__}.nodes", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:  # torch has the version, but other symbols
        return _refused(printable(str(error)))
    Node.register(module.Node)
    _looks_up = module.looks_up
    return Nodes(module, path)


def _refused(fault: str) -> Nodes:
    _LOGGER.info("linear runs without compiled nodes, which takes the host longer: %s", fault)
    return Nodes(fault=fault)


def looking_up(device_types: frozenset[str]) -> list[ItemPatch]:
    """Returns the patch that has GELU of bfloat16 looked up if there are CPUs among the devices, and nodes loaded."""
    return [] if _looks_up is None else [ItemPatch(_looks_up, 0, int("cpu" in device_types))]


#: How a linear layer is computed, as in nodes.cpp.
_LEGALIZED, _ROUNDS, _ANY_SIZE, _CASTS_AGAIN, _CHOOSES = 1, 2, 4, 8, 16
_AGAIN: Final = {True: 0, False: _CASTS_AGAIN, "auto": _CASTS_AGAIN | _CHOOSES}


def fused(
    op: str,
    dtype: Any,
    device_types: frozenset[str],
    masks: Iterable[int],
    keep_weight_casts: bool | str = True,
) -> Fused | None:
    """Returns `linear` in ``dtype`` for tensors on these devices, or the casts of another op's inputs together.

    ``masks`` are the positions of possible masks among the inputs. None without compiled nodes.
    """
    nodes = nodes_in_use().module
    if nodes is None:
        return None
    devices = sum([nodes.device_bit(torch.device(each)) for each in device_types])
    if op == "linear":
        return functools.partial(nodes.linear, dtype, devices, _AGAIN[keep_weight_casts])
    return functools.partial(nodes.casts, dtype, devices, sum([1 << each for each in masks]))


def legalized(op: str, dtype: Any, device_types: frozenset[str], mode: str) -> Fused | None:
    """Returns `linear` or attention, legalized as the option ``legalize`` says, for bfloat16 on the CPU.

    It takes a call's arguments. None without compiled nodes, and for others.
    """
    nodes, rounds = nodes_in_use().module, mode != "fast"
    if nodes is None or dtype is not torch.bfloat16 or "cpu" not in device_types:
        return None
    if op == "scaled_dot_product_attention":
        return functools.partial(_attention, nodes.attention, rounds)
    how = _LEGALIZED + _ROUNDS * rounds + _ANY_SIZE * (mode == "always")
    linear = functools.partial(nodes.linear, dtype, nodes.device_bit(torch.device("cpu")), how)
    return linear if op == "linear" else None


def _attention(  # noqa: PLR0917  # as the op's, with its mask or what stands for a missing one
    compute: Fused,
    rounds: bool,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    /,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    **named: Any,
) -> Any:
    has_mask = named.pop("attn_mask", None) is not None
    # The class in casting/source.py stands for a missing one.
    has_mask |= not (mask is None or getattr(mask, "__name__", "") == "missing")
    scale, has_groups = named.pop("scale", None), named.pop("enable_gqa", False)
    if has_mask or dropout_p or has_groups or named or type(scale) not in (float, NoneType):
        return None
    return compute(rounds, bool(is_causal), scale, query, key, value)
