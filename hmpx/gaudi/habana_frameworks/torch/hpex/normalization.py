"""``habana_frameworks.torch.hpex.normalization``: clipping of gradients, and RMS norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from .....torch_state import disable_casts
from ...absent import unknown


class FusedClipNorm:
    """`torch.nn.utils.clip_grad_norm_`, with the largest norm fixed in advance."""

    def __init__(self, parameters: Iterable[Tensor] | Tensor, max_norm: float) -> None:
        """Takes the largest norm, and the parameters that `clip_norm` clips if it is given none."""
        self._parameters = _listed(parameters)
        self.max_norm = max_norm

    def clip_norm(
        self, parameters: Iterable[Tensor] | Tensor | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Clips the gradients of ``parameters`` together; returns their norm before that."""
        clipped = self._parameters if parameters is None else _listed(parameters)
        with disable_casts():
            return torch.nn.utils.clip_grad_norm_(clipped, self.max_norm, norm_type)


class FusedRMSNorm:
    """`torch.nn.functional.rms_norm` over the last dimension."""

    @staticmethod
    def apply(
        data_in: Tensor, gamma: Tensor, eps: float, use_stages: bool = True, bwd_mode: int = 0
    ) -> Tensor:
        """Returns ``data_in`` divided by its root mean square, times ``gamma``."""
        return rms_norm(data_in, gamma.shape, gamma, eps)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else [*parameters]


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
