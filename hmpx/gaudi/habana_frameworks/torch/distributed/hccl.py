"""``habana_frameworks.torch.distributed.hccl``: Habana's collectives, which are gloo's or nccl's here.

``init_process_group("hccl")`` needs no import of this module.
"""

from __future__ import annotations

import os
from typing import Any, Final

from ...absent import unknown

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


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
