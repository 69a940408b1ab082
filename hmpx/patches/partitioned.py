"""Makes compiled graphs keep parameters for the backward instead of their low-precision casts.

torch.compile's partitioner makes the forward keep the inputs of the backward's products. To cast a parameter
again instead, its casts are marked for recomputation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from ..compute import pays
from ..patching import Draft, Patch
from ..tensors import LOW_DTYPES
from ..torch_internals import Later, of_later

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

    def mark_first(
        compile_graph: Callable[..., Any], state: Any, captured: Any, *others: Any
    ) -> Any:
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
    partition_fn: Callable[..., Any],
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
