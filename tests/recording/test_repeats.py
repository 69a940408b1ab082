"""Repeated blocks in pictures of `hmpx.draw`, and what nodes save for the backward."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx import OptionError


@pytest.fixture(autouse=True)
def _converted() -> Iterator[None]:
    with hmpx.convert(lists="lean", device_types={"cpu"}, legalize="never"):
        yield


class Block(nn.Module):
    """A block with a residual, from ``width`` features to as many or others."""

    def __init__(self, width: int, out: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, out or width)
        self.norm = nn.LayerNorm(out or width)
        self.is_residual = out is None

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.second(self.first(x).relu()))
        return x + y if self.is_residual else y


class Net(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.ones(2, 8)


def _folds(dot: str) -> list[str]:
    """Returns what the nodes for repeated blocks say."""
    return re.findall(r'label="([^"]*like[^"]*)"', dot)


def _model(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Net(*blocks), nn.Linear(8, 8))


def test_blocks_like_the_one_before_are_one_node() -> None:
    """Whose neighbours are the block that is shown, and what comes after."""
    drawing = hmpx.draw(_model(*[Block(8) for _ in range(5)]), X)
    (label,) = _folds(drawing.dot)
    assert label == "1.layers.1 to 1.layers.4\\nlike 1.layers.0\\n20 ops, 16 casts"
    assert drawing.dot.count('label="layer_norm') == 1
    assert re.search(r"n\d+ -> like0", drawing.dot)
    assert re.search(r"like0 -> n\d+", drawing.dot)
    assert "like0 -> like0" not in drawing.dot


def test_data_has_all_blocks() -> None:
    """Folding is the picture's; ``fold=False`` draws each."""
    model = _model(*[Block(8) for _ in range(5)])
    drawing, unfolded = hmpx.draw(model, X), hmpx.draw(model, X, fold=False)
    assert sum(node.label == "layer_norm" for node in drawing.nodes) == 5
    assert [n.label for n in drawing.nodes] == [n.label for n in unfolded.nodes]
    assert _folds(unfolded.dot) == []
    assert unfolded.dot.count('label="layer_norm') == 5
    assert dataclasses.replace(drawing, fold=False).dot == unfolded.dot
    with pytest.raises(OptionError, match="fold must be True or False"):
        hmpx.draw(model, X, fold="yes")  # type: ignore[arg-type]


def test_a_block_that_differs_is_drawn() -> None:
    """In its ops, or in what it casts."""
    odd = Block(8)
    odd.norm = nn.Softmax(-1)  # type: ignore[assignment]
    dot = hmpx.draw(_model(Block(8), Block(8), odd, Block(8), Block(8)), X).dot
    assert [each.split("\\n")[:2] for each in _folds(dot)] == [
        ["1.layers.1", "like 1.layers.0"],
        ["1.layers.4", "like 1.layers.3"],
    ]
    assert dot.count('label="softmax') == 1


def test_small_modules_are_drawn_each() -> None:
    """A picture of three layers says more than one of one."""
    assert _folds(hmpx.draw(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), X).dot) == []


def test_nodes_say_what_they_save_for_the_backward() -> None:
    """As data, and in the tooltip."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Softmax(-1))
    y = model(X)
    drawing = hmpx.draw(y, model=model)
    softmax = next(node for node in drawing.nodes if node.label == "softmax")
    assert [(each.dtype, each.shape, each.bytes) for each in softmax.saved] == [
        ("fp32", (2, 4), 32)
    ]
    assert "saves 32 B for the backward:\\n  fp32  2x4  32 B" in drawing.dot
    y.sum().backward()
    assert all(node.saved == () for node in hmpx.draw(y, model=model).nodes)
