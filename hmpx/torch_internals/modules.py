"""The private side of optimizers and modules: their hooks, gradient clipping, torch.fx."""

from __future__ import annotations

import types
from typing import Final

import torch
import torch.fx._symbolic_trace
import torch.nn.modules.module
import torch.nn.utils.clip_grad

from .torch_part import do_nothing, rely_on


def has_hooked_step(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether torch has already wrapped the class' own ``step`` for profiling and hooks."""
    return hasattr(vars(optimizer_class).get("step"), "hooked")


#: The method of an optimizer that wraps its class' ``step`` for profiling and hooks.
PREPARE_STEP: Final = "_patch_step_function"
rely_on("optimizers' steps", f"torch.optim.Optimizer.{PREPARE_STEP}")

#: Hooks by key: after each optimizer's step, for each submodule that is registered, for each buffer.
STEP_HOOKS, MODULE_HOOKS, BUFFER_HOOKS = rely_on("hooks of optimizers and modules")

#: The function of torch.nn.functional that refuses batches of one row in training.
BATCH_CHECK: Final = "_verify_batch_size"
rely_on("batches of one row", instead=(None,))

#: The function that rebuilds tensors from stored data.
rebuild_tensor = rely_on("loaded tensors", instead=(do_nothing,))


def is_replica(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a copy that torch.nn.DataParallel made for one forward."""
    return getattr(module, "_is_replica", False) is True


def _clipping_cells(clip_grad: types.ModuleType) -> tuple[types.CellType, ...]:
    """Returns the closure cells of torch's gradient-clipping functions with the functions run under no_grad."""
    functions = [
        value
        for value in vars(clip_grad).values()
        if isinstance(value, types.FunctionType) and value.__module__ == clip_grad.__name__
    ]
    found = {
        id(cell): cell
        for function in functions
        for cell in function.__closure__ or ()
        if cell.cell_contents is getattr(function, "__wrapped__", clip_grad)
    }
    return tuple(found.values())


#: Closure cells of torch's gradient-clipping functions: a function put there also runs for early
#: imports of them.
CLIPPING: Final = _clipping_cells(torch.nn.utils.clip_grad)

#: The module, and in it the name of the function that calls a module traced by torch.fx.
FX_TRACING, FX_MODULE_CALL = torch.fx._symbolic_trace, "_orig_module_call"
rely_on("sections by module in traced graphs")

#: The slot of a graph's node that holds its function; the class of the tables by which graphs find nodes,
#: and the method of it that returns a node's key. All None if torch differs.
NODE_KEY: Final = "_key"
NODE_TARGET, NODE_TABLE = rely_on("functions in graphs of torch.fx", instead=(None, None))
