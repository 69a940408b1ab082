"""Seals a frozen model: hooks that check its calls, describe it, and refuse training and loading.

The hooks are copied and pickled with the model, so they are objects of classes, and don't refer to the fp32
weights.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import session, torch_state
from ..errors import FreezeError
from ..number_formats import Format, decode
from ..policy import LowType
from ..tensors import long_name
from .call_checks import REMEDY, ChecksCalls
from .originals import Slot


@dataclass(frozen=True)
class Seal:
    """The modules that were sealed together, and a key that identifies them and their copies."""

    key: str
    modules: tuple[nn.Module, ...]

    def copies_in(self, model: nn.Module) -> list[str]:
        """Returns the names of modules in ``model`` that were copied from sealed ones."""
        own = set(map(id, self.modules))
        return [
            path
            for path, module in model.named_modules()
            if _key(module) == self.key and id(module) not in own
        ]


def seal(
    model: nn.Module,
    slots: Sequence[Slot],
    dtypes: Mapping[str, LowType],
    in_force: session.Session,
    attached: contextlib.ExitStack,
) -> Seal:
    """Makes ``model`` check its calls, describe its state dict, and refuse training and loading.

    Args:
        model: The model, with weights stored low.
        slots: The places of these weights.
        dtypes: Their names -> the stored types.
        in_force: The conversion that they are stored for.
        attached: Undoes all this.
    """
    name = type(model).__name__
    holders = dict(_holders(model, slots))
    coded = _coded(slots, dtypes)
    own: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for slot in slots:
        own[id(slot.module)][slot.name] = slot.tensor

    def attach(register: Any, hook: Any, **options: Any) -> None:
        attached.callback(register(hook, **options).remove)

    checks = ChecksCalls(name, in_force, holders, slots, is_coded=bool(coded))
    attached.callback(checks.release)
    attach(model.register_forward_pre_hook, checks, prepend=True)
    stored = {n: long_name(dtype) for n, dtype in dtypes.items()}
    low_type = long_name(in_force.policy.low_precision_type)
    attach(model.register_state_dict_post_hook, _DescribesWeights(low_type, stored))
    key = uuid.uuid4().hex
    for path, module in holders.items():
        attach(module.register_load_state_dict_pre_hook, _RefusesLoading(key))
        if names := coded.get(path):
            attach(module.register_state_dict_post_hook, _DecodesWeights(names))
        where = f"{path!r} in {name}" if path else name
        refuses = _RefusesTraining(module, where, own.get(id(module), {}))
        attached.callback(refuses.release, vars(module).get("train"))
        vars(module)["train"] = refuses
    return Seal(key, tuple(holders.values()))


def _holders(model: nn.Module, slots: Sequence[Slot]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the model, and each module in it that holds some of the slots, at any depth."""
    parents: dict[int, list[int]] = defaultdict(list)
    for module in model.modules():
        for child in module.children():
            parents[id(child)].append(id(module))
    holding, waiting = {id(model)}, [id(slot.module) for slot in slots]
    while waiting:
        found = waiting.pop()
        if found not in holding:
            holding.add(found)
            waiting += parents[found]
    for path, module in model.named_modules():
        if id(module) in holding:
            yield path, module


def is_sealed(module: nn.Module) -> bool:
    """Whether `seal` was called with this module, or with one that contains it."""
    return _key(module) is not None


def _key(module: nn.Module) -> str | None:
    for hook in module._load_state_dict_pre_hooks.values():
        refuses = getattr(hook, "hook", hook)
        if isinstance(refuses, _RefusesLoading):
            return refuses.key
    return None


class _DescribesWeights:
    """A state dict hook: records in the metadata which weights are stored low."""

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


def _coded(
    slots: Sequence[Slot], dtypes: Mapping[str, LowType]
) -> dict[str, list[tuple[Format, list[str]]]]:
    """Returns module path -> the formats of codes in it, each with the names there of one tied weight."""
    tied: dict[str, dict[int, tuple[Format, list[str]]]] = defaultdict(dict)
    for slot in slots:
        format = dtypes[slot.name]
        if isinstance(format, Format):
            path, inside = "", slot.name
            while inside:
                tied[path].setdefault(id(slot.tensor), (format, []))[1].append(inside)
                part, _, inside = inside.partition(".")
                path = f"{path}.{part}" if path else part
    return {path: list(several.values()) for path, several in tied.items()}


class _DecodesWeights:
    """A state dict hook: replaces weights' codes by values; tied weights stay tied.

    An unfrozen model would load codes as numbers: `nn.Module.load_state_dict` silently copies integers to
    float32 weights.
    """

    def __init__(self, names: list[tuple[Format, list[str]]]) -> None:
        self._names = names

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        with torch.no_grad(), torch_state.without_casts():
            for format, names in self._names:
                held = [prefix + name for name in names if prefix + name in state_dict]
                if not held:
                    continue
                first = state_dict[held[0]]  # values, if an inner module's hook ran before
                values = first if first.is_floating_point() else decode(first.detach(), format)
                state_dict.update(dict.fromkeys(held, values))


class _RefusesLoading:
    """A hook that refuses to load weights, since they would be rounded; it has the key of the `Seal`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        where = f"{prefix[:-1]!r}, a {type(module).__name__}," if prefix else type(module).__name__
        raise FreezeError(f"{where} is frozen and can't load weights; undo() first: {REMEDY}")


class _RefusesTraining:
    """Replaces a module's ``train``, and keeps gradients from the weights that are stored low.

    Copies of a tensor lose its hooks, so a copy of the module sets them again.
    """

    def __init__(self, module: nn.Module, where: str, tensors: Mapping[str, Tensor]) -> None:
        self._module = weakref.ref(module)
        self._where = where
        self._tensors = dict(tensors)
        self._is_released = False
        self._hook_gradients()

    def __call__(self, mode: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None
        if mode and not self._is_released:
            raise FreezeError(
                f"{self._where} is frozen: its low-precision weights can't be trained; {REMEDY}"
            )
        return type(module).train(module, mode)

    def release(self, before: Any) -> None:
        """Restores the module's ``train`` and the weights' gradients."""
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
                    continue  # autograd itself refuses these
                requires_grad = tensor.requires_grad
                tensor.requires_grad_(True)  # needed for a hook; the user may set it later
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
    """A tensor hook that refuses gradients."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: Tensor) -> None:
        raise FreezeError(
            f"a gradient reached {self._name!r}, a low-precision weight of a frozen model, which "
            f"can't be trained; {REMEDY}"
        )
