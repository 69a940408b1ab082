"""``habana_frameworks.torch.hpex.optimizers``: Habana's fused optimizers, with their arguments.

Torch's own where torch has them; LAMB and LARS as their papers define them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from ...absent import GaudiError, unknown

_Closure: TypeAlias = Callable[[], Any] | None


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


#: Of so many steps no decay rate leaves any bias to correct; one more is the same float32 number.
_UNBIASED: Final = float(1 << 24)


class FusedAdamW(AdamW):
    """`torch.optim.AdamW`, which leaves out the correction of bias where asked to."""

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
            GaudiError: The moments are to be kept in a type of their own.
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
        """Takes the state of a copy or a checkpoint; Habana's count steps for each group."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            step = group.pop("step", None)
            is_counted = step is not None and group.get("bias_correction", True)
            for p in group["params"]:
                if is_counted and self.state[p]:
                    self.state[p]["step"] = torch.tensor(float(step))
        self.register_step_pre_hook(_start_unbiased)


def _start_unbiased(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Starts parameters whose bias is not corrected where none is left."""
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
    """`torch.optim.SGD`; weight decay stands before dampening."""

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


class _Configured(Optimizer):
    """An optimizer with settings of its own, which copies have, too."""

    _settings: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Returns all that the optimizer is made of, for pickle and copies."""
        state = super().__getstate__()
        return {**state, **{name: getattr(self, name) for name in self._settings}}


class FusedLamb(_Configured):
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
            eps: Is added to the root of the second moment.
            weight_decay: The weight decay.
            amsgrad: Must be False.
            adam_w_mode: Whether weight decay is decoupled; else it is added to the gradient.
            grad_averaging: Whether the first moment takes ``1 - betas[0]`` of the gradient, or all.
            set_grad_none: Whether `zero_grad` sets gradients to None.
            max_grad_norm: What the norm of all gradients is clipped to; None for no clipping.
            use_lamb: Whether groups without weight decay are scaled by trust ratios, too.
            fused: Has no effect here.
            dtype: What gradients are rounded to before their norm is taken.

        Raises:
            ValueError: A value is out of its range.
            RuntimeError: ``amsgrad`` is asked for, as on a Gaudi.
        """
        if amsgrad:
            raise RuntimeError("FusedLamb has no AMSGrad variant; leave out amsgrad")
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
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
    def step(self, closure: _Closure = None) -> Any:
        """Makes one step; returns what ``closure`` does.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = _evaluated(closure)
        divisor = self._clipping()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in _with_gradients(group):
                self._step_one(p, group, divisor)
        return loss

    def _clipping(self) -> Tensor | float:
        """Returns what gradients are divided by so that the norm of all is at most the largest."""
        most = self.defaults["max_grad_norm"]
        if most is None:
            return 1.0
        norms = [
            torch.linalg.vector_norm(cast(Tensor, p.grad).to(self.dtype or p.grad.dtype))  # type: ignore[union-attr]
            for group in self.param_groups
            for p in _with_gradients(group)
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


class FusedResourceApplyMomentum(Optimizer):
    """Momentum as TensorFlow applies it: the buffer takes the gradient times the learning rate.

    ``buffer = momentum * buffer - lr * gradient``, and the parameter takes the buffer; with
    ``nesterov`` it takes what the buffer will be.
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
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and momentum <= 0:
            raise ValueError("nesterov needs a momentum above 0")
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov},
        )

    @torch.no_grad()
    def step(self, closure: _Closure = None) -> Any:
        """Makes one step; returns what ``closure`` does.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = _evaluated(closure)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in _with_gradients(group):
                gradient = cast(Tensor, p.grad).add(p, alpha=group["weight_decay"])
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(momentum).sub_(gradient, alpha=lr)
                if group["nesterov"]:
                    p.add_(buffer, alpha=momentum).sub_(gradient, alpha=lr)
                else:
                    p.add_(buffer)
        return loss


class FusedLars(_Configured):
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
            optimizer: What makes the steps.
            skip_mask: For each parameter of a group, by position: true where it is scaled. False
                leaves its gradient as it is, without weight decay.
            eeta: The trust coefficient.
            eps: Is added to the norms in the denominator.

        Raises:
            ValueError: ``skip_mask`` is too short, or a value out of its range.
        """
        _check(eeta=eeta, eps=eps)
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
    def step(self, closure: _Closure = None) -> Any:
        """Makes one step; returns what ``closure`` does.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = _evaluated(closure)
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0
            positions = {id(p): i for i, p in enumerate(group["params"])}
            for p in _with_gradients(group):
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


# --- what they share ---------------------------------------------------------------------------


def _evaluated(closure: _Closure) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradients(group: dict[str, Any]) -> list[Tensor]:
    """Returns the parameters of a group that have a gradient.

    Raises:
        RuntimeError: A gradient is sparse.
    """
    found = [p for p in group["params"] if p.grad is not None]
    if any(p.grad.is_sparse for p in found):
        raise RuntimeError(
            "this optimizer takes no sparse gradients; use torch.optim.SparseAdam, or sparse=False "
            "in the embedding"
        )
    return found


def _ratio(norm: Tensor, update_norm: Tensor) -> Tensor:
    """Returns LAMB's trust ratio; 1 where one of the norms is 0."""
    is_usable = (norm > 0) & (update_norm > 0)
    return torch.where(is_usable, norm / update_norm, torch.ones_like(norm))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}; each must be at least 0 and below 1")


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
