"""``habana_frameworks.torch.core.hccl``: importing it gives torch the backend ``hccl``, as always."""

from __future__ import annotations

from ..distributed.hccl import initialize_distributed_hpu

__all__ = ["initialize_distributed_hpu"]
