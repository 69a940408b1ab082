"""Graphs as inductor gets them, for tests of what is looked up there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from hmpx.compute import ALL_NUMBERS

BF16: Final = torch.bfloat16

#: Inductor's setting that holds the pass.
SETTING: Final = "post_grad_custom_post_pass"

#: Every number, infinities and NaN among them, eight times.
NUMBERS: Final = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).repeat(8, 1)


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    """Returns the graph that inductor gets."""
    trace = make_fx(lambda *args: function(*args), select_decomp_table(), tracing_mode=mode)
    module: fx.GraphModule = trace(*inputs)
    return module


def operators(graph: fx.Graph) -> list[str]:
    """Returns the names of hmpx's operators that look up."""
    targets = [node.target for node in graph.nodes if "hmpx" in str(node.target)]
    return [str(target) for target in targets if target is not ALL_NUMBERS]
