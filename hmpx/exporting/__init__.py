"""`export`: writes a converted model as an ONNX file in which every node has its type; reads and checks such files."""

from __future__ import annotations

from .exporting import export, verify
from .onnx_file import OnnxFile, OnnxNode, read_onnx

__all__ = [
    "OnnxFile",
    "OnnxNode",
    "export",
    "read_onnx",
    "verify",
]
