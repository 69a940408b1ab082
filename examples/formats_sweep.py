"""Accuracy against bits: one classifier in every number format of a sweep.

    python examples/formats_sweep.py
    python examples/formats_sweep.py --train --draw accuracy.svg

Trains a perceptron of two layers on scikit-learn's handwritten digits in fp32, then runs it, weights
and activations alike, in floats of each exponent and mantissa width, in posits, and in blocks that
share a scale (MX). None of these formats need be registered: each is made on the spot. ``--train``
also trains in each format, forward and backward, from the same weights. ``--draw`` needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import hmpx
from hmpx.formats import Block, Float, Posit

Data = tuple[Tensor, Tensor]  # images: [rows, 64], digits: [rows]
EPOCHS, BATCH = 15, 64


def families(widths: range) -> dict[str, list[Float | Posit | Block]]:
    """Returns what to draw as one line each: name -> formats of these bits, narrow to wide."""
    found: dict[str, list[Float | Posit | Block]] = {}
    for e in range(2, 6):
        found[f"e{e}mY"] = [
            Float(f"e{e}m{bits - 1 - e}", e, bits - 1 - e, kind="finite")
            for bits in widths
            if bits >= e + 2
        ]
    for es in range(3):
        found[f"posit, es={es}"] = [
            Posit(f"posit{bits}_{es}", bits, es) for bits in widths if bits > es + 2
        ]
    elements = ((2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 3))
    found["MX"] = [
        Block(f"mx_e{e}m{m}", Float(f"e{e}m{m}", e, m, kind="finite"))
        for e, m in elements
        if e + m + 1 in widths
    ]
    return found


def digits() -> tuple[Data, Data]:
    """Returns four fifths of the digits to train on, and the rest to test."""
    found = load_digits()
    images = torch.tensor(found.data / 16, dtype=torch.float32)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (images[train], labels[train]), (images[test], labels[test])


def trained(data: Data, epochs: int) -> nn.Module:
    """Returns a classifier, always from the same weights and batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, labels = data
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Returns the share of images that ``model`` knows."""
    images, labels = data
    return (model(images).argmax(1) == labels).float().mean().item()


def draw(rows: dict[str, list[tuple[float, float]]], fp32: float, path: Path) -> None:
    """Draws accuracy against bits, a line for each family."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.axhline(100 * fp32, color="gray", linewidth=1, linestyle=":", label="fp32")
    styles = zip("osv^DPX*", ("-",) * 4 + ("--",) * 3 + ("-.",), strict=True)
    for (family, points), (marker, line) in zip(rows.items(), styles, strict=True):
        bits, accuracies = zip(*points, strict=True)
        axes.plot(bits, [100 * a for a in accuracies], marker=marker, linestyle=line, label=family)
    axes.set(xlabel="bits a value", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Prints a row for each format, then draws them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, nargs=2, default=(4, 10), metavar=("LEAST", "MOST"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--train", action="store_true", help="train in each format, too")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="an .svg or .png")
    options = parser.parse_args()
    torch.set_num_threads(1)  # at this size a second thread costs more than it gains
    train, test = digits()
    model = trained(train, options.epochs)
    fp32 = accuracy(model, test)
    print(f"fp32: {fp32:.1%} of {len(test[1])} test images")
    print(
        "format       bits   largest  epsilon  fp32's weights" + "  trained in it" * options.train
    )
    drawn: dict[str, list[tuple[float, float]]] = {}
    for family, members in families(range(options.bits[0], options.bits[1] + 1)).items():
        for format in members:
            with hmpx.convert(low_precision_type=format, round_gradients=True):
                found = [accuracy(model, test)]
                if options.train:
                    found.append(accuracy(trained(train, options.epochs), test))
            drawn.setdefault(family, []).append((format.bits, found[-1]))
            shown = "".join(f"{share:16.1%}" for share in found)
            print(
                f"{format.name:10}  {format.bits:5}  {format.max:8.3g} {format.epsilon:8.3g}{shown}"
            )
    if options.draw is not None:
        draw(drawn, fp32, options.draw)
        print(f"drawn: {options.draw}")


if __name__ == "__main__":
    main()
