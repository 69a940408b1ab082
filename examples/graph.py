"""Draws the autograd graph of a loss before and after convert, with the casts highlighted.

    python examples/graph.py --out pictures

A cast that autograd will run backwards is a ``ToCopyBackward0`` node. The example counts them, says
what each one casts and for which op, and writes two pictures: ``graph_fp32.svg`` and
``graph_hmpx.svg``. Without graphviz's program ``dot`` it writes the ``.dot`` sources instead.

It switches hmpx's compiled nodes off: with them the casts of a linear layer are inside its node.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphviz
import torch
import torchviz
from torch import Tensor, nn

import hmpx

CAST = "ToCopyBackward0"


def model_and_loss() -> tuple[nn.Module, Tensor]:
    """Returns a small classifier and its loss on random data: under hmpx, with casts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    x, target = torch.randn(5, 8), torch.randint(4, (5,))
    return model, nn.functional.cross_entropy(model(x), target)


def nodes(root: Any) -> Iterator[Any]:
    """Yields every node of the autograd graph under ``root``, a ``grad_fn``, once."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def casts(model: nn.Module, loss: Tensor) -> list[str]:
    """Returns ``"0.weight -> TBackward0"`` for every cast: what is cast, and the op it is for."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for node in nodes(loss.grad_fn):
        for following, _ in node.next_functions:
            if following is not None and following.name() == CAST:
                source = following.next_functions[0][0]
                is_leaf = hasattr(source, "variable")
                name = names[id(source.variable)] if is_leaf else f"output of {source.name()}"
                found.append(f"{name} -> {node.name()}")
    return sorted(found)


def draw(model: nn.Module, loss: Tensor) -> tuple[graphviz.Digraph, int]:
    """Returns the picture of the graph, casts in orange, and how many there are."""
    picture = torchviz.make_dot(loss, params=dict(model.named_parameters()))
    plain, orange = f"[label={CAST}]", f"[label={CAST} fillcolor=orange]"
    count = sum(plain in line for line in picture.body)
    picture.body = [line.replace(plain, orange) for line in picture.body]
    return picture, count


def save(picture: graphviz.Digraph, path: Path) -> str:
    """Writes ``picture`` beside ``path`` in the form that this machine can; returns a remark."""
    source = path.with_suffix(".dot")
    picture.save(source)
    if shutil.which("dot") is None:
        return f"{source}  (for a picture, install graphviz, then: dot -Tsvg -O {source})"
    picture.render(source, outfile=path, cleanup=True)
    return str(path)


def main() -> None:
    """Draws both graphs and prints what was cast."""
    os.environ["HMPX_NODES"] = "off"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="directory for the pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    picture, count = draw(*model_and_loss())
    print(f"fp32: {count} casts   {save(picture, out / 'graph_fp32.svg')}")
    with hmpx.convert(device_types={"cpu"}):
        model, loss = model_and_loss()
    picture, count = draw(model, loss)
    print(f"hmpx: {count} casts   {save(picture, out / 'graph_hmpx.svg')}")
    for cast, times in Counter(casts(model, loss)).items():
        print(f"  {cast}" + (f"  x{times}" if times > 1 else ""))


if __name__ == "__main__":
    main()
