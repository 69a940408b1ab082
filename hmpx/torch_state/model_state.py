"""What a run changes of a model and of the process, kept and put back: buffers, gradients, random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .random_state import state_of_random_numbers


class ModelState:
    """The state of some modules, and of all generators of random numbers, as they are now."""

    def __init__(self, modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> None:
        """Keeps the state.

        Args:
            modules: The modules, without those inside them.
            inputs: Tensors on the devices that the modules run on.
        """
        modules = list(modules)
        every = [each for module in modules for each in module.modules()]
        self._modes = [(module, module.training) for module in every]
        self._slots = [
            (module, name, buffer, buffer.detach().clone())
            for module in every
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        parameters = [each for module in modules for each in module.parameters()]
        self._gradients = [(each, each.grad) for each in parameters]
        self._learns = [(each, each.requires_grad) for each in parameters]
        self._random = state_of_random_numbers([*parameters, *inputs])
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restart(self) -> None:
        """Puts buffers and random numbers back, and takes gradients away, for another run."""
        with torch.no_grad():
            for module, name, buffer, values in self._slots:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if not _is_same(buffer, values):
                    buffer.copy_(values)
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._random.restore()
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def restore(self) -> None:
        """Puts everything back."""
        self.restart()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, learns in self._learns:
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)
        for module, is_training in self._modes:
            module.training = is_training


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether nothing has written to ``a``; a write that changes nothing would still count as one."""
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(a, b)


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Puts back on exit what a model, if it is a module, and the random numbers were."""
    state = ModelState([model] if isinstance(model, nn.Module) else [], ())
    try:
        yield
    finally:
        state.restore()
