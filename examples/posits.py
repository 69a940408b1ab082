"""Whole networks in posit arithmetic that hmpx doesn't know: a library computes each sum and product.

    python examples/posits.py
    python examples/posits.py --library integers --epochs 1

`hmpx.formats.register_op` has functions of integer codes compute ``add``, ``mul``, ``linear`` and
``conv2d`` wherever these run in 16-bit posits: each product is rounded to a posit, and each sum, as
in hardware without a wider accumulator. The arithmetic is SoftPosit's (``pip install softposit``) or,
where that is not installed, the one below on integers. A perceptron is trained so and reaches the
accuracy of fp32, less a percent at most; a residual network trained in fp32 is run so.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import hmpx
from hmpx import formats

BATCH = 32
MARGIN = 0.01  # of accuracy, that posits may lose
POSIT = formats.Posit("posit16", bits=16, es=1)


def five_lines() -> Tensor:
    """Registers a format and runs a model in it."""
    posit = formats.Posit("posit16", bits=16, es=1)
    formats.register(posit)
    model = nn.Linear(4, 2)
    with hmpx.convert(low_precision_type="posit16"):
        return model(torch.ones(1, 4))  # fp32, and each value is a posit


# --- posits of 16 bits with an exponent bit, as integers ---------------------------------------

NAR = 0x8000  # not a real: the posits' NaN

Codes = Tensor  # int64, 0 to 0xFFFF
Arithmetic = Callable[[Codes, Codes], Codes]


def unpacked(codes: Codes) -> tuple[Tensor, Tensor]:
    """Returns (significand, exponent) of posits; their value is ``significand * 2**exponent``."""
    negative = codes >= NAR
    bits = torch.where(negative, -codes, codes) & 0x7FFF
    significand, exponent = bits * 0, bits * 0
    for run in range(1, 16):  # the regime: a run of equal bits, ended by the other one or the end
        for ones in (False, True):
            start, width = 15 - run, max(14 - run, 0)
            pattern = ((1 << run) - 1) * ones
            ends = start == 0 or (((bits >> (start - 1)) & 1) != ones)
            here = ((bits >> start) == pattern) & ends
            rest = (bits & ((1 << width) - 1)) << (13 - width)  # exponent bit, 12 of fraction
            regime = run - 1 if ones else -run
            significand = torch.where(here, (1 << 12) | (rest & 0xFFF), significand)
            exponent = torch.where(here, 2 * regime + (rest >> 12) - 12, exponent)
    significand = torch.where(bits == 0, 0, significand)
    return torch.where(negative, -significand, significand), exponent


@functools.cache
def table() -> tuple[Tensor, Tensor]:
    """Returns `unpacked` of all codes."""
    return unpacked(torch.arange(1 << 16))


def packed(significand: Tensor, exponent: Tensor) -> Codes:
    """Returns the posits nearest to ``significand * 2**exponent``; ties to even, never to zero."""
    magnitude = significand.abs()
    length = torch.frexp(magnitude.double())[1].long()  # exact: it has 53 bits at most
    scale = (exponent + length - 1).clamp(-28, 28)
    fraction = (magnitude << (53 - length)) & ((1 << 52) - 1)
    fraction = (fraction >> 12) | ((fraction & 0xFFF) != 0)  # 40 bits, the last one sticky
    regime = scale >> 1
    run = torch.where(regime >= 0, regime + 1, -regime)
    head = torch.where(regime >= 0, (2 << run) - 2, 1)  # run + 1 bits
    body = (((head << 1) | (scale & 1)) << 40) | fraction
    dropped = run + 27  # of run + 42 bits 15 are kept
    kept, rest, half = body >> dropped, body & ((1 << dropped) - 1), 1 << (dropped - 1)
    kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    kept = torch.where(magnitude == 0, 0, kept.clamp(1, 0x7FFF))
    return torch.where(significand < 0, -kept, kept) & 0xFFFF


def add_integers(a: Codes, b: Codes) -> Codes:
    """Returns a + b, rounded once."""
    significands, exponents = table()
    (m, n), (i, j) = (significands[a], significands[b]), (exponents[a], exponents[b])
    high = torch.maximum(torch.where(m == 0, j, i), torch.where(n == 0, i, j))
    total = aligned(m, high - i) + aligned(n, high - j)
    return torch.where((a == NAR) | (b == NAR), NAR, packed(total, high - 36))


def aligned(significand: Tensor, distance: Tensor) -> Tensor:
    """Returns ``significand * 2**(36 - distance)``; what is shifted out leaves a sticky bit."""
    wide = significand.abs() << 36
    distance = distance.clamp(0, 62)
    shifted = wide >> distance
    shifted |= (shifted << distance) != wide
    return torch.where(significand < 0, -shifted, shifted)


def mul_integers(a: Codes, b: Codes) -> Codes:
    """Returns a * b, rounded once."""
    significands, exponents = table()
    product = packed(significands[a] * significands[b], exponents[a] + exponents[b])
    return torch.where((a == NAR) | (b == NAR), NAR, product)


# --- the same by SoftPosit ---------------------------------------------------------------------


def by_softposit(name: str) -> Arithmetic:
    """Returns SoftPosit's function of two scalars, ``"p16_add"``, as one of tensors."""
    import softposit

    function = getattr(softposit, name)

    @functools.cache
    def boxed(code: int) -> Any:
        return softposit.posit16(bits=code).v

    def compute(a: Codes, b: Codes) -> Codes:
        a, b = torch.broadcast_tensors(a, b)
        pairs, places = torch.unique((a << 16) | b, return_inverse=True)
        found = [function(boxed(pair >> 16), boxed(pair & 0xFFFF)).v for pair in pairs.tolist()]
        return torch.tensor(found, dtype=torch.int64)[places]

    return compute


def arithmetic(library: str) -> tuple[Arithmetic, Arithmetic]:
    """Returns (add, mul)."""
    if library == "softposit":
        return by_softposit("p16_add"), by_softposit("p16_mul")
    return add_integers, mul_integers


# --- ops -----------------------------------------------------------------------------------------


def register(add: Arithmetic, mul: Arithmetic) -> None:
    """Has these two compute all that the networks below compute but comparisons."""

    def products(x: Codes, weight: Codes) -> Codes:
        """x: [..., i], weight: [o, i] -> [..., o]; the sum is a tree."""
        terms = mul(x.unsqueeze(-2), weight)
        while terms.shape[-1] > 1:
            if terms.shape[-1] % 2:
                terms = F.pad(terms, (0, 1))  # code 0 is zero
            terms = add(terms[..., ::2], terms[..., 1::2])
        return terms.squeeze(-1)

    def linear(x: Codes, weight: Codes, bias: Codes) -> Codes:
        return add(products(x, weight), bias)

    def conv2d(
        x: Codes, weight: Codes, bias: Codes, stride: Any, padding: tuple[int, int], *rest: Any
    ) -> Codes:
        rows, columns = padding
        x = F.pad(x, (columns, columns, rows, rows))  # x: [b, i, h, w]
        patches = x.unfold(2, weight.shape[2], 1).unfold(3, weight.shape[3], 1)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [b, h, w, i * kernel]
        return linear(patches, weight.flatten(1), bias).permute(0, 3, 1, 2)

    for op, function in {"add": add, "mul": mul, "linear": linear, "conv2d": conv2d}.items():
        formats.register_op(formats.create_lower_func(on_int64(function)), op, POSIT)


def on_int64(function: Callable[..., Codes]) -> Callable[..., Tensor]:
    """Returns ``function`` of codes in 16 bits, which torch can neither shift nor add."""

    def compute(*args: Any) -> Tensor:
        return function(
            *(value.long() if isinstance(value, Tensor) else value for value in args)
        ).to(torch.uint16)

    return compute


# --- networks ------------------------------------------------------------------------------------


class Perceptron(nn.Sequential):
    """Two linear layers: [b, 1, 8, 8] -> logits [b, 10]."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


class ResNet(nn.Module):
    """Two residual blocks with a learnt scale in place of a norm: [b, 1, 8, 8] -> [b, 10]."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.scales = nn.ParameterList(torch.full((width, 1, 1), 0.5) for _ in range(2))
        self.head = nn.Linear(width * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.stem(images)), 2)  # [b, width, 4, 4]
        for block, scale in zip(self.blocks, self.scales, strict=True):
            hidden = hidden + F.relu(block(hidden)) * scale
        return self.head(hidden.flatten(1))


def digits() -> tuple[Tensor, Tensor]:
    """Returns handwritten digits, shuffled, and which they are."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    return images[order], torch.tensor(found.target)[order]


def train(build: Callable[[], nn.Module], images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Returns a network, always from the same weights and batches."""
    torch.manual_seed(0)
    network = build()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            loss = F.cross_entropy(network(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images that ``network`` knows."""
    return (network(images).argmax(1) == labels).float().mean().item()


def shows_posits(values: Tensor) -> str:
    """Says whether all ``values`` are posits."""
    is_posit = torch.equal(values, formats.quantize(values, POSIT))
    return f"{values.dtype}, {'all' if is_posit else 'NOT all'} posits"


def main() -> None:
    """Trains and runs both networks, in fp32 and in posits."""
    has_softposit = importlib.util.find_spec("softposit") is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--library",
        choices=("softposit", "integers"),
        default="softposit" if has_softposit else "integers",
    )
    parser.add_argument("--epochs", type=int, default=4, help="of the perceptron")
    parser.add_argument("--images", type=int, default=100, help="that the residual network sees")
    options = parser.parse_args()
    torch.set_num_threads(1)  # at this size a second thread costs more than it gains
    print(f"five lines: {shows_posits(five_lines())}")
    register(*arithmetic(options.library))
    images, labels = digits()
    seen, rest = slice(0, 1437), slice(1437, None)  # four fifths
    low = ["add", "mul", "linear", "conv2d", "relu"]
    policy = hmpx.Policy.from_ops(low=low, low_precision_type=POSIT)

    network = train(Perceptron, images[seen], labels[seen], options.epochs)
    fp32 = accuracy(network, images[rest], labels[rest])
    with hmpx.convert(policy=policy):
        network = train(Perceptron, images[seen], labels[seen], options.epochs)
        found = accuracy(network, images[rest], labels[rest])
    print(f"perceptron, trained and tested in fp32: {fp32:.1%}")
    print(f"perceptron, trained and tested in posits by {options.library}: {found:.1%}")
    verdict = "within" if found >= fp32 - MARGIN else "NOT within"
    print(f"  {verdict} {MARGIN:.0%} of fp32")

    network = train(ResNet, images[seen], labels[seen], 8)
    images, labels = images[rest][: options.images], labels[rest][: options.images]
    print(f"residual network in fp32: {accuracy(network, images, labels):.1%}")
    with hmpx.convert(policy=policy):
        print(f"residual network in posits: {accuracy(network, images, labels):.1%}")
        print(f"  its logits: {shows_posits(network(images[:1]))}")


if __name__ == "__main__":
    main()
