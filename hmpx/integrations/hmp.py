"""``habana_frameworks.torch.hpex.hmp``: HMP itself, `hmpx.convert` with HMP's positional order."""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Mapping
from typing import Any, Final

import torch

from .. import session
from ..torch_state import disable_casts
from . import devices

__all__ = ["convert", "disable_casts"]

_LOGGER: Final = logging.getLogger("hmpx")

_defaults: Mapping[str, Any] = types.MappingProxyType({})
_has_converted = False

_PATHS: Final = ("bf16_file_path", "fp32_file_path", "fp16_file_path")


def convert(  # noqa: PLR0917  # HMP's positional order
    opt_level: str | None = None,
    bf16_file_path: str | os.PathLike[str] | None = None,
    fp32_file_path: str | os.PathLike[str] | None = None,
    isVerbose: bool | str | None = None,  # noqa: N803  # HMP's name
    low_precision_type: torch.dtype | str | None = None,
    fp16_file_path: str | os.PathLike[str] | None = None,
) -> None:
    """Patches torch as `hmpx.convert` does, with HMP's positional order and its op lists.

    Omitted arguments, an empty path and ``isVerbose=False`` take the command line's value, or else HMP's
    default: opt_level ``"O1"``, HMP's own lists, bfloat16. ``isVerbose=True`` prints HMP's own lines. Casts on
    the device that stands in for ``"hpu"``; replaces an existing conversion.

    Raises:
        OpListError: A list can't be read, or an op is in two lists.
        OptionError: An argument has an invalid value.
    """
    global _has_converted
    given = dict(locals())
    said = {name: value for name, value in given.items() if value not in (None, False, "")}
    taken, unused = merged(said, _defaults)
    arguments = {"device_types": {devices.device_type()}, **taken, **said}
    if arguments.get("opt_level") != "O2" and arguments.get("policy") is None:
        arguments.setdefault("lists", "hmp")
    if said.get("isVerbose") is True:
        arguments["isVerbose"] = "hmp"
    session.convert(**arguments)
    _has_converted = True
    _log(said, taken, unused)


def merged(
    said: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the ``defaults`` that complement the script's arguments, and the others."""
    outranked = set(said)
    if said.get("opt_level") == "O2":
        outranked |= {"policy", "lists", *_PATHS}
    elif not outranked.isdisjoint(_PATHS):  # a policy decides everything itself
        outranked.add("policy")
    taken = {name: value for name, value in defaults.items() if name not in outranked}
    left = {name: value for name, value in defaults.items() if name not in taken}
    return taken, {name: value for name, value in left.items() if said.get(name) != value}


def _log(said: Mapping[str, Any], taken: Mapping[str, Any], unused: Mapping[str, Any]) -> None:
    sources = [("the script", said), ("the command line", taken)]
    origins = [f"{_listed(values)} from {source}" for source, values in sources if values]
    _LOGGER.info("hmp.convert(): %s", "; ".join(origins) or "HMP's defaults")
    if unused:
        text = "hmp.convert(): %s from the command line is not used: the script gives %s"
        _LOGGER.warning(text, _listed(unused), _listed(said))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def set_defaults(options: Mapping[str, Any]) -> None:
    """Sets the arguments of `hmpx.convert` that `convert` uses unless the script gives its own."""
    global _defaults, _has_converted
    _defaults, _has_converted = types.MappingProxyType(dict(options)), False


def defaults() -> Mapping[str, Any]:
    """Returns the arguments set by `set_defaults`."""
    return _defaults


def has_converted() -> bool:
    """Whether `convert` has converted since `set_defaults`."""
    return _has_converted
