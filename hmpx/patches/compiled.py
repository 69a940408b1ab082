"""Keeps torch.compile's caches correct across conversions: traced code, kernels, files on disk.

These caches don't know hmpx, so each is invalidated or keyed here. A graph is traced with the wrappers in
it, but its cache key is computed before their casts. Compiled code calls the ``torch.mm`` that inductor
imported, and elides round-trip casts. Its partitioner makes the forward keep the inputs of the backward's products.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import torch_state
from ..compute import pays, reported
from ..later import AfterImport
from ..patching import Draft, Patch, entries
from ..policy import Policy
from ..tensors import LOW_DTYPES, LOW_PRECISION, Function
from ..torch_internals import (
    CAN_KEEP_CASTS,
    TRACES_AUTOCAST_STATES,
    Later,
    add_guard,
    disable_inductor_caches,
    forget_traced,
    of_later,
    trace_autocast_states,
)
from ..torch_state import AUTOCAST_STATE
from ..version import __version__
from .autocast_regions import tracing_patches


def forget_compiled(*, stays: bool = False) -> None:
    """Clears torch.compile's table of torch's functions, and its graphs.

    It sets no guard on the wrappers of methods and operators. It puts the wrappers that it finds under the
    names of torch's functions into the graph unchanged; they cast when the graph runs.
    """
    forget_traced(keeps_graphs=stays and _are_guarded)


def compile_patches(  # noqa: PLR0917  # all that a conversion is
    draft: Draft,
    policy: Policy,
    device_types: frozenset[str],
    decides: object,
    legalize: str,
    keep_weight_casts: bool | str,
    add: Callable[[Patch], None],
    *,
    is_cached: bool,
) -> Iterator[Patch]:
    """Yields the patches that make inductor's kernels, caches and settings fit a conversion."""
    # Computed on first use: it is slower than most of `convert`.
    tag = functools.cache(functools.partial(_digest, decides))
    yield Patch(sys.modules[__name__], "_tag", tag)
    yield Patch(sys.modules[__name__], "_is_cached", is_cached)
    actions: dict[str, Callable[[Any], object]] = {
        Later.SELECT_ALGORITHM: _unwrap_kernels,
        Later.CODE_CACHE: _tag_keys,
        Later.DYNAMO_FUNCTIONS: _fold_originals,
        Later.DYNAMO_RULES: _know_functions,
        Later.DYNAMO_GRAPHS: _guard_graphs,
        Later.INDUCTOR_LOWERINGS: _list_originals,
        Later.INDUCTOR_GRAPHS: _lower_originals("GraphLowering"),
        Later.INDUCTOR_SUBGRAPHS: _lower_originals("PointwiseSubgraphLowering"),
    }
    patches: dict[str, Callable[[Draft], Iterable[Patch]]] = {Later.TRACER: tracing_patches}
    dtype = policy.low_precision_type
    # Products in graphs are legalized, without measuring, and all run on a CPU.
    if (
        CAN_KEEP_CASTS
        and device_types == {"cpu"}
        and dtype in LOW_PRECISION
        and (legalize == "always" or (legalize == "auto" and reported("cpu", dtype) is False))
    ):
        patches[Later.INDUCTOR_CPP] = _keeping_casts
    if keep_weight_casts is not True:
        is_choosy = keep_weight_casts == "auto"
        patches[Later.AOT_GRAPHS] = functools.partial(partition_patches, is_choosy=is_choosy)
    for name, patches_of in patches.items():
        if name in sys.modules:
            yield from patches_of(draft)
        else:
            actions[name] = functools.partial(_add, add, patches_of)
    later = {name: act for name, act in actions.items() if name not in sys.modules}
    if later:
        yield entries(sys.meta_path, AfterImport(later))
    for name in [each for each in actions if each not in later]:
        actions[name](sys.modules[name])


def _add(
    add: Callable[[Patch], None], patches_of: Callable[[Draft], Iterable[Patch]], module: object
) -> None:
    for patch in patches_of(Draft()):
        add(patch)


# --- constants ---------------------------------------------------------------------------------


def _fold_originals(module: Any) -> None:
    """Makes torch.compile call torch's own functions while tracing, if it is imported during a conversion.

    Otherwise it would find wrappers instead.
    """
    update = of_later(module.__name__, "constant_fold_functions.update")
    if update is not None:
        update(dict.fromkeys(AUTOCAST_STATE))


def _know_functions(module: Any) -> None:
    """Makes torch.compile recognize torch's own tensor methods while wrappers have their names.

    hmpx uses them for casts in traced code, and `torch.set_autocast_enabled` for blocks without casts.
    """
    if not TRACES_AUTOCAST_STATES:
        trace_autocast_states(module)
    own = {m for m in vars(Tensor.__mro__[1]).values() if isinstance(m, types.MethodDescriptorType)}
    _replace_once(
        module,
        "get_tensor_method",
        lambda original: functools.cache(lambda: frozenset(original() | own)),
    )


#: An attribute of permanent replacements in torch.compile's modules.
_MARK: Final = "__hmpx_compiled__"


def _replace_once(module: Any, path: str, make: Callable[[Any], Function]) -> None:
    """Replaces a function in a module of torch.compile's by ``make(original)``, once, if it is there."""
    original = of_later(module.__name__, path)
    if original is not None and not hasattr(original, _MARK):
        names, _, name = path.rpartition(".")
        owner = of_later(module.__name__, names) if names else module
        function = functools.wraps(original)(make(original))
        vars(function)[_MARK] = True
        setattr(owner, name, function)


# --- guards ------------------------------------------------------------------------------------

_are_guarded = False  # whether graphs are used only in the conversion in which they were traced


def _guard_graphs(module: Any) -> None:
    """Makes graphs run only in the conversion, or outside of any, in which they were traced."""
    global _are_guarded
    source = of_later(Later.DYNAMO_SOURCES, "GlobalStateSource")
    if source is None or of_later(module.__name__, "OutputGraph.init_ambient_guards") is None:
        return

    def guarding(begin: Callable[[Any], None]) -> Callable[[Any], None]:
        def begin_guarded(self: Any) -> None:
            begin(self)
            self.guards.add(source().make_guard(_conversion_guard))

        return begin_guarded

    _replace_once(module, "OutputGraph.init_ambient_guards", guarding)
    _are_guarded = True


def _conversion_guard(builder: Any, guard: Any) -> None:
    decides = torch_state.decided()
    add_guard(
        builder,
        guard,
        lambda scope: torch_state.decided() is decides,
        "hmpx: the conversion in force",
    )


# --- kernels -----------------------------------------------------------------------------------


def _unwrap_kernels(module: Any) -> None:
    """Makes compiled code call torch's own kernels where inductor records ``torch.mm``.

    These calls are below the dispatcher: a wrapper would cost time, and would add casts to code
    traced inside `disable_casts`.
    """
    called = of_later(module.__name__, "extern_kernels")
    if called is not None:
        kernels = vars(called)
        kernels |= {name: unwrapped(kernel) for name, kernel in kernels.items()}

    def unwrapping(initialize: Callable[..., None]) -> Callable[..., None]:
        return lambda self, kernel, *args, **kwargs: initialize(
            self, unwrapped(kernel), *args, **kwargs
        )

    _replace_once(module, "ExternKernelChoice.__init__", unwrapping)


def _list_originals(module: Any) -> None:
    """Makes inductor's table of lowerings name torch's own functions, not wrappers.

    It names wrappers if it is created during a conversion.
    """
    table = of_later(module.__name__, "lowerings")
    for function in [] if table is None else list(table):
        if is_wrapper(function):
            table[function.__wrapped__] = table.pop(function)


def _lower_originals(name: str) -> Callable[[Any], None]:
    """Returns a function that makes a class of inductor's look up torch's own function, not its wrapper.

    inductor puts functions that it finds in torch, such as ``torch.full``, into its own graphs.
    """

    def unwrapping(call: Function) -> Function:
        return lambda self, target, args, kwargs: call(self, unwrapped(target), args, kwargs)

    return lambda module: _replace_once(module, f"{name}.call_function", unwrapping)


def unwrapped(function: Any) -> Any:
    """Returns torch's function for a wrapper, and any other value unchanged."""
    return function.__wrapped__ if is_wrapper(function) else function


def is_wrapper(function: Any) -> bool:
    """Whether ``function`` is a wrapper of this conversion or an earlier one."""
    marks = getattr(function, "__dict__", {})
    return "__hmpx_site__" in marks or "__hmpx_filled__" in marks


# --- caches ------------------------------------------------------------------------------------

_is_cached = True  # whether cache keys determine the content of graphs

#: Returns the current conversion's part of cache keys. None without a conversion: keys are torch's own.
_tag: Callable[[], str] | None = None


def _tag_keys(module: Any) -> None:
    """Adds `_tag` and the places of a graph's ops to the cache keys.

    torch has a setting for such tags, but each thread has its own value of it.
    """
    if of_later(module.__name__, "FxGraphHashDetails") is None:
        disable_inductor_caches()  # indistinguishable entries must not be cached

    def tagging(initialize: Callable[..., None]) -> Callable[..., None]:
        def initialize_tagged(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self, *args, **kwargs)
            if _tag is not None:
                unique = "" if _is_cached else uuid.uuid4().hex
                self.hmpx_tag = (_tag(), torch_state.traced_places(), unique)

        return initialize_tagged

    _replace_once(module, "FxGraphHashDetails.__init__", tagging)


def _digest(decides: object) -> str:
    """Returns a digest that equal conversions share across processes; unique if it depends on functions."""
    return hashlib.sha256(f"{_sources()} {_told(decides)}".encode()).hexdigest()[:16]


@functools.cache
def _sources() -> str:
    """Returns a digest of hmpx's code: graphs of other versions may round differently."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _told(value: Any) -> str:
    """Returns equal text for equal data, and unique text for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = [getattr(value, f.name) for f in dataclasses.fields(value) if f.compare]
        return f"{type(value).__qualname__}{_told(compared)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted([f'{_told(k)}: {_told(v)}' for k, v in value.items()]))}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_told, value)))}}}"
    is_data = value is None or isinstance(value, (bool, int, float, str, torch.dtype, enum.Enum))
    return repr(value) if is_data else uuid.uuid4().hex


# --- settings ----------------------------------------------------------------------------------


def _keeping_casts(draft: Draft) -> Iterator[Patch]:
    """Yields the patch that makes inductor round where eager mode does, in all threads.

    Otherwise it elides round-trip casts; the bit arithmetic of `graph_rounding` that avoids this is slower.
    """
    entry: Any = of_later(Later.INDUCTOR_CONFIG, "_config.emulate_precision_casts")
    keeping = Patch(entry, "default", True)
    if entry is not None and draft.read(keeping) is False:  # a thread's own value takes precedence
        yield keeping


_COMPILE: Final = "aot_stage2_autograd"

_aten, _prims = torch.ops.aten, torch.ops.prims

_CASTS: Final = frozenset({_aten._to_copy.default, _prims.convert_element_type.default})
_VIEWS: Final = frozenset({
    _aten.detach.default,
    _aten.permute.default,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
})  # fmt: skip


def partition_patches(draft: Draft, *, is_choosy: bool) -> Iterator[Patch]:
    """Yields the patch that makes compiled graphs keep parameters instead of their casts."""
    if of_later(Later.AOT_GRAPHS, _COMPILE) is None:
        return

    def mark_first(compile_graph: Function, state: Any, captured: Any, *others: Any) -> Any:
        of_subclasses = getattr(captured, "maybe_subclass_meta", None)
        facts = [getattr(each, "fw_metadata", None) for each in (of_subclasses, state)]
        if (written := _written_inputs(facts)) is None:
            return compile_graph(state, captured, *others)
        marked = functools.partial(_partition, written, is_choosy)
        if others:
            return compile_graph(state, captured, functools.partial(marked, others[0]), *others[1:])
        config, partition_fn = state.aot_config, state.aot_config.partition_fn  # before torch 2.13
        config.partition_fn = functools.partial(marked, partition_fn)
        try:
            return compile_graph(state, captured)
        finally:
            config.partition_fn = partition_fn

    yield draft.around(sys.modules[Later.AOT_GRAPHS], _COMPILE, mark_first)


def _partition(
    written: set[int],
    is_choosy: bool,
    partition_fn: Function,
    graph: fx.GraphModule,
    *more: Any,
    static_lifetime_input_indices: list[int] | None = None,
    **settings: Any,
) -> Any:
    """Calls torch's partitioner once casts are marked."""
    indices = static_lifetime_input_indices or []
    unwritten = [index for index in indices if index not in written]
    mark_casts(graph.graph, unwritten, is_choosy=is_choosy)
    return partition_fn(graph, *more, static_lifetime_input_indices=indices, **settings)


def _written_inputs(facts: Iterable[Any]) -> set[int] | None:
    """Returns the indices of the inputs that a graph writes to; None if unknown.

    A backward that cast one of these again would read the new values.
    """
    for each in facts:
        infos, tokens = getattr(each, "input_info", None), getattr(each, "tokens", None)
        if infos is not None and tokens is not None:  # tokens are the first inputs
            writes = [info.mutates_data or info.mutates_metadata for info in infos]
            return {len(tokens) + index for index, is_written in enumerate(writes) if is_written}
    return None


def mark_casts(graph: fx.Graph, indices: list[int], *, is_choosy: bool) -> None:
    """Marks casts of matrices that stay alive for recomputation in the backward."""
    inputs = graph.find_nodes(op="placeholder")
    alive = {inputs[index] for index in indices if index < len(inputs)}
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or node.args[0] not in alive:
            continue
        if node.target in _VIEWS:
            alive.add(node)
        elif node.target in _CASTS and _is_marked(node, is_choosy=is_choosy):
            alive.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_marked(cast: fx.Node, *, is_choosy: bool) -> bool:
    made, source = cast.meta["val"], cast.all_input_nodes[0].meta["val"]
    if source.dtype in LOW_DTYPES:
        return True  # a marked cast, in float32 again
    if made.dtype not in LOW_DTYPES or made.dim() < 2:  # only matrices
        return False
    return not is_choosy or any(pays(made, other) for other in _beside(cast))


def _beside(node: fx.Node) -> Iterator[Tensor]:
    """Yields the largest other input, of fixed size, of each op that reads ``node`` or a view of it."""
    for user in node.users:
        if user.target in _VIEWS:
            yield from _beside(user)
            continue
        values = [each.meta.get("val") for each in user.all_input_nodes if each is not node]
        sizes = [(each.numel(), each) for each in values if isinstance(each, Tensor)]
        if sizes and all(isinstance(size, int) for size, _ in sizes):
            yield max(sizes, key=lambda pair: pair[0])[1]
