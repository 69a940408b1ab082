"""Trains a small GPT and a small ResNet as FP8 and FP4 hardware would: in fp32, bf16, fp8, mxfp8 and nvfp4.

    python examples/fp8_recipes.py
    python examples/fp8_recipes.py --model gpt --steps 40 --draw losses.svg

Every recipe but fp32 is bfloat16 by hmpx's lists; in the last four the products with weights take their
inputs in a narrow format, forward and backward, and return bfloat16, as tensor cores do:

- fp8: e4m3 forward, e5m2 for gradients, one scale a tensor, from its largest magnitude.
- delayed: the same, but scaled by the largest magnitude of the last 16 steps.
- mxfp8: e4m3, blocks of 32 that share a power of two, along what each product sums over.
- nvfp4: e2m1, blocks of 16 that share an e4m3 scale, beside one a tensor.

A recipe is a line of a list: what an op's inputs are rounded to, its gradients, and what it returns.
Models and data are those of ``formats_train.py``. ``--draw`` needs matplotlib.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from formats_train import MODELS, losses

import hmpx

#: The ops that multiply with weights: linear layers, GPT-2's, and convolutions.
PRODUCTS = ("linear", "addmm", "conv2d")

#: Recipe -> what stands after each of these ops on its line of the list.
RECIPES = {
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn_tensor gradients=float8_e5m2_tensor output=bfloat16",
    "delayed": "float8_e4m3fn_delayed gradients=float8_e5m2_delayed output=bfloat16",
    "mxfp8": "mxfp8_e4m3 gradients=mxfp8_e4m3 output=bfloat16",
    "nvfp4": "nvfp4 gradients=nvfp4 output=bfloat16",
}


def converted(recipe: str) -> AbstractContextManager[object]:
    """Converts to a recipe; ``"fp32"`` is none."""
    if recipe == "fp32":
        return nullcontext()
    lines = [f"{op} {RECIPES[recipe]}" for op in PRODUCTS]
    return hmpx.convert(policy={"lists": "hmpx", "low": {"add": lines}})


def smoothed(values: list[float], count: int) -> list[float]:
    """Returns the means of each ``count`` values in a row."""
    return [sum(values[i : i + count]) / count for i in range(len(values) - count + 1)]


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draws the losses: one panel a model, one line a recipe."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(found), figsize=(5 * len(found), 3.8), layout="constrained", squeeze=False
    )
    for axes, (model, runs) in zip(panels[0], found.items(), strict=True):
        for (recipe, values), style in zip(
            runs.items(), ("-", "-", "--", "--", "-.", ":"), strict=True
        ):
            count = max(len(values) // 10, 1)
            axes.plot(range(count, len(values) + 1), smoothed(values, count), style, label=recipe)
        axes.set(title=model, xlabel="step", ylabel="loss")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Trains each model in each recipe, and prints a table of the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--steps", type=int, default=10**6, help="stop before the epoch ends")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="an .svg or .png")
    options = parser.parse_args()
    torch.set_num_threads(1)  # at this size a second thread costs more than it gains
    found: dict[str, dict[str, list[float]]] = {}
    print("model   recipe   steps  first loss  last losses  to fp32")
    for model in options.model:
        runs = found[model] = {}
        for recipe in ("fp32", *RECIPES):
            with converted(recipe):
                values = runs[recipe] = losses(model, options.steps, loss_scale=1.0)
            count = max(len(values) // 10, 1)
            last = sum(values[-count:]) / count
            gap = last / (sum(runs["fp32"][-count:]) / count) - 1
            print(
                f"{model:6}  {recipe:7}  {len(values):5}  {values[0]:10.4f}  {last:11.4f}  {gap:+7.2%}"
            )
    if options.draw is not None:
        draw(found, options.draw)
        print(f"drawn: {options.draw}")


if __name__ == "__main__":
    main()
