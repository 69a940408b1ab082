"""Transforms, traces, dispatch modes, torch.autocast and autograd, from torch's private functions, and their classes."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar, cast

import torch
import torch.masked.maskedtensor.core
import torch.utils.checkpoint
from torch import Tensor

from ..errors import raised_here
from .operators import has_kernel_for
from .torch_part import do_nothing, one, rely_on

_F = TypeVar("_F", bound=Callable[..., Any])

#: Modules that name `torch.overrides.get_default_nowrap_functions`: getters whose results are not wrapped.
NAMING_GETTERS = (torch._tensor, torch.masked.maskedtensor.core)

#: The class of tensors without values; a context in which subclasses' ``__torch_function__`` is not called, and one in
#: which function modes' is not either.
FakeTensor, DisableTorchFunctionSubclass, _DisableTorchFunction, _has_function_modes = rely_on(
    "tensor subclasses"
)


#: A context in which no dispatch mode sees a call; the class of modes; tensors of graphs being traced;
#: whether a tensor contains others.
disable_modes, TorchDispatchMode, FunctionalTensor, is_tensor_of_tensors = rely_on(
    "dispatch modes and tensors in graphs",
    instead=(contextlib.nullcontext, object, (), lambda t: False),
    is_needed=True,
)

with disable_modes():
    """Its first use imports modules: a child that is forked meanwhile, by another thread, would wait for ever."""


class DispatchMode(TorchDispatchMode):  # type: ignore[misc,valid-type]
    """Base of hmpx's dispatch modes."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevents compilation meanwhile; torch would import Dynamo in the first call, 70 MB, just to notify it."""
        return False

    def __exit__(self, *exc_info: Any) -> None:
        # An interrupt may have stopped a block without modes at its own end.
        if self not in mode_stack():
            _push_mode(self)
        super().__exit__(*exc_info)


#: The functions to which a device context passes its device, and the class of the function mode that
#: `torch.device` enters. torch caches the functions on the first call, which must come before any patch.
device_constructors, DeviceContext = rely_on(
    "torch.device as a context", instead=(frozenset, type("NoContext", (), {}))
)


#: The running transforms of torch.func, or None; whether a tensor belongs to
#: torch.autograd.grad(is_grads_batched=True), or to torch.func.vmap; whether a transform created it, and its
#: original.
transforms, is_batch, is_mapped, is_of_transform, behind_transform = rely_on(
    "torch.func",
    instead=(lambda: True, lambda t: True, lambda t: False, lambda t: True, lambda t: t),
)


_levels = rely_on("forward-mode gradients", instead=(types.SimpleNamespace(_current_level=0),))


def has_tangents() -> bool:
    """Whether tensors may have forward-mode gradients."""
    return bool(_levels._current_level >= 0)


def may_learn(*tensors: Tensor) -> bool:
    """Whether results from ``tensors`` may have gradients, in backward or forward mode.

    Tensors of torch.func transforms don't show whether their originals require gradients. Forward-mode
    gradients exist even while backward ones are off.
    """
    if _levels._current_level >= 0:
        return True
    return torch.is_grad_enabled() and (
        any([tensor.requires_grad for tensor in tensors])  # noqa: C419  # Dynamo traces lists better
        or is_transformed()
    )


def is_transformed() -> bool:
    """Whether transforms of torch.func are running; torch.compile evaluates this at trace time."""
    return transforms() is not None


#: The state of torch.jit.trace, None if it is not running; whether it is running.
jit_tracing_state, is_jit_tracing = rely_on("torch.jit.trace")

#: The number of active dispatch modes.
dispatch_modes, _mode_of, _mode_keys, _mode_at, _push_mode, _pop_mode = rely_on(
    "dispatch modes",
    instead=(
        *(lambda: 1, lambda key: True, types.SimpleNamespace(PROXY=None, FAKE=None)),
        *(do_nothing, do_nothing, do_nothing),
    ),
)
_PROXY, _FAKE = _mode_keys.PROXY, _mode_keys.FAKE


def mode_stack() -> list[Any]:
    """Returns the active dispatch modes, the innermost last."""
    return list(map(_mode_at, range(dispatch_modes())))


def innermost_mode() -> Any:
    count = dispatch_modes()
    return _mode_at(count - 1) if count else None


def restore_modes(stack: list[Any]) -> None:
    if mode_stack() != stack:
        for _ in range(dispatch_modes()):
            _pop_mode()
        for mode in stack:
            _push_mode(mode)


def has_fake_tensors() -> bool:
    """Whether calls compute only shapes and dtypes."""
    return _mode_of(_FAKE) is not None


def is_noted_in_graph() -> bool:
    """Whether calls are recorded in a graph."""
    return _mode_of(_PROXY) is not None


def is_graph_made() -> bool:
    """Whether calls are recorded in a graph, or compute only shapes and dtypes."""
    return _mode_of(_PROXY) is not None or _mode_of(_FAKE) is not None


def unseen(function: _F) -> _F:
    """Makes a function of an observer run where no mode sees its calls, of the program or of another observer."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        is_dispatched = dispatch_modes() > 0
        if (
            not (is_dispatched or _has_function_modes())
            or torch.compiler.is_dynamo_compiling()
            or is_graph_made()
        ):
            return function(*args, **kwargs)
        with (
            _DisableTorchFunction(),
            disable_modes() if is_dispatched else contextlib.nullcontext(),
        ):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


is_excluded, is_included, _dispatch_keys = rely_on("calls below the dispatcher")
#: Excluded below the dispatcher: in decompositions, meta functions, kernels written in Python.
SNAPSHOT: Final = getattr(_dispatch_keys, "PythonTLSSnapshot", None)
#: Included while AOTAutograd and torch.export trace.
PYTHON: Final = getattr(_dispatch_keys, "PythonDispatcher", None)


#: Modules of kernels written in Python, and of functions that may call ops.
KERNEL_MODULES: Final = ("torch._decomp", "torch._refs", "torch._prims")
FUNCTION_MODULES: Final = (
    "torch.functional",
    "torch.nn.functional",
    "torch._tensor",
    "torch._jit",
)

#: The classes of callables from `torch.jit.script` and `torch.jit.trace`.
SCRIPTED: Final[tuple[type[Any], ...]] = rely_on("TorchScript", instead=())


# --- torch.autocast: its state, its regions and its decorators ----------------------------------

#: Whether torch.autocast is on for any device type here; and a context in which it casts nothing.
is_any_autocast_enabled, DisableAutocast = rely_on("calls inside of torch.autocast")

_Outside, _set_excluded, _keys_of, _keys_after, _aten = rely_on(
    "casts inside of kernels", instead=(None,) * 5
)
#: Ops whose kernels call ops that torch.autocast casts -> the op that the program calls. All such ops of OpInfo.
_COMPOSED: Final = (
    {}
    if _aten is None
    else {
        _aten._sparse_addmm.default: "aten::_sparse_addmm",
        _aten._trilinear.default: "aten::bilinear",
        _aten.linalg_pinv.atol_rtol_tensor: "aten::linalg_pinv",
    }
)
#: Stands for their positions in `_written_lists`.
_COMPOSING: Final = [-1]


def call_in(mode: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls what a dispatch mode got, and does for it what torch does without a mode.

    It counts writes to lists of tensors, which autograd checks, and casts inside of kernels under torch.autocast.
    """
    if not (places := _written_lists(func)):
        return func(*args, **kwargs)
    if places != _COMPOSING:
        lists = [args[place] for place in places if place < len(args)]
        written = [each for tensors in lists for each in tensors if not each.is_inference()]
        versions = [each._version for each in written]
        result = func(*args, **kwargs)
        if versions and versions == [each._version for each in written]:
            torch.autograd.graph.increment_version(written)
        return result
    device_type = args[0].device.type
    with _Outside():
        is_cast = torch.is_autocast_enabled(device_type)
    name = f"Autocast{device_type.upper()}"
    if not is_cast or has_kernel_for(_COMPOSED[func], name):  # which casts nothing inside of it
        return func(*args, **kwargs)
    _set_excluded(getattr(_dispatch_keys, name), False)
    try:
        with mode:
            keys = _keys_of(args[0]) & _keys_after(_dispatch_keys.ADInplaceOrView)
            return func.redispatch(keys, *args, **kwargs)
    finally:
        _set_excluded(getattr(_dispatch_keys, name), True)


@functools.cache
def _written_lists(func: Any) -> list[int]:
    """Returns the positions of the lists of tensors that an operator writes to; `_COMPOSING` for those."""
    if func in _COMPOSED:
        return _COMPOSING
    given = enumerate(func._schema.arguments) if hasattr(func, "_schema") else ()
    return [
        place
        for place, each in given
        if each.alias_info is not None
        and each.alias_info.is_write
        and each.type.kind() == "ListType"
        and not each.kwarg_only
    ]


#: Modules of torch that open regions on behalf of the user's code.
AUTOCAST_OPENERS: Final = (
    "torch.amp.autocast_mode",  # decorators, and graphs
    "torch._higher_order_ops.wrap",
    "torch._dynamo.variables.higher_order_ops",
)

#: Device types that torch knows but that don't exist. torch.compile guards on their autocast states, and
#: backward threads inherit these, so they can carry states of hmpx.
OFF_MARK, TRAINING_MARK = "maia", "ipu"

enter_autocast, exit_autocast = rely_on(
    "regions of torch.autocast in exported graphs", instead=(None, None)
)


def _code_in(function: Any, name: str) -> types.CodeType | None:
    codes = [c for c in function.__code__.co_consts if isinstance(c, types.CodeType)]
    return next((code for code in codes if code.co_name == name), None)


_custom_fwd, _custom_bwd = rely_on("torch.amp.custom_fwd", instead=(lambda: None, lambda: None))
#: Code of all functions decorated by these. Libraries decorate them before a conversion.
CUSTOM_FORWARD: Final = _code_in(_custom_fwd, "decorate_fwd")
CUSTOM_BACKWARD: Final = _code_in(_custom_bwd, "decorate_bwd")


#: Saved-tensor hooks: push and pop a pair, the innermost pair or None, and why none are allowed.
push_hooks, pop_hooks, _top_hooks, hooks_refused = rely_on(
    "memory of legalized ops",
    instead=(do_nothing, do_nothing, do_nothing, lambda: "torch has none"),
)


#: Returns the innermost pair of saved-tensor hooks, even while tracing.
top_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = functools.partial(
    _top_hooks, True
)


_HIDES_HOOKS: Final = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def hide_hook(pack: Any, outer: Any) -> None:
    """Makes selective checkpoints ignore a hook of hmpx and see the hook around it."""
    if _HIDES_HOOKS:  # since torch 2.14 they warn about the user's hooks
        pack._checkpoint_internal, pack._user_hooks = True, outer


#: Returns a tensor's ``data``; read before anything is patched.
data_of: Callable[[Tensor], Tensor] = vars(Tensor.__mro__[1])["data"].__get__


#: Returns a tensor's memory; read before anything is patched.
storage_of: Callable[[Tensor], torch.UntypedStorage] = Tensor.untyped_storage


#: Returns the number of the backward pass that this thread computes, -1 if there is none; whether it keeps what
#: nodes saved; and the node that runs, or None.
current_graph_task, keeps_graph, running_node = rely_on(
    "phases of calls", instead=(lambda: -1, lambda: True, lambda: None)
)


_SINCE_2_14: Final = "_checkpoint_without_reentrant_generator_impl"
#: Name in `torch.utils.checkpoint` of the runner of non-reentrant ones; its first argument is the function.
CHECKPOINT_GENERATOR: Final = (
    _SINCE_2_14 if hasattr(torch.utils.checkpoint, _SINCE_2_14) else _SINCE_2_14[: -len("_impl")]
)
rely_on("checkpoints", f"torch.utils.checkpoint.{CHECKPOINT_GENERATOR}")


# --- nodes of the graph -------------------------------------------------------------------------

#: Whether nodes expose their outputs, and the order of their creation.
_ARE_DESCRIBED: Final = rely_on("dtypes and modules in hmpx.draw", instead=(None,)) is not None


def outputs_of(node: Any) -> list[tuple[torch.dtype | None, tuple[int, ...] | None]]:
    """Returns the dtype and the shape of each output for which ``node`` has a gradient; None if unknown.

    A shape with a symbolic size is unknown.
    """
    if not _ARE_DESCRIBED:
        return []
    found: list[tuple[torch.dtype | None, tuple[int, ...] | None]] = []
    for known in node._input_metadata:
        try:
            shape = tuple([int(size) for size in known.shape])
        except raised_here(Exception):  # nested tensors have none; no guards on symbols
            shape = None
        found.append((getattr(known, "dtype", None), shape))
    return found


def number_of(node: Any) -> int | None:
    """Returns a number that increases with each node of a thread; None if unknown."""
    return int(node._sequence_nr()) if _ARE_DESCRIBED else None


_exp = torch.exp


def next_number() -> int | None:
    """Returns a lower bound for the number of this thread's next node; None if unknown.

    It is unknown inside torch.func transforms, where a new tensor can't be made to require gradients.
    """
    if not _ARE_DESCRIBED or transforms() is not None:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        return number_of(_exp(one().requires_grad_()).grad_fn)


def function_of(node: Any) -> type | None:
    """Returns the `torch.autograd.Function` that created ``node``; None for torch's own ops."""
    found = getattr(node, "_forward_cls", None)  # without it, names of classes are shown
    return found if isinstance(found, type) else None


# --- batches of gradients -----------------------------------------------------------------------
# `torch.autograd.grad(is_grads_batched=True)`, `jacobian(vectorize=True)`: such a tensor has no readable
# memory, and torch refuses to draw random numbers with it.


_enter, _leave, _batched, _unbatched = rely_on(
    "batches of gradients in number formats",
    instead=(lambda: 1, lambda: 0, lambda x, dim, level: x, lambda x, level, size, dim: x),
)


def _depth() -> int:
    depth = int(_enter()) - 1
    _leave()
    return depth


@contextlib.contextmanager
def outside_batches() -> Iterator[None]:
    """Allows random numbers, which torch refuses to draw with a batch of gradients."""
    depth = _depth()
    for _ in range(depth):
        _leave()
    try:
        yield
    finally:
        for _ in range(depth):
            _enter()


def is_gradient_batch(x: Tensor) -> bool:
    """Whether a tensor is a batch of gradients."""
    return not torch.compiler.is_dynamo_compiling() and is_batch(x) and _depth() > 0


def each_of_batch(function: Callable[[Tensor], tuple[Tensor | None, ...]], x: Tensor) -> list[Any]:
    """Applies a function to each tensor in a batch of gradients, and returns its results as batches.

    Differentiable: a batch's gradients are those of its underlying tensor, so replacements of autograd
    functions must get that tensor.
    """
    depth = _depth()
    with outside_batches():
        # In the dimension of batches without it, the size is 1.
        for level in range(depth, 0, -1):
            x = _unbatched(x, level, 1, 0)
        sizes = x.shape[:depth]
        results = [function(row) for row in x.flatten(0, depth - 1).unbind()]
    return [_as_batch(each, sizes) for each in zip(*results, strict=True)]


def one_of_batch(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Like `each_of_batch`, for a function that returns one tensor."""
    (found,) = each_of_batch(lambda each: (function(each),), x)
    return cast(Tensor, found)


def _as_batch(rows: tuple[Tensor | None, ...], sizes: torch.Size) -> Tensor | None:
    if rows[0] is None:
        return None
    found = torch.stack([row for row in rows if row is not None])
    found = found.view(*sizes, *found.shape[1:])
    for level, size in enumerate(sizes, 1):
        found = found[0] if size == 1 else _batched(found, 0, level)
    return found
