"""Momentum as TensorFlow applies it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from .steps import Closure, check_not_negative, evaluated, with_gradients


class FusedResourceApplyMomentum(Optimizer):
    """Momentum as TensorFlow applies it: the buffer takes the gradient times the learning rate.

    ``buffer = momentum * buffer - lr * gradient``, and the parameter takes the buffer; with
    ``nesterov`` it takes the next value of the buffer.
    """

    def __init__(  # Habana's positional order
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        """Takes Habana's arguments.

        Raises:
            ValueError: A value is out of its range.
        """
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and momentum <= 0:
            raise ValueError("nesterov needs a momentum above 0")
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov},
        )

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Makes one step; returns the result of ``closure``.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in with_gradients(group):
                gradient = cast(Tensor, p.grad).add(p, alpha=group["weight_decay"])
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(momentum).sub_(gradient, alpha=lr)
                if group["nesterov"]:
                    p.add_(buffer, alpha=momentum).sub_(gradient, alpha=lr)
                else:
                    p.add_(buffer)
        return loss
