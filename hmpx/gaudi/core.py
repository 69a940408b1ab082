"""Step markers, ranks of processes, and the questions that scripts ask of Habana's software."""

from __future__ import annotations

import enum
import os
from typing import Final


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Does nothing: there is no graph to launch here."""


def is_enabled_weight_permute_pass() -> bool:
    """Returns True: convolutions take weights in torch's layout, so scripts leave them alone."""
    return True


def is_lazy() -> bool:
    """Whether the environment asks for the lazy mode, which changes nothing here."""
    return os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"


#: The generations of Gaudi; the device that stands in is none of them.
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
