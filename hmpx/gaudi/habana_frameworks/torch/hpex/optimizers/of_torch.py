"""Optimizers that torch has, with Habana's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from ....absent import GaudiError


class FusedAdagrad(Adagrad):
    """`torch.optim.Adagrad`."""

    def __init__(  # noqa: PLR0917  # Habana's positional order
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
    ) -> None:
        """Takes Habana's arguments."""
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps)


#: After this many steps no decay rate leaves any bias to correct; one more is the same float32 number.
_UNBIASED: Final = float(1 << 24)


class FusedAdamW(AdamW):
    """`torch.optim.AdamW`, which omits the correction of bias if asked to."""

    def __init__(  # noqa: PLR0917  # Habana's positional order
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        moments_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        """Takes Habana's arguments.

        Raises:
            GaudiError: The moments are requested in a dtype of their own.
        """
        if moments_dtype is not None:
            raise GaudiError(
                "FusedAdamW(moments_dtype=...): moments are kept in the parameters' type here; leave "
                "it out"
            )
        super().__init__(params, lr, betas, eps, weight_decay)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
        self.register_step_pre_hook(_start_unbiased)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy's or a checkpoint's state; Habana's optimizers count steps per group."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            step = group.pop("step", None)
            is_counted = step is not None and group.get("bias_correction", True)
            for p in group["params"]:
                if is_counted and self.state[p]:
                    self.state[p]["step"] = torch.tensor(float(step))
        self.register_step_pre_hook(_start_unbiased)


def _start_unbiased(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Starts parameters whose bias is not corrected at a step where no bias is left."""
    for group in optimizer.param_groups:
        if group.get("bias_correction", True):
            continue
        for p in group["params"]:
            state = optimizer.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["step"] = torch.tensor(_UNBIASED)


class FusedSGD(SGD):
    """`torch.optim.SGD`, with weight decay before dampening in the argument order."""

    def __init__(  # noqa: PLR0917  # Habana's positional order
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
    ) -> None:
        """Takes Habana's arguments."""
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
