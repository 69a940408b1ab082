"""``habana_frameworks.torch.utils.distributed_utils``: where HMP's first scripts started processes."""

from __future__ import annotations

from typing import Any

from ...absent import unknown
from ..distributed.hccl import initialize_distributed_hpu

__all__ = ["initialize_distributed_hpu"]


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
