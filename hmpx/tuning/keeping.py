"""Leaves a model and the program as they were: buffers, modes, gradients, random numbers, conversion."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..torch_internals import is_dynamo_loaded
from ..torch_state import state_of_random_numbers


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restores on exit the buffers, modes and gradients of a model, and the state of random numbers."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    parameters = list(model.parameters()) if modules else []
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    modes = [(module, module.training) for module in modules]
    gradients = [(each, each.grad) for each in parameters]
    numpy: Any = sys.modules.get("numpy")
    others = random.getstate(), None if numpy is None else numpy.random.get_state()
    state = state_of_random_numbers([*parameters, *[buffer for _, _, buffer, _ in buffers]])
    try:
        yield
    finally:
        state.restore()
        random.setstate(others[0])
        if others[1] is not None:
            numpy.random.set_state(others[1])
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
        for (
            parameter,
            gradient,
        ) in gradients:  # no evaluation writes to it: they record no gradients
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which compiled models run uncompiled: each set would be compiled anew."""
    if not is_dynamo_loaded():  # nothing can have been compiled
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def seed_all(seed: int) -> None:
    """Has torch, Python and NumPy, if it is loaded, draw the random numbers of a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
