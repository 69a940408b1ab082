"""`Drawing`: a graph as data, as DOT text, and as a picture where graphviz is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .. import arguments
from ..errors import OptionError, said_by, shown
from ..reports import write
from .dot import to_dot
from .graph import Edge, Node
from .repeats import folded

_INSTALL_PACKAGE: Final = "pip install 'hmpx[draw]'"
_INSTALL_PROGRAM: Final = (
    "apt install graphviz, brew install graphviz, or https://graphviz.org/download"
)

_TEXT: Final = (".dot", ".gv")
_PICTURES: Final = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Drawing:
    """The autograd graph of a result. Notebooks show it as a picture.

    Attributes:
        nodes: Ops, casts, parameters, from the inputs to the outputs.
        edges: The tensors that pass between them.
        left_out: How many nodes at least are not in ``nodes``, because of ``max_nodes``.
        classes: Qualified name of a module -> name of its class, where modules are known.
        formats: Names of the number formats among the types of nodes.
        fold: Whether pictures show of modules that are alike the first; nodes and edges have all.

    Example:
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> with hmpx.convert(device_types={"cpu"}, legalize="never"):
        ...     drawing = hmpx.draw(model, torch.ones(3, 4))
        >>> for node in drawing.nodes:
        ...     print(node.kind, node.label, node.dtype)
        parameter weight fp32
        cast fp32 -> bf16 bf16
        op linear bf16
        output output bf16
        >>> drawing.dot.startswith("digraph")
        True
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    left_out: int = 0
    classes: Mapping[str, str] = field(default_factory=dict)
    formats: frozenset[str] = frozenset()
    fold: bool = True

    @property
    def dot(self) -> str:
        """The graph in graphviz's language; making it needs nothing installed."""
        nodes: Iterable[Node] = self.nodes
        edges: Iterable[Edge] = self.edges
        if self.fold:
            nodes, edges = folded(nodes, edges, self.classes)
        return to_dot(nodes, edges, self.classes, set(self.formats))

    def svg(self) -> str:
        """Returns the picture as SVG.

        Raises:
            OptionError: The package graphviz or its program ``dot`` is missing, or fails.
        """
        return self._rendered("svg").decode("utf-8")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture (``.svg``, ``.png``, ``.pdf``) or its DOT text (``.dot``, ``.gv``).

        Args:
            path: The file; its suffix decides.

        Returns:
            The path.

        Raises:
            OptionError: The suffix is another one, the file can't be written, or graphviz is missing
                for a picture.
        """
        file = Path(arguments.path("path", path))
        suffix = file.suffix.lower()
        if suffix in _TEXT:
            content = self.dot.encode("utf-8")
        elif suffix in _PICTURES:
            content = self._rendered(suffix[1:])
        else:
            known = ", ".join((*_PICTURES, *_TEXT))
            raise OptionError(f"path must end in one of {known}, not {shown(str(file))}")
        write(content, file)
        return file

    def _repr_svg_(self) -> str | None:
        """Returns what notebooks show; None without graphviz."""
        try:
            return self.svg()
        except OptionError:
            return None

    def __repr__(self) -> str:
        counts = [sum(node.kind == kind for node in self.nodes) for kind in ("op", "cast")]
        leaves = sum(node.kind in ("parameter", "input") for node in self.nodes)
        more = f", {self.left_out:,} nodes left out" if self.left_out else ""
        return f"<hmpx.Drawing: {counts[0]} ops, {counts[1]} casts, {leaves} leaves{more}>"

    def _rendered(self, file_format: str) -> bytes:
        graphviz = _graphviz()
        try:
            found: bytes = graphviz.Source(self.dot).pipe(format=file_format)
        except graphviz.ExecutableNotFound as error:
            raise OptionError(
                f"pictures need graphviz's program dot: {_INSTALL_PROGRAM}; drawing.dot needs none"
            ) from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr or b"").decode("utf-8", "replace")
            raise OptionError(f"graphviz's program dot failed: {said or said_by(error)}") from error
        return found


def _graphviz() -> Any:
    try:
        return importlib.import_module("graphviz")
    except ImportError as error:
        raise OptionError(
            f"pictures need the Python package graphviz: {_INSTALL_PACKAGE}; drawing.dot needs none"
        ) from error
