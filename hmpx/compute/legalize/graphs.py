"""Whether a call becomes part of a graph or of an exported artefact."""

from __future__ import annotations

import sys

import torch

from ...torch_internals import is_graph_made, is_jit_tracing, is_planned


def is_traced() -> bool:
    """Whether the call becomes part of a graph, traced by Dynamo or by its back ends."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return is_graph_made() and not is_planned()


def is_exported() -> bool:
    """Whether the call becomes part of an artefact, which may run on any hardware."""
    if torch.compiler.is_exporting() or is_jit_tracing():
        return True
    return not torch.compiler.is_dynamo_compiling() and is_onnx_made()


def is_onnx_made() -> bool:
    """Whether the call becomes part of an ONNX file."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


# As `torch.compiler.assume_constant_result`, which imports Dynamo: there torch says that it isn't.
vars(is_onnx_made)["_dynamo_marked_constant"] = True
