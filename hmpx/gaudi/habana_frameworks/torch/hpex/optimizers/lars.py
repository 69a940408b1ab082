"""LARS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from .steps import Closure, Configured, check_not_negative, evaluated, with_gradients


class FusedLars(Configured):
    """LARS around another optimizer: each layer's gradient is scaled by its trust ratio.

    You et al., "Large Batch Training of Convolutional Networks". The other optimizer applies the
    learning rate; its weight decay is applied here, to the layers that are scaled.
    """

    _settings = ("optim", "skip_mask", "eeta", "eps")

    def __init__(
        self,
        optimizer: Optimizer,
        skip_mask: Sequence[Any],
        eeta: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        """Takes Habana's arguments.

        Args:
            optimizer: Makes the steps.
            skip_mask: For each parameter of a group, by position: true where it is scaled. False
                leaves its gradient as it is, without weight decay.
            eeta: The trust coefficient.
            eps: Added to the norms in the denominator.

        Raises:
            ValueError: ``skip_mask`` is too short, or a value out of its range.
        """
        check_not_negative(eeta=eeta, eps=eps)
        longest = max(len(group["params"]) for group in optimizer.param_groups)
        if len(skip_mask) < longest:
            raise ValueError(
                f"skip_mask has {len(skip_mask)} entries for {longest} parameters; give one for each"
            )
        self.optim = optimizer
        self.skip_mask = skip_mask
        self.eeta = eeta
        self.eps = eps
        super().__init__(optimizer.param_groups, {**optimizer.defaults, "eeta": eeta, "eps": eps})
        self.param_groups = optimizer.param_groups  # schedulers set the learning rate in them
        self.state = optimizer.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes what `__getstate__` returned."""
        super().__setstate__(state)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the optimizer inside."""
        self.optim.load_state_dict(state_dict)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.optim.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Makes one step; returns the result of ``closure``.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = evaluated(closure)
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0
            positions = {id(p): i for i, p in enumerate(group["params"])}
            for p in with_gradients(group):
                if self.skip_mask[positions[id(p)]]:
                    self._scale(p, decay)
        try:
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _scale(self, p: Tensor, decay: float) -> None:
        gradient = cast(Tensor, p.grad)
        norm, gradient_norm = p.norm(), gradient.norm()
        ratio = self.eeta * norm / (gradient_norm + decay * norm + self.eps)
        is_usable = (norm > 0) & (gradient_norm > 0)
        gradient.add_(p, alpha=decay).mul_(torch.where(is_usable, ratio, torch.ones_like(ratio)))
