"""What is hung onto a frozen model: hooks that check its calls, and refuse training and loading.

They are copied and pickled with the model: objects of these classes, none of which refers to the
fp32 weights. Knows nothing of how weights are chosen and stored.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import session, torch_state
from ..errors import FreezeError
from ..policy import LowType
from ..tensors import LOW_DTYPES, SEQUENCES, long_name, short_name, with_items
from ..torch_internals import behind_transform, has_tangents, is_of_transform, transforms
from .slots import Slot

REMEDY: Final = "call undo() on what hmpx.freeze returned, or build the model from its fp32 weights"


@dataclass(frozen=True)
class Seal:
    """The modules that were sealed together.

    Attributes:
        key: What copies of them share with them, and no other module.
        modules: The modules.
    """

    key: str
    modules: tuple[nn.Module, ...]

    def copies_in(self, model: nn.Module) -> list[str]:
        """Returns the names in ``model`` of modules that were copied from sealed ones."""
        own = set(map(id, self.modules))
        return [
            path
            for path, module in model.named_modules()
            if _key(module) == self.key and id(module) not in own
        ]


class Attachments:
    """What was attached to a model, to be taken away; again, if that was interrupted."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self._undo: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: object) -> None:
        """Has ``function`` called by `close`; a second call of it must do nothing."""
        self._undo.append(functools.partial(function, *args))

    def close(self) -> None:
        """Takes everything away, the newest first."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def seal(
    model: nn.Module,
    slots: Sequence[Slot],
    dtypes: Mapping[str, LowType],
    in_force: session.Session,
    attached: Attachments,
) -> Seal:
    """Makes ``model`` check its calls, describe its state dict, and refuse training and loading.

    Args:
        model: With weights that are stored low.
        slots: Where these are.
        dtypes: Their names -> what they are stored in.
        in_force: The conversion that they are stored for.
        attached: Takes what undoes it all.
    """
    name = type(model).__name__
    holders = dict(_holders(model, slots))
    low_name = short_name(in_force.policy.low_precision_type)
    checks = _ChecksCalls(name, low_name, in_force, holders, slots)
    attached.callback(checks.release)
    attached.callback(model.register_forward_pre_hook(checks, prepend=True).remove)
    stored = {n: long_name(dtype) for n, dtype in dtypes.items()}
    low_type = long_name(in_force.policy.low_precision_type)
    describes = _DescribesWeights(low_type, stored)
    handle = model.register_state_dict_post_hook(describes)  # type: ignore[no-untyped-call]
    attached.callback(handle.remove)
    key = uuid.uuid4().hex
    for path, module in holders.items():
        handle = module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _RefusesLoading(key)
        )
        attached.callback(handle.remove)
        own = {slot.name: slot.tensor for slot in slots if slot.module is module}
        refuses = _RefusesTraining(module, f"{path!r} in {name}" if path else name, own)
        attached.callback(refuses.release, vars(module).get("train"))
        vars(module)["train"] = refuses
    return Seal(key, tuple(holders.values()))


def _holders(model: nn.Module, slots: Sequence[Slot]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the model, and each module in it that has some of the slots, itself or further in."""
    owners = {id(slot.module) for slot in slots}
    for path, module in model.named_modules():
        if module is model or any(id(inner) in owners for inner in module.modules()):
            yield path, module


def is_sealed(module: nn.Module) -> bool:
    """Whether `seal` was called with this module, or with one that it is in."""
    return _key(module) is not None


def _key(module: nn.Module) -> str | None:
    for hook in module._load_state_dict_pre_hooks.values():
        refuses = getattr(hook, "hook", hook)
        if isinstance(refuses, _RefusesLoading):
            return refuses.key
    return None


class _ChecksCalls:
    """A forward pre-hook: the weights must be used as they were stored to be, and not be trained.

    The conversion that they were stored for must be in force. Where gradients are recorded, no module
    that holds some of them may be in training mode, and nothing in their places may ask for gradients
    in low precision: `torch.func.functional_call` puts tensors there that no hook is on.

    It also refuses the steps of optimizers that would change the weights.
    """

    def __init__(
        self,
        name: str,
        low_name: str,
        in_force: session.Session,
        holders: Mapping[str, nn.Module],
        slots: Sequence[Slot],
    ) -> None:
        self._name = name
        self._low_name = low_name
        self._fingerprint = _fingerprint(in_force)
        self._rules = in_force.rules
        self._seen: Callable[[], session.Session | None] = weakref.ref(in_force)
        # Without the model itself, which is to be freed without a search for cycles.
        self._inner = {path: module for path, module in holders.items() if path}
        self._slots = [
            (slot.container, slot.attribute, slot.tensor, slot.path) for slot in slots
            if isinstance(slot.container, dict)  # no module of TorchScript
        ]  # fmt: skip
        self._names = {slot.name: slot.tensor for slot in slots}
        self._refuse_steps()

    def __call__(self, module: nn.Module, args: Any) -> None:
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
            if _fingerprint(in_force) != self._fingerprint:
                raise FreezeError(
                    f"{self._name} was frozen under another policy than that in force now; call "
                    f"hmpx.convert() as it was when the model was frozen, or {REMEDY}"
                )
            self._seen, self._rules = weakref.ref(in_force), in_force.rules
        if torch.is_grad_enabled() or transforms() is not None or has_tangents():
            self._check_training(module)
            self._check_slots(module)

    def _check_training(self, model: nn.Module) -> None:
        if not model.training and not any([m.training for m in self._inner.values()]):  # noqa: C419
            return
        inner = next((repr(path) for path, m in self._inner.items() if m.training), "it")
        raise FreezeError(
            f"{self._name} is frozen, but {'it' if model.training else inner} is in training mode, "
            f"and low-precision weights can't be trained; call eval() on the model, or {REMEDY}"
        )

    def _check_slots(self, model: nn.Module) -> None:
        for container, attribute, tensor, path in self._slots:
            if container.get(attribute) is tensor:
                continue
            now = getattr(model.get_submodule(path), attribute, None)
            if isinstance(now, Tensor) and _asks_for_gradients(now, tensor):
                raise FreezeError(
                    f"gradients are asked for of what stands for {_name(path, attribute)!r}, a "
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
        """Refuses no steps any more."""
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_seen": _nothing, "_rules": ()}
        del state["_handle"], state["_finalizer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._refuse_steps()


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _check_step(
    checks: Callable[[], _ChecksCalls | None], optimizer: torch.optim.Optimizer, *rest: Any
) -> None:
    """A hook before every optimizer's step: fused and foreach kernels write past all others."""
    found = checks()
    if found is not None:
        found.check_step(optimizer)


def _asks_for_gradients(now: Tensor, tensor: Tensor) -> bool:
    """Whether gradients of ``now``, in low precision, are recorded, or carried along with it.

    Looks at each tensor that transforms of torch.func have wrapped, down to ``tensor``, which is
    watched by a hook of its own.
    """
    if now.dtype not in LOW_DTYPES:
        return False
    while now is not tensor:
        if now.requires_grad and torch.is_grad_enabled():
            return True
        if has_tangents() and _tangent(now) is not None:
            return True
        if not is_of_transform(now):
            return False
        now = behind_transform(now)
    return False


def _tangent(tensor: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-any-return, no-untyped-call]


def _nothing() -> None:
    pass


def _fingerprint(in_force: session.Session) -> str:
    """Returns what equal conversions have in common, in any process."""
    rules = [(rule.op, rule.level, rule.name) for rule in in_force.rules]
    state = repr((in_force.policy.fingerprint(), sorted(in_force.device_types), rules))
    return hashlib.sha256(state.encode()).hexdigest()


class WidensOutputs:
    """A forward hook: returns float32 where the model returns bfloat16 or float16."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the module's output, raised."""
        return _widened(output)


def _widened(value: Any) -> Any:
    """Returns ``value`` with every low-precision tensor in it raised; itself if there is none."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW_DTYPES else value
    if isinstance(value, SEQUENCES):
        items = [_widened(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return with_items(value, items)
    if isinstance(value, dict):
        items = list(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        items = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    else:
        return value
    result = value
    for key, item in items:
        widened = _widened(item)
        if widened is item:
            continue
        if result is value:
            # torch.compile traces copies of any class but this one
            result = dict(value) if type(value) is dict else copy.copy(value)
        if isinstance(value, dict):
            result[key] = widened
        else:
            object.__setattr__(result, key, widened)  # the class may be frozen
    return result


class _DescribesWeights:
    """A state dict hook: notes in the metadata which weights are stored low."""

    def __init__(self, low_type: str, dtypes: dict[str, str]) -> None:
        self._low_type = low_type
        self._dtypes = dtypes

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        local_metadata["hmpx"] = {
            "frozen": True,
            "low_precision_type": self._low_type,
            "dtypes": dict(self._dtypes),
        }


class _RefusesLoading:
    """A hook before weights are loaded: they would be rounded.

    Attributes:
        key: That of the `Seal`.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        where = f"{prefix[:-1]!r}, a {type(module).__name__}," if prefix else type(module).__name__
        raise FreezeError(f"{where} is frozen and can't load weights; undo() first: {REMEDY}")


class _RefusesTraining:
    """Stands in for a module's ``train``, and lets no gradient reach its weights that are stored low.

    Copies of a tensor lose its hooks; so this sets them again in a copy of the module.
    """

    def __init__(self, module: nn.Module, where: str, tensors: Mapping[str, Tensor]) -> None:
        self._module = weakref.ref(module)
        self._where = where
        self._tensors = dict(tensors)
        self._is_released = False
        self._hook_gradients()

    def __call__(self, mode: bool = True) -> nn.Module:
        """Returns the module, in evaluation mode.

        Raises:
            FreezeError: It is to be in training mode.
        """
        module = self._module()
        assert module is not None
        if mode and not self._is_released:
            raise FreezeError(
                f"{self._where} is frozen: its low-precision weights can't be trained; {REMEDY}"
            )
        return type(module).train(module, mode)

    def release(self, before: Any) -> None:
        """Gives the module back what it had under ``train``, and the weights their gradients."""
        self._is_released = True
        for handle in self._handles:
            handle.remove()
        module = self._module()
        if module is not None and vars(module).get("train") is self:
            if before is None:
                del vars(module)["train"]
            else:
                vars(module)["train"] = before

    def _hook_gradients(self) -> None:
        self._handles = []
        with torch.inference_mode(False):
            for name, tensor in self._tensors.items():
                if tensor.is_inference() or not tensor.is_leaf or not tensor.is_floating_point():
                    continue  # autograd refuses these itself
                requires_grad = tensor.requires_grad
                tensor.requires_grad_(True)  # no hook without; it may be set later
                handle = tensor.register_hook(_RefusesGradients(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                tensor.requires_grad_(requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._module(), "_handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])
        if not self._is_released:
            self._hook_gradients()


class _RefusesGradients:
    """A hook of a tensor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: Tensor) -> None:
        raise FreezeError(
            f"a gradient reached {self._name!r}, a low-precision weight of a frozen model, which "
            f"can't be trained; {REMEDY}"
        )
