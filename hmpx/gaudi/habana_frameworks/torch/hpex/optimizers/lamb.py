"""LAMB."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from .steps import Closure, Configured, check_not_negative, evaluated, with_gradients


class FusedLamb(Configured):
    """LAMB: Adam whose step is scaled by each layer's trust ratio.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", with the
    clipping of the global gradient norm before it. Groups without weight decay take Adam's step
    unscaled, unless ``use_lamb``.
    """

    _settings = ("adam_w_mode", "set_grad_none", "use_lamb", "fused", "dtype")

    def __init__(  # noqa: PLR0917  # Habana's positional order
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_lamb: bool = False,
        fused: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Takes Habana's arguments.

        Args:
            params: Parameters, or groups of them.
            lr: The learning rate.
            bias_correction: Whether the moments are corrected for their start at zero.
            betas: By how much the moments decay.
            eps: Added to the root of the second moment.
            weight_decay: The weight decay.
            amsgrad: Must be False.
            adam_w_mode: Whether weight decay is decoupled; else it is added to the gradient.
            grad_averaging: Whether the first moment takes ``1 - betas[0]`` of the gradient, or all.
            set_grad_none: Whether `zero_grad` sets gradients to None.
            max_grad_norm: The largest norm of all gradients together; None for no clipping.
            use_lamb: Whether groups without weight decay are scaled by trust ratios, too.
            fused: Has no effect here.
            dtype: Gradients are rounded to it before their norm is taken.

        Raises:
            ValueError: A value is out of its range.
            RuntimeError: ``amsgrad`` is True, as on a Gaudi.
        """
        if amsgrad:
            raise RuntimeError("FusedLamb has no AMSGrad variant; leave out amsgrad")
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
                "max_grad_norm": max_grad_norm,
            },
        )
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_lamb = use_lamb
        self.fused = fused
        self.dtype = dtype

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Makes one step; returns the result of ``closure``.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = evaluated(closure)
        divisor = self._clipping()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in with_gradients(group):
                self._step_one(p, group, divisor)
        return loss

    def _clipping(self) -> Tensor | float:
        """Returns the divisor of all gradients that keeps their common norm from exceeding the largest."""
        most = self.defaults["max_grad_norm"]
        if most is None:
            return 1.0
        norms = [
            torch.linalg.vector_norm(cast(Tensor, p.grad).to(self.dtype or p.grad.dtype))  # type: ignore[union-attr]
            for group in self.param_groups
            for p in with_gradients(group)
        ]
        if not norms:
            return 1.0
        dtype = torch.promote_types(norms[0].dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(dtype) for each in norms]))
        divisor: Tensor = (norm / most).clamp(min=1.0)
        return divisor

    def _step_one(self, p: Tensor, group: dict[str, Any], divisor: Tensor | float) -> None:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        gradient = cast(Tensor, p.grad) / divisor
        if decay and not self.adam_w_mode:
            gradient = gradient.add(p, alpha=decay)
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=share)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        is_corrected = group["bias_correction"]
        correction1 = 1 - beta1 ** group["step"] if is_corrected else 1.0
        correction2 = 1 - beta2 ** group["step"] if is_corrected else 1.0
        root = state["exp_avg_sq"].sqrt().div_(math.sqrt(correction2)).add_(group["eps"])
        update = (state["exp_avg"] / correction1).div_(root)
        if decay and self.adam_w_mode:
            update.add_(p, alpha=decay)
        if decay or self.use_lamb:
            update.mul_(_ratio(p.norm(), update.norm()))
        p.sub_(update, alpha=group["lr"])


def _ratio(norm: Tensor, update_norm: Tensor) -> Tensor:
    """Returns LAMB's trust ratio; 1 where one of the norms is 0."""
    is_usable = (norm > 0) & (update_norm > 0)
    return torch.where(is_usable, norm / update_norm, torch.ones_like(norm))


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}; each must be at least 0 and below 1")
