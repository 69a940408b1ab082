"""Habana's fused optimizers: torch's where torch has them, LAMB and LARS as their papers define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from .devices import GaudiError


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
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


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
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps)


class FusedAdamW(AdamW):
    """`torch.optim.AdamW`, with optional bias correction.

    Raises:
        GaudiError: The moments need a separate dtype.
    """

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
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            step = group.pop("step", None)
            is_counted = step is not None and group.get("bias_correction", True)
            for p in group["params"]:
                if is_counted and self.state[p]:
                    self.state[p]["step"] = torch.tensor(float(step))
        self.register_step_pre_hook(_start_unbiased)


def _start_unbiased(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Starts parameters without bias correction at a step that has no bias left."""
    for group in optimizer.param_groups:
        if group.get("bias_correction", True):
            continue
        for p in group["params"]:
            state = optimizer.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            # So many that every bias correction is 1, and one more is the same float32 number.
            state["step"] = torch.tensor(float(1 << 24))


# --- optimizers that torch does not have ---------------------------------------------------------


class _Stepping(Optimizer):
    """Makes a step by `_step`; copies keep all attributes that subclasses set."""

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**own, **super().__getstate__()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step; returns the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        raise NotImplementedError


class FusedResourceApplyMomentum(_Stepping):
    """Momentum as TensorFlow applies it: the buffer takes the gradient times the learning rate.

    ``buffer = momentum * buffer - lr * gradient``, and the parameter takes the buffer; with
    ``nesterov`` it takes the next value of the buffer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "nesterov": nesterov})

    def _step(self) -> None:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p, gradient in _with_gradients(group):
                decayed = gradient.add(p, alpha=group["weight_decay"])
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(momentum).sub_(decayed, alpha=lr)
                if group["nesterov"]:
                    p.add_(buffer, alpha=momentum).sub_(decayed, alpha=lr)
                else:
                    p.add_(buffer)


class FusedLars(_Stepping):
    """LARS around another optimizer: each layer's gradient is scaled by its trust ratio.

    You et al., "Large Batch Training of Convolutional Networks". The other optimizer applies the
    learning rate. Its weight decay is applied here, to the scaled layers: those with a true ``skip_mask``,
    by position in a group.

    Raises:
        ValueError: ``skip_mask`` is too short.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        skip_mask: Sequence[Any],
        eeta: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        longest = max(len(group["params"]) for group in optimizer.param_groups)
        if len(skip_mask) < longest:
            raise ValueError(
                f"skip_mask has {len(skip_mask)} entries for {longest} parameters; give one for each"
            )
        self.optim, self.skip_mask, self.eeta, self.eps = optimizer, skip_mask, eeta, eps
        super().__init__(optimizer.param_groups, {**optimizer.defaults, "eeta": eeta, "eps": eps})
        self._share()

    def _share(self) -> None:
        self.param_groups = self.optim.param_groups  # schedulers set the learning rate in them
        self.state = self.optim.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the inner optimizer's state."""
        self.optim.load_state_dict(state_dict)
        self._share()

    def _step(self) -> None:
        groups = self.optim.param_groups
        decays = [group.get("weight_decay", 0) for group in groups]
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = 0
            positions = {id(p): i for i, p in enumerate(group["params"])}
            for p, gradient in _with_gradients(group):
                if self.skip_mask[positions[id(p)]]:
                    norm, gradient_norm = p.norm(), gradient.norm()
                    ratio = self.eeta * norm / (gradient_norm + decay * norm + self.eps)
                    gradient.add_(p, alpha=decay).mul_(_usable(ratio, norm, gradient_norm))
        try:
            self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay


class FusedLamb(_Stepping):
    """LAMB: Adam whose step is scaled by each layer's trust ratio; ``fused`` has no effect.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", with the
    clipping of the global gradient norm before it. Groups without weight decay take Adam's step
    unscaled, unless ``use_lamb``. With ``adam_w_mode`` weight decay is decoupled, else it is added to the
    gradient. With ``grad_averaging`` the first moment takes ``1 - betas[0]`` of the gradient, else all of
    it. Gradients are rounded to ``dtype`` before their norm is taken.

    Raises:
        RuntimeError: ``amsgrad`` is True, as on a Gaudi.
    """

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
        if amsgrad:
            raise RuntimeError("FusedLamb has no AMSGrad variant; leave out amsgrad")
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging")
        given = locals()
        super().__init__(params, {name: given[name] for name in (*names, "max_grad_norm")})
        self.adam_w_mode, self.set_grad_none, self.use_lamb = adam_w_mode, set_grad_none, use_lamb
        self.fused, self.dtype = fused, dtype

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _step(self) -> None:
        gradients = [g for group in self.param_groups for _, g in _with_gradients(group)]
        most = self.defaults["max_grad_norm"]
        divisor: Tensor | float = 1.0
        if most is not None and gradients:
            divisor = clipping_divisor([g.to(self.dtype or g.dtype) for g in gradients], most)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p, gradient in _with_gradients(group):
                self._step_one(p, gradient / divisor, group)

    def _step_one(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
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
            norm, update_norm = p.norm(), update.norm()
            update.mul_(_usable(norm / update_norm, norm, update_norm))
        p.sub_(update, alpha=group["lr"])


def clipping_divisor(gradients: list[Tensor], most: float) -> Tensor:
    """Returns the divisor of ``gradients`` that makes their common norm at most ``most``."""
    norms = [torch.linalg.vector_norm(each) for each in gradients]
    dtype = torch.promote_types(norms[0].dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(dtype) for each in norms]))
    return (norm / most).clamp(min=1.0)


def _usable(ratio: Tensor, norm: Tensor, other: Tensor) -> Tensor:
    return torch.where((norm > 0) & (other > 0), ratio, torch.ones_like(ratio))


def _with_gradients(group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    found = [(p, cast(Tensor, p.grad)) for p in group["params"] if p.grad is not None]
    if any(gradient.is_sparse for _, gradient in found):
        raise RuntimeError(
            "this optimizer takes no sparse gradients; use torch.optim.SparseAdam, or sparse=False "
            "in the embedding"
        )
    return found
