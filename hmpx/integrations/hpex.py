"""Habana's extensions of torch: HMP, step markers, ranks, clipping of gradients, a moving average of weights."""

from __future__ import annotations

import copy
import enum
import logging
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .. import session
from ..torch_state import disable_casts
from . import devices
from .optimizers import clipping_divisor


class _hpex_C:  # noqa: N801  # Habana's name
    """Habana's kernels that scripts call directly."""

    @staticmethod
    def fused_lamb_norm(gradients: list[Tensor], max_norm: float) -> Tensor:
        return clipping_divisor([each.float() for each in gradients], max_norm).reshape(1)


class FusedClipNorm:
    """`torch.nn.utils.clip_grad_norm_`, with the largest norm fixed in advance."""

    def __init__(self, parameters: Iterable[Tensor] | Tensor, max_norm: float) -> None:
        is_one = isinstance(parameters, Tensor)
        self._parameters = parameters if is_one else [*parameters]  # not an iterator
        self.max_norm = max_norm

    def clip_norm(
        self, parameters: Iterable[Tensor] | Tensor | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Clips the gradients of ``parameters`` together; returns their norm before that."""
        clipped = self._parameters if parameters is None else parameters
        with disable_casts():
            return nn.utils.clip_grad_norm_(clipped, self.max_norm, norm_type)


class FusedEMA:
    """Keeps the moving average of a model's parameters and buffers, in ``ema``, a copy of the model.

    ``decay`` maps the number of updates to the fraction of the average that the next one keeps. It starts at 0,
    so that early weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, updates: float = 0) -> None:
        self.ema = copy.deepcopy(_bare(model)).eval().requires_grad_(False)
        self.decay: Callable[[float], float] = lambda x: decay * (1 - math.exp(-x / 2000))
        self.updates = updates

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards ``model``."""
        self.updates += 1
        decay = self.decay(self.updates)
        current = _bare(model).state_dict()
        with disable_casts():
            for name, average in self.ema.state_dict().items():
                if average.dtype.is_floating_point:
                    average.mul_(decay).add_(current[name].detach(), alpha=1 - decay)

    def update_attr(
        self,
        model: nn.Module,
        include: Collection[str] = (),
        exclude: Collection[str] = ("process_group", "reducer"),
    ) -> None:
        """Copies the model's attributes; only those in ``include`` if it is not empty."""
        for name, value in vars(model).items():
            if name.startswith("_") or name in exclude or (include and name not in include):
                continue
            setattr(self.ema, name, value)


def _bare(model: nn.Module) -> Any:
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


# --- queries of scripts ---------------------------------------------------------------------------


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Does nothing: hmpx launches no graphs."""


def is_enabled_weight_permute_pass() -> bool:
    """Returns True: convolutions take weights in torch's layout, so scripts don't permute them."""
    return True


def is_lazy() -> bool:
    """Whether the environment requests the lazy mode, which has no effect here."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"


#: The generations of Gaudi; the stand-in device is not one of them.
synDeviceType = enum.Enum(  # noqa: N816  # Habana's name
    "synDeviceType",
    {"synDeviceTypeInvalid": 0, "synDeviceGaudi": 1, "synDeviceGaudi2": 4, "synDeviceGaudi3": 5},
)


#: The names that launchers use for the same settings.
_LAUNCHERS: Final = {
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Returns world size, rank and local rank as the launcher set them; local rank -1 if unset.

    Arguments given here, and mpirun's settings, go into the environment, where torch reads them.
    """
    given = {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": local_rank}
    for name, value in given.items():
        if value is not None:
            os.environ[name] = str(value)
    environ = os.environ
    if not _LAUNCHERS.keys() <= environ.keys() and set(_LAUNCHERS.values()) <= environ.keys():
        environ.update({name: environ[mpi] for name, mpi in _LAUNCHERS.items()})
        environ.setdefault("MASTER_ADDR", "localhost")
        environ.setdefault("MASTER_PORT", "12345")
    return (
        int(environ.get("WORLD_SIZE", 1)),
        int(environ.get("RANK", 0)),
        int(environ.get("LOCAL_RANK", -1)),
    )


# --- hmp -----------------------------------------------------------------------------------------

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
