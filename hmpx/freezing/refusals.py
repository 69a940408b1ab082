"""Hooks on a frozen model that refuse training it and loading weights into it.

They are copied and pickled with the model, so they are objects of classes, and none refers to the
fp32 weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import FreezeError

REMEDY: Final = "call undo() on what hmpx.freeze returned, or build the model from its fp32 weights"


class RefusesLoading:
    """A hook that refuses to load weights, because they would be rounded.

    Attributes:
        key: The key of the `Seal`.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Refuses to load.

        Raises:
            FreezeError: Always.
        """
        where = f"{prefix[:-1]!r}, a {type(module).__name__}," if prefix else type(module).__name__
        raise FreezeError(f"{where} is frozen and can't load weights; undo() first: {REMEDY}")


class RefusesTraining:
    """Replaces a module's ``train``, and lets no gradient reach its weights that are stored low.

    Copies of a tensor lose its hooks, so this sets them again in a copy of the module.
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
            FreezeError: ``mode`` asks for training mode.
        """
        module = self._module()
        assert module is not None
        if mode and not self._is_released:
            raise FreezeError(
                f"{self._where} is frozen: its low-precision weights can't be trained; {REMEDY}"
            )
        return type(module).train(module, mode)

    def release(self, before: Any) -> None:
        """Restores what the module had under ``train``, and the weights' gradients."""
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
