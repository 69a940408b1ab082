"""What hmpx relies on of `import torch` that torch does not promise: private names and behaviours.

Each is here, with what it is for, since when it is known, a try of its behaviour, and what happens
without it; no other module names anything private of torch but `compiler_internals`. Tries run once,
when hmpx is imported, in about 3 ms.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.fx._symbolic_trace
import torch.nn.modules.module
import torch.utils.checkpoint
from torch import Tensor

from ..errors import TorchError
from .torch_part import rely_on


def _ones() -> Tensor:
    return torch.ones(1, dtype=torch.float32, device="cpu")


def _is_found(*found: object) -> bool:
    return True


# --- transforms, tracing, modes -----------------------------------------------------------------


def _tells_transforms(
    current: Callable[[], Any], is_batch: Any, is_of_transform: Any, behind: Any
) -> bool:
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        seen.append(current())
        return x

    x = _ones()
    torch.vmap(note)(x)
    is_told = current() is None and len(seen) == 1 and seen[0] is not None
    return is_told and not any([tells(x) is not False for tells in (is_batch, is_of_transform)])  # noqa: C419


#: The transforms of torch.func that are running, None for none; whether a tensor is one of
#: torch.autograd.grad(is_grads_batched=True); whether it is one that a transform has made, and of what.
transforms, is_batch, is_of_transform, behind_transform = rely_on(
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.get_unwrapped",
    feature="torch.func",
    since="2.13",
    without="every call is computed as inside of a transform, which takes longer",
    behaves=_tells_transforms,
    instead=(lambda: True, lambda tensor: True, lambda tensor: True, lambda tensor: tensor),
)


def _tells_dual_levels(module: Any) -> bool:
    return isinstance(module._current_level, int)  # -1 for none, in the whole process


_levels = rely_on(
    "torch.autograd.forward_ad",
    feature="forward-mode gradients",
    since="2.13",
    without="every call is computed as with forward-mode gradients, which takes longer",
    behaves=_tells_dual_levels,
    instead=(types.SimpleNamespace(_current_level=0),),
)


def has_tangents() -> bool:
    """Whether tensors may have forward-mode gradients here."""
    return bool(_levels._current_level >= 0)


#: What stands for torch.jit.trace: None if it does not run.
jit_tracing_state = rely_on(
    "torch._C._get_tracing_state",
    feature="torch.jit.trace",
    since="2.13",
    without="roundings of number formats would be lost in traced graphs",
    behaves=lambda state: state() is None or isinstance(state(), torch._C.TracingState),
)

#: Whether torch.jit.trace runs.
is_jit_tracing = rely_on(
    "torch._C._is_tracing",
    feature="torch.jit.trace, asked for",
    since="2.13",
    without="calls take longer",
    behaves=lambda is_tracing: is_tracing() is (jit_tracing_state() is not None),
    instead=(lambda: jit_tracing_state() is not None,),
)

#: How many dispatch modes are active.
dispatch_modes = rely_on(
    "torch._C._len_torch_dispatch_stack",
    feature="dispatch modes",
    since="2.13",
    without="every call is computed as inside of one, which takes longer",
    behaves=lambda count: count() == 0 or isinstance(count(), int),
    instead=(lambda: 1,),
)

_mode_of, _mode_keys = rely_on(
    "torch._C._get_dispatch_mode",
    "torch._C._TorchDispatchModeKey",
    feature="calls that become part of a graph",
    since="2.13",
    without="every call is computed with roundings for graphs, which takes longer",
    behaves=lambda mode_of, keys: all(
        mode is None or hasattr(type(mode), "__torch_dispatch__")
        for mode in (mode_of(keys.PROXY), mode_of(keys.FAKE))
    ),
    instead=(lambda key: True, types.SimpleNamespace(PROXY=None, FAKE=None)),
)
_PROXY, _FAKE = _mode_keys.PROXY, _mode_keys.FAKE


def has_fake_tensors() -> bool:
    """Whether calls made here compute shapes and dtypes only."""
    return _mode_of(_FAKE) is not None


def is_noted_in_graph() -> bool:
    """Whether calls made here are noted in a graph."""
    return _mode_of(_PROXY) is not None


def is_graph_made() -> bool:
    """Whether calls made here are noted in a graph, or compute shapes and dtypes only."""
    return _mode_of(_PROXY) is not None or _mode_of(_FAKE) is not None


def _are_told_apart(excluded: Callable[[Any], bool], included: Any, keys: Any) -> bool:
    from torch._dispatch.python import enable_python_dispatcher

    before = included(keys.PythonDispatcher)
    with enable_python_dispatcher():
        inside = included(keys.PythonDispatcher)
    return inside is True and isinstance(before, bool) and excluded(keys.PythonTLSSnapshot) is False


is_excluded, is_included, _dispatch_keys = rely_on(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "torch._C.DispatchKey",
    feature="calls below the dispatcher",
    since="2.13",
    without="torch's own calls would be cast",
    behaves=_are_told_apart,
)
#: Excluded below the dispatcher: in decompositions, meta functions, kernels written in Python.
SNAPSHOT: Final = getattr(_dispatch_keys, "PythonTLSSnapshot", None)
#: Included while AOTAutograd and torch.export trace.
PYTHON: Final = getattr(_dispatch_keys, "PythonDispatcher", None)


#: Modules of kernels that are written in Python, and of functions that ops may be called by.
KERNEL_MODULES: Final = ("torch._decomp", "torch._refs", "torch._prims")
FUNCTION_MODULES: Final = (
    "torch.functional",
    "torch.nn.functional",
    "torch._tensor",
    "torch._jit",
)


#: The class of tensors without values.
FakeTensor = rely_on(
    "torch._subclasses.fake_tensor.FakeTensor",
    feature="models of fake tensors",
    since="2.13",
    without="weights of RNNs are cast one by one there, and hmpx.freeze leaves all as they are",
    behaves=lambda fake: isinstance(fake, type) and issubclass(fake, Tensor),
    instead=(type("NoFakeTensor", (), {}),),
)


class _Tracker(Tensor):
    """A tensor whose calls say that they were seen."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "seen"


def _disables_subclasses(disable: Any) -> bool:
    tracker = _ones().as_subclass(_Tracker)
    with disable():
        inside: Any = torch.exp(tracker)
    return isinstance(inside, Tensor) and torch.exp(tracker) == "seen"


#: Inside, subclasses' ``__torch_function__`` is not called.
DisableTorchFunctionSubclass = rely_on(
    "torch._C.DisableTorchFunctionSubclass",
    feature="tensor subclasses",
    since="2.13",
    without="casts inside of a subclass' own functions would not end",
    behaves=_disables_subclasses,
)


class _NoDispatchMode:
    """Stands for `TorchDispatchMode` where torch has none."""

    def __init__(self) -> None:
        raise TorchError(
            f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode, which "
            "hmpx.freeze needs; install another version of torch: see docs/versions.md"
        )


#: Inside, no dispatch mode sees a call; the class of modes; tensors of graphs being traced; whether a
#: tensor has others in it.
disable_modes, TorchDispatchMode, FunctionalTensor, is_tensor_of_tensors = rely_on(
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    feature="freezing",
    since="2.13",
    without="hmpx.freeze raises TorchError",
    behaves=lambda disable, mode, tensor, has_others: (
        isinstance(mode, type)
        and isinstance(tensor, type)
        and has_others(_ones()) is False
        and hasattr(disable(), "__enter__")
    ),
    instead=(
        contextlib.nullcontext,
        _NoDispatchMode,
        type("NoTensor", (), {}),
        lambda tensor: False,
    ),
)


def _current_function_modes() -> Sequence[Any]:
    return ()


#: The function modes that are active, and the class of that which `torch.device` enters.
function_modes, DeviceContext = rely_on(
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._device.DeviceContext",
    feature="scripts that place tensors on hpu",
    since="2.13",
    without="the stand-in for habana_frameworks would not see torch.device as a context",
    behaves=lambda modes, context: isinstance(modes(), (list, tuple)),
    instead=(_current_function_modes, type("NoContext", (), {"__init__": lambda self: None})),
)


# --- torch.autocast -----------------------------------------------------------------------------


def _tells_autocast(is_any_enabled: Callable[[], bool], disable: Any) -> bool:
    before = is_any_enabled()
    was_enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)
    try:
        inside = is_any_enabled()
        with disable():
            x = _ones()[:, None]
            dtype = torch.mm(x, x).dtype
    finally:
        torch.set_autocast_enabled("cpu", was_enabled)
    return isinstance(before, bool) and inside is True and dtype is torch.float32


_AUTOCAST_TYPES: Final = ("cpu", "cuda", "xpu", "hpu", "mps", "privateuseone")


def _is_any_autocast_enabled() -> bool:
    return any([torch.is_autocast_enabled(each) for each in _AUTOCAST_TYPES])  # noqa: C419


@contextlib.contextmanager
def _disabled_autocast() -> Iterator[None]:
    enabled = [each for each in _AUTOCAST_TYPES if torch.is_autocast_enabled(each)]
    for each in enabled:
        torch.set_autocast_enabled(each, False)
    try:
        yield
    finally:
        for each in enabled:
            torch.set_autocast_enabled(each, True)


#: Whether torch.autocast is on for any device type here; inside of the other, it casts nothing.
is_any_autocast_enabled, DisableAutocast = rely_on(
    "torch._C._is_any_autocast_enabled",
    "torch._C._DisableAutocast",
    feature="calls inside of torch.autocast",
    since="2.13",
    without="calls there take longer",
    behaves=_tells_autocast,
    instead=(_is_any_autocast_enabled, _disabled_autocast),
)


def _keep_states(*device_types: str) -> Callable[..., bool]:
    def behaves(
        set_enabled: Callable[[str, bool], None], is_enabled: Callable[[str], bool]
    ) -> bool:
        for each in device_types:
            before = is_enabled(each)
            set_enabled(each, not before)
            after = is_enabled(each)
            set_enabled(each, before)
            if after is before:
                return False
        return True

    return behaves


#: Modules of torch that open the regions that a user's code has asked for.
AUTOCAST_OPENERS: Final = (
    "torch.amp.autocast_mode",  # decorators, and graphs
    "torch._higher_order_ops.wrap",
    "torch._dynamo.variables.higher_order_ops",
)

#: Device types that torch knows and nobody has: torch.compile guards on their autocast states, and
#: backward threads inherit them, so they carry states of hmpx.
OFF_MARK, TRAINING_MARK = "maia", "ipu"
rely_on(
    "torch.set_autocast_enabled",
    "torch.is_autocast_enabled",
    feature="disable_casts in graphs and backward threads",
    since="2.13",
    without="casts that are off would be on there",
    behaves=_keep_states(OFF_MARK, TRAINING_MARK),
)

enter_autocast, exit_autocast = rely_on(
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    feature="regions of torch.autocast in exported graphs",
    since="2.13",
    without="exported graphs cast inside of regions that are off",
    behaves=_is_found,
    instead=(None, None),
)


def _code_in(function: Any, name: str) -> types.CodeType | None:
    """Returns the code of the function ``name`` that is defined inside of ``function``."""
    codes = [c for c in function.__code__.co_consts if isinstance(c, types.CodeType)]
    return next((code for code in codes if code.co_name == name), None)


_custom_fwd = rely_on(
    "torch.amp.autocast_mode.custom_fwd",
    feature="torch.amp.custom_fwd",
    since="2.13",
    without="functions that it decorates run with casts on, whatever their cast_inputs say",
    behaves=lambda custom_fwd: _code_in(custom_fwd, "decorate_fwd") is not None,
    instead=(lambda: None,),
)
#: Code of every function that `torch.amp.custom_fwd` has decorated.
CUSTOM_FORWARD: Final = _code_in(_custom_fwd, "decorate_fwd")


# --- autograd -----------------------------------------------------------------------------------


def _give_to_hooks(push: Any, pop: Any, top: Any, refused: Any) -> bool:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = _ones().requires_grad_()
    push(pack, _same)
    try:
        x.exp()
        found = top(True)
    finally:
        pop()
    return len(packed) == 1 and found[0] is pack and refused() is None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _do_nothing(*args: object) -> None:
    return None


#: Saved-tensor hooks: to open and close a pair, the innermost one or None, and why there can be none.
push_hooks, pop_hooks, _top_hooks, hooks_refused = rely_on(
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    feature="memory of legalized ops",
    since="2.13",
    without="autograd keeps fp32 copies of low-precision tensors",
    behaves=_give_to_hooks,
    instead=(_do_nothing, _do_nothing, _do_nothing, lambda: "torch has none"),
)


def top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the innermost pair of saved-tensor hooks, tracing or not."""
    return _top_hooks(True)  # type: ignore[no-any-return]


def user_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the innermost pair of saved-tensor hooks."""
    return _top_hooks(False)  # type: ignore[no-any-return]


#: Whether torch tells which packed object a saved tensor is.
TELLS_SAVED: Final = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "data")

_HIDES_HOOKS: Final = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def hide_hook(pack: Any, outer: Any) -> None:
    """Makes selective checkpoints look past a hook of hmpx, to what is around it."""
    if _HIDES_HOOKS:  # since torch 2.14 they warn of hooks of the user's
        pack._checkpoint_internal, pack._user_hooks = True, outer


def _is_data(data: Any) -> bool:
    x = _ones()
    return bool(data.__get__(x).data_ptr() == x.data_ptr())


_data = rely_on(
    "torch._C.TensorBase.data",
    feature="running statistics in number formats",
    since="2.13",
    without="they take longer",
    behaves=_is_data,
    instead=(property(operator.attrgetter("data")),),
)
#: Returns a tensor's ``data``, as before anything was patched.
data_of: Callable[[Tensor], Tensor] = _data.__get__


def _counts(use_count: Callable[[Any], int]) -> bool:
    one, other = _ones(), _ones()
    shares = other.view(1)
    few, more = (use_count(each.untyped_storage()._cdata) for each in (one, other))
    return shares.numel() == 1 and few < more


_use_count = rely_on(
    "torch._C._storage_Use_Count",
    feature="reuse_casts",
    since="2.13",
    without="no cast is reused",
    behaves=_counts,
    instead=(lambda pointer: sys.maxsize,),
)
_storage = Tensor.untyped_storage


def uses(tensor: Tensor) -> int:
    """Returns how many hold the memory of ``tensor``."""
    return int(_use_count(_storage(tensor)._cdata))


def _runs_through(function: Any, name: str) -> bool:
    """Whether a function of Python, or one that it calls in its module, names ``name``."""
    pending, seen = [function], set()
    while pending:
        found = pending.pop()
        found = getattr(found, "__wrapped__", found)
        code = getattr(found, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        if name in code.co_names:
            return True
        pending += [found.__globals__.get(each) for each in code.co_names]
    return False


#: What non-reentrant checkpoints go through: since torch 2.14, and before.
_GENERATORS: Final = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
#: Name in `torch.utils.checkpoint` of what runs a non-reentrant one, given the function first.
CHECKPOINT_GENERATOR: Final = next(
    (name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name)), _GENERATORS[0]
)
rely_on(
    f"torch.utils.checkpoint.{CHECKPOINT_GENERATOR}",
    "torch.utils.checkpoint.checkpoint",
    "torch.utils.checkpoint.CheckpointFunction.forward",
    feature="checkpoints",
    since="2.13",
    without="they would be recomputed under the casts that are in force in backward",
    behaves=lambda generator, checkpoint, forward: (
        _runs_through(checkpoint, CHECKPOINT_GENERATOR)
        and _runs_through(checkpoint, "CheckpointFunction")
    ),
)


# --- optimizers and modules ---------------------------------------------------------------------


class _TriedOptimizer(torch.optim.Optimizer):
    """An optimizer that does nothing."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing."""


def has_hooked_step(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether torch has put its profiling and hooks around the class' own ``step`` already."""
    return hasattr(vars(optimizer_class).get("step"), "hooked")


def _prepares_steps(prepare: Callable[[Any], None]) -> bool:
    # Without what it says of itself to torch.compile, which would be imported.
    inspect.unwrap(prepare)(object.__new__(_TriedOptimizer))
    return has_hooked_step(_TriedOptimizer)


#: The method of an optimizer that puts torch's profiling and hooks around its class' ``step``.
PREPARE_STEP: Final = "_patch_step_function"
rely_on(
    f"torch.optim.Optimizer.{PREPARE_STEP}",
    feature="optimizers' steps",
    since="2.13",
    without="they would be cast",
    behaves=_prepares_steps,
)

_step_hooks, _module_hooks = rely_on(
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.nn.modules.module._global_module_registration_hooks",
    feature="hooks of optimizers and modules",
    since="2.13",
    without="reused casts outlive fused optimizers' steps, and modules that are moved keep their names",
    behaves=lambda *tables: all(isinstance(table, dict) for table in tables),
)
#: Hooks by key: after each optimizer's step, and at each module that is put into another.
STEP_HOOKS: Final = _step_hooks
MODULE_HOOKS: Final = _module_hooks


def _clipping_cells(clip_grad: types.ModuleType) -> tuple[types.CellType, ...]:
    """Returns where torch's functions that clip gradients hold what they run without gradients."""
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


def _clips_by_cells(clip_grad: types.ModuleType, *functions: Any) -> bool:
    run = [cell.cell_contents for cell in _clipping_cells(clip_grad)]
    return all(getattr(function, "__wrapped__", function) in run for function in functions)


_clip_grad = rely_on(
    "torch.nn.utils.clip_grad",
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.nn.utils.get_total_norm",
    feature="clipping of gradients",
    since="2.13",
    without="norms of gradients would be cast",
    behaves=_clips_by_cells,
    instead=(types.ModuleType("clip_grad"), *[_do_nothing] * 4),
)[0]
#: Closure cells of torch's functions that clip gradients: what is put there is run for everybody who
#: holds the function, since whenever.
CLIPPING: Final = _clipping_cells(_clip_grad)

#: The module, and the name in it of what calls a module that is traced by torch.fx.
FX_TRACING, FX_MODULE_CALL = torch.fx._symbolic_trace, "_orig_module_call"
rely_on(
    "torch.fx._symbolic_trace._orig_module_call",
    feature="sections by module in traced graphs",
    since="2.13",
    without="graphs of make_fx and torch.export would not know their modules",
    behaves=_is_found,
)

rely_on(
    "torch.backends.mha.get_fastpath_enabled",
    "torch.nn.RNNBase.check_input",
    feature="fast paths and checks of modules",
    since="2.13",
    without="fused kernels would run uncast, and mixed dtypes be refused",
    behaves=_is_found,
)


# --- ops ----------------------------------------------------------------------------------------

schemas_of, _has_kernel, VARIABLE_FUNCTIONS, NN, VF = rely_on(
    "torch._C._jit_get_schemas_for_operator",
    "torch._C._dispatch_has_kernel",
    "torch._C._VariableFunctions",
    "torch._C._nn",
    "torch._VF",
    feature="the table of torch's ops",
    since="2.13",
    without="no op could be found",
    behaves=lambda schemas, has_kernel, functions, nn, vf: (
        schemas("aten::linear")[0].name == "aten::linear"
        and has_kernel("aten::add.Tensor") is True
        and hasattr(functions, "mm")
        and hasattr(nn, "gelu")
        and hasattr(vf, "lstm")
    ),
)
#: Where modules and their docs say that these namespaces are.
NN_NAMESPACE, VF_NAMESPACE = "torch._C._nn", "torch._VF"


def has_kernel(operator_name: str) -> bool:
    """Whether the dispatcher has a kernel of an operator: ``"aten::add.Tensor"``."""
    return bool(_has_kernel(operator_name))


OpOverload, OpOverloadPacket, OpNamespace, CustomOpDef = rely_on(
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._ops._OpNamespace",
    "torch._library.custom_ops.CustomOpDef",
    feature="operators of torch.library",
    since="2.13",
    without="they would not be cast",
    behaves=lambda overload, packet, namespace, custom: (
        isinstance(torch.ops.aten, namespace)
        and isinstance(torch.ops.aten.mm, packet)
        and isinstance(torch.ops.aten.mm.default, overload)
    ),
    instead=(type("NoOperator", (), {}),) * 4,
    is_needed=True,
)
#: The method of an operator that puts another function into it, since torch 2.14.
TOGGLE_DISPATCH: Final = "_enable_pyobj_dispatch"
#: The module, and the name in it of what is called when an operator gets another overload.
OPERATORS_MODULE, REFRESH_PACKET = sys.modules[torch.ops.__class__.__module__], "_refresh_packet"
