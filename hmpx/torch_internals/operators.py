"""torch's ops, their schemas and kernels, the operators of torch.library; optimizers, modules and graphs of torch.fx."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.fx._symbolic_trace
import torch.nn.modules.module
import torch.nn.utils.clip_grad

from .torch_part import do_nothing, rely_on

#: The second says whether the dispatcher has a kernel for an operator such as ``"aten::add.Tensor"``, the third
#: whether it has one for a key such as ``"CPU"``.
schemas_of, has_kernel, has_kernel_for, NN, VF = rely_on("the table of torch's ops")
#: The names of these namespaces according to their modules and docs.
NN_NAMESPACE, VF_NAMESPACE = "torch._C._nn", "torch._VF"


OpOverload, OpOverloadPacket, OpNamespace, CustomOpDef = rely_on(
    "operators of torch.library", instead=(type("NoOperator", (), {}),) * 4, is_needed=True
)
#: Whether operators can be defined. Otherwise `convert` raises an error, but hmpx can be imported.
HAS_OPERATORS: Final = OpNamespace.__name__ != "NoOperator"
#: The method of an operator that puts another function into it, since torch 2.14.
TOGGLE_DISPATCH: Final = "_enable_pyobj_dispatch"
#: The module, and in it the name of the function called when an operator gets another overload.
OPERATORS_MODULE, REFRESH_PACKET = sys.modules[torch.ops.__class__.__module__], "_refresh_packet"

#: Copies, and norms, of lists of tensors in few kernels.
foreach_copy, foreach_norm = rely_on("calls on lists of tensors")

_library: Any = torch.library.Library
_OWN: Final = _library("hmpx", "FRAGMENT")


def own_operator(
    signature: str,
    fake: Callable[..., Any],
    *tags: str,
    layout: str = "needs_fixed_stride_order",
) -> Any:
    """Returns a new operator of hmpx's, without a kernel; None if torch lacks a needed part."""
    if not HAS_OPERATORS:
        return None
    name = signature.partition("(")[0]
    tags = ("pt2_compliant_tag", layout, *tags)
    _OWN.define(signature, tags=[getattr(torch.Tag, tag) for tag in tags])
    torch.library.register_fake(f"hmpx::{name}", fake, lib=_OWN)
    return getattr(torch.ops.hmpx, name).default


def set_kernel(operator: Any, function: Callable[..., Any], key: str) -> None:
    """Makes ``function`` the kernel of an operator of hmpx's own, for a key of torch's dispatcher."""
    if operator is not None:
        _OWN.impl(operator.name(), function, key)


def effectful_operator(signature: str, function: Callable[..., None]) -> Any:
    """Returns a new operator that graphs keep for what it does, in order, though it returns nothing."""
    operator = own_operator(
        signature, lambda *args: None, "cudagraph_unsafe", layout="flexible_layout"
    )
    set_kernel(operator, function, "CompositeExplicitAutograd")
    if operator is not None:
        _register_effect(operator, _ORDERED)
    return operator


# --- what older versions of torch lack -----------------------------------------------------------

_Excluding, _Keys, _BATCHED, _batches = rely_on("number formats in torch.vmap", instead=(None,) * 4)


def excluding(key: Any) -> Any:
    """Returns a context without a key of torch's dispatcher."""
    return _Excluding(_Keys(key))


def _view_batch(batch: torch.Tensor, dtype: torch.dtype) -> Any:
    """The rule of `torch.vmap` for `Tensor.view(dtype)`, as torch has it since 2.13."""
    with excluding(_BATCHED):
        level = _batches.maybe_current_level()
        if _batches.maybe_get_level(batch) != level:
            return batch.view(dtype)
        rows = _batches.get_unwrapped(batch).movedim(_batches.maybe_get_bdim(batch), 0)
        return _batches._add_batch_dim(rows.view(dtype), 0, level)


if None not in (_batches, has_kernel_for) and not has_kernel_for("aten::view.dtype", _BATCHED):
    _ATEN: Final = _library("aten", "IMPL")
    _ATEN.impl("view.dtype", _view_batch, "FuncTorchBatched")


_register_effect, _ORDERED = rely_on(
    "compiled functions in traces", instead=(lambda *args: None, None)
)


#: The operators of a cast; of ``.item()``, and of an ``if`` on a tensor; of batch norm with running
#: statistics, in compiled programs; CUDA's fused attention kernels: the low-precision one without a mask, and
#: the other.
CAST_OP, VALUE_OP, BATCH_NORM_OP, FLASH_ATTENTION, MASKED_ATTENTION = rely_on(
    "operators in hmpx.plan and record(memory=True)", instead=(*[object()] * 3, None, None)
)


def has_hooked_step(optimizer_class: type[torch.optim.Optimizer]) -> bool:
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
