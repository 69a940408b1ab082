"""Gradients of parameters, in low precision and in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors import is_dense
from .rows import ComparedGradient, cosine, ratio


def taken(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients of parameters, and takes them away."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


class GradientRun:
    """Compares each gradient as soon as it is there, and then discards it.

    So two sets of gradients are never held at once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], low: Mapping[str, Tensor]) -> None:
        """Compares with the gradients ``low``, from `start` on."""
        self._parameters, self._low = parameters, low
        self._found: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Begins with the next backward; what a forward differentiates itself is the model's own."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                self._comparison(name, self._low.get(name))
            )  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def _comparison(self, name: str, low: Tensor | None) -> Any:
        def compare(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if low is not None and gradient is not None and is_dense(gradient) and is_dense(low):
                self._found.append((name, _numbers(gradient.detach(), low)))

        return compare

    def end(self) -> None:
        """Takes the hooks away; gradients that come later are not compared."""
        for hook in self._hooks:
            hook.remove()

    def rows(self) -> tuple[ComparedGradient, ...]:
        """Returns the rows, the largest difference first."""
        rows = [_row(name, numbers.tolist()) for name, numbers in self._found]
        return tuple(sorted(rows, key=lambda row: (row.is_finite, -row.rel)))


def _numbers(gradient: Tensor, low: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    a, b = gradient.to(wide), low.to(wide)
    norm = torch.linalg.vector_norm
    return torch.stack([norm(b - a), norm(a), norm(b)]).real.float()


def _row(name: str, numbers: Iterable[float]) -> ComparedGradient:
    difference, reference, low = numbers
    is_finite = low - low == 0
    return ComparedGradient(
        name,
        ratio(difference, reference),
        cosine(difference, reference, low) if is_finite else float("nan"),
        is_finite,
    )
