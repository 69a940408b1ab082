"""``habana_frameworks.torch``: the parts through which scripts use PyTorch on a Gaudi."""

from __future__ import annotations

from typing import Any

import torch

from ..absent import absent, unknown


class _hpex_C:  # noqa: N801  # Habana's name
    """Habana's kernels that scripts call directly."""

    @staticmethod
    def fused_lamb_norm(gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Returns the divisor of ``gradients`` that makes their norm at most ``max_norm``."""
        norms = torch.stack([torch.linalg.vector_norm(each.float()) for each in gradients])
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        return (norm / max_norm).clamp(min=1.0).reshape(1)


def __getattr__(name: str) -> Any:
    if name in ("_core_C", "_hpu_C"):
        return absent(__name__, name, "use habana_frameworks.torch.hpu and .core instead")
    raise unknown(__name__, name)
