"""Hooks that check the calls of a frozen model, and the steps of optimizers.

The hooks are copied and pickled with the model, and don't refer to the fp32 weights.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import session, torch_state
from ..errors import FreezeError
from ..rules import are_alike
from ..tensors import LOW_DTYPES, short_name
from ..torch_internals import behind_transform, has_tangents, is_of_transform, transforms
from .originals import Slot
from .weights import one_rounding

REMEDY: Final = "call undo() on what hmpx.freeze returned, or build the model from its fp32 weights"


class ChecksCalls:
    """A forward pre-hook: weights must be used as they were stored for, and not be trained.

    The conversion that they were stored for must be in force. While gradients are recorded, no module
    that holds some of them may be in training mode. Nor may low-precision tensors in their slots require
    gradients: `torch.func.functional_call` puts tensors without a hook there.

    It also refuses optimizer steps that would change the weights.
    """

    def __init__(
        self,
        name: str,
        in_force: session.Session,
        holders: Mapping[str, nn.Module],
        slots: Sequence[Slot],
        *,
        is_coded: bool,
    ) -> None:
        """Takes the model's class, the conversion, and path -> module for those that hold weights."""
        self._name = name
        self._low_name = short_name(in_force.policy.low_precision_type)
        self._fingerprint = _fingerprint(in_force)
        self._rules = self._own_rules = in_force.rules
        self._rounding = one_rounding(in_force) if is_coded else None
        self._is_rounded = in_force.options.legalize != "fast"
        self._seen: Callable[[], session.Session | None] = weakref.ref(in_force)
        # Without the model itself, so that it is freed without garbage collection.
        self._inner = {path: module for path, module in holders.items() if path}
        self._slots = [
            (slot.container, slot.attribute, slot.tensor, slot.path, slot.name) for slot in slots
            if isinstance(slot.container, dict)  # excludes modules of TorchScript
        ]  # fmt: skip
        self._names = {slot.name: slot.tensor for slot in slots}
        self._refuse_steps()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raises FreezeError if the weights can't be used in this call."""
        if torch.compiler.is_compiling():
            return
        in_force = session.current()
        if in_force is None:
            raise FreezeError(
                f"{self._name} is frozen, with weights in {self._low_name}, but torch is not "
                f"converted; call hmpx.convert() as it was when the model was frozen, or {REMEDY}"
            )
        if torch_state.is_off():
            raise FreezeError(
                f"{self._name} is frozen, with weights in {self._low_name}, but casts are off "
                f"here; call it outside of the hmpx.disable_casts block, or of the region in which "
                f"torch.autocast is off, or {REMEDY}"
            )
        if in_force is not self._seen() or in_force.rules != self._rules:
            other = self._difference(in_force)
            if other:
                raise FreezeError(
                    f"{self._name} was frozen under {other} than that in force now; call "
                    f"hmpx.convert() as it was when the model was frozen, or {REMEDY}"
                )
            self._seen, self._rules = weakref.ref(in_force), in_force.rules
        if torch.is_grad_enabled() or transforms() is not None or has_tangents():
            self._check_training(module)
            self._check_slots(module)

    def _difference(self, in_force: session.Session) -> str:
        """Returns the conversion in force if it would store weights differently; else ``""``."""
        own = self._own_rules  # none in another process, which only knows their names
        if _fingerprint(in_force) != self._fingerprint or (
            own and not all(map(are_alike, own, in_force.rules))
        ):
            return "another policy"
        if self._is_rounded and in_force.options.legalize == "fast":
            return "another legalize="
        if self._rounding is not None and one_rounding(in_force) != self._rounding:
            return "another rounding= or overflow="
        return ""

    def _check_training(self, model: nn.Module) -> None:
        if not model.training and not any([m.training for m in self._inner.values()]):  # noqa: C419
            return
        inner = next((repr(path) for path, m in self._inner.items() if m.training), "it")
        raise FreezeError(
            f"{self._name} is frozen, but {'it' if model.training else inner} is in training mode, "
            f"and low-precision weights can't be trained; call eval() on the model, or {REMEDY}"
        )

    def _check_slots(self, model: nn.Module) -> None:
        for container, attribute, tensor, path, name in self._slots:
            if container.get(attribute) is tensor:
                continue
            now = getattr(model.get_submodule(path), attribute, None)
            if isinstance(now, Tensor) and _asks_for_gradients(now, tensor):
                raise FreezeError(
                    f"gradients were requested for {name!r}, a "
                    f"low-precision weight of a frozen {self._name}, which can't be trained; use "
                    f"detached tensors or torch.no_grad(), or {REMEDY}"
                )

    def _refuse_steps(self) -> None:
        hook = functools.partial(_check_step, weakref.ref(self))
        self._handle = register_optimizer_step_pre_hook(hook)
        self._finalizer = weakref.finalize(self, self._handle.remove)
        self._finalizer.atexit = False

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises FreezeError if the optimizer's step would change one of the weights."""
        names = {id(tensor): name for name, tensor in self._names.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names and parameter.grad is not None:
                    raise FreezeError(
                        f"a step of {type(optimizer).__name__} would change "
                        f"{names[id(parameter)]!r}, a low-precision weight of a frozen "
                        f"{self._name}, which can't be trained; set its grad to None, or {REMEDY}"
                    )

    def release(self) -> None:
        """Stops refusing optimizer steps."""
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_seen": _nothing, "_rules": (), "_own_rules": ()}
        del state["_handle"], state["_finalizer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._refuse_steps()


def _check_step(
    checks: Callable[[], ChecksCalls | None], optimizer: torch.optim.Optimizer, *rest: Any
) -> None:
    """A hook before every optimizer's step: fused and foreach kernels bypass all other hooks."""
    found = checks()
    if found is not None:
        found.check_step(optimizer)


def _asks_for_gradients(now: Tensor, tensor: Tensor) -> bool:
    """Whether gradients or tangents of ``now``, in low precision, are recorded.

    Looks through the wrappers of torch.func's transforms, down to ``tensor``, which has its own hook.
    """
    if now.dtype not in LOW_DTYPES:
        return False
    while now is not tensor:
        if now.requires_grad and torch.is_grad_enabled():
            return True
        if has_tangents() and forward_ad.unpack_dual(now).tangent is not None:  # type: ignore[no-untyped-call]
            return True
        if not is_of_transform(now):
            return False
        now = behind_transform(now)
    return False


def _nothing() -> None:
    pass


def _fingerprint(in_force: session.Session) -> str:
    """Returns a digest that is equal for equal conversions, in any process."""
    rules = [(rule.op, rule.level, rule.name) for rule in in_force.rules]
    state = repr((in_force.policy.fingerprint(), sorted(in_force.device_types), rules))
    return hashlib.sha256(state.encode()).hexdigest()
