"""What is hung onto a frozen model: hooks that check its calls, and refuse training and loading.

They are copied and pickled with the model: objects of these classes, none of which refers to the
fp32 weights. Knows nothing of how weights are chosen and stored.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from . import session, switch
from .casting import LOW_DTYPES, SEQUENCES
from .decisions import LowType
from .dtypes import long_name, short_name
from .errors import FreezeError
from .sequences import with_items

REMEDY: Final = "call undo() on what hmpx.freeze returned, or build the model from its fp32 weights"


def seal(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, LowType],
    in_force: session.Session,
    attached: contextlib.ExitStack,
) -> None:
    """Makes ``model`` check its calls, describe its state dict, and refuse training and loading."""
    name = type(model).__name__
    low_name = short_name(in_force.policy.low_precision_type)
    checks = _ChecksConversion(name, low_name, in_force)
    attached.callback(model.register_forward_pre_hook(checks, prepend=True).remove)
    stored = {n: long_name(dtype) for n, dtype in dtypes.items()}
    low_type = long_name(in_force.policy.low_precision_type)
    describes = _DescribesWeights(low_type, stored)
    handle = model.register_state_dict_post_hook(describes)  # type: ignore[no-untyped-call]
    attached.callback(handle.remove)
    for module in _owners(model, tensors):
        handle = module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _RefusesLoading()
        )
        attached.callback(handle.remove)
    refuses = _RefusesTraining(model, tensors)
    attached.callback(refuses.release, vars(model).get("train"))
    vars(model)["train"] = refuses


def _owners(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Yields the model, and the modules that hold one of ``tensors`` themselves."""
    ids = set(map(id, tensors.values()))
    for module in model.modules():
        own = (*module._parameters.values(), *module._buffers.values())
        if module is model or any(id(tensor) in ids for tensor in own):
            yield module


def is_sealed(module: nn.Module) -> bool:
    """Whether `seal` was called with this module."""
    hooks = module._load_state_dict_pre_hooks.values()
    return any(isinstance(getattr(hook, "hook", hook), _RefusesLoading) for hook in hooks)


class _ChecksConversion:
    """A forward pre-hook: the conversion that the weights were stored for must be in force."""

    def __init__(self, name: str, low_name: str, in_force: session.Session) -> None:
        self._name = name
        self._low_name = low_name
        self._fingerprint = _fingerprint(in_force)
        self._rules = in_force.rules
        self._seen: Callable[[], session.Session | None] = weakref.ref(in_force)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        in_force = session.current()
        if in_force is None:
            raise FreezeError(
                f"{self._name} is frozen, with weights in {self._low_name}, but torch is not "
                f"converted; call hmpx.convert() as it was when the model was frozen, or {REMEDY}"
            )
        if switch.is_off():
            raise FreezeError(
                f"{self._name} is frozen, with weights in {self._low_name}, but casts are off "
                f"here; call it outside of the hmpx.disable_casts block, or {REMEDY}"
            )
        if in_force is not self._seen() or in_force.rules != self._rules:
            if _fingerprint(in_force) != self._fingerprint:
                raise FreezeError(
                    f"{self._name} was frozen under another policy than that in force now; call "
                    f"hmpx.convert() as it was when the model was frozen, or {REMEDY}"
                )
            self._seen, self._rules = weakref.ref(in_force), in_force.rules

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seen": _nothing, "_rules": ()}


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
    """A hook before weights are loaded: they would be rounded."""

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        where = f"{prefix[:-1]!r}, a {type(module).__name__}," if prefix else type(module).__name__
        raise FreezeError(f"{where} is frozen and can't load weights; undo() first: {REMEDY}")


class _RefusesTraining:
    """Stands in for ``model.train``, and lets no gradient reach the weights that are stored low.

    Copies of a tensor lose its hooks; so this sets them again in a copy of the model.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._model = weakref.ref(model)
        self._tensors = dict(tensors)
        self._is_released = False
        self._hook_gradients()

    def __call__(self, mode: bool = True) -> nn.Module:
        """Returns the model, in evaluation mode.

        Raises:
            FreezeError: It is to be in training mode.
        """
        model = self._model()
        assert model is not None
        if mode and not self._is_released:
            raise FreezeError(
                f"{type(model).__name__} is frozen: its low-precision weights can't be trained; "
                f"{REMEDY}"
            )
        return type(model).train(model, mode)

    def release(self, before: Any) -> None:
        """Gives the model back what it had under ``train``, and the weights their gradients."""
        self._is_released = True
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is not None and vars(model).get("train") is self:
            del vars(model)["train"]
            if before is not None:
                vars(model)["train"] = before

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
        return {"model": self._model(), "tensors": self._tensors, "released": self._is_released}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])
        self._tensors = state["tensors"]
        self._is_released = state["released"]
        self._handles = []
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
