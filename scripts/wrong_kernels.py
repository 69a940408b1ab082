"""Finds low-precision kernels of torch with wrong numbers, and writes them to ``hmpx/compute/kernels.ini``.

    python scripts/wrong_kernels.py                      # print what this machine's torch computes wrong
    python scripts/wrong_kernels.py --write              # add it to the file
    python scripts/wrong_kernels.py --device cuda --cases 2000

Products, convolutions, attention and norms run on seeded shapes, strides and dtypes, forward and each gradient, in child
processes: some kernels write beyond their results, too. Beforehand memory is filled with large numbers and freed, so results that a kernel leaves unwritten show. Right is what
differs from float64 by no more than roundings explain: for each element a few units of the type times the same sum of
the terms' magnitudes, which float64 computes, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import missing_kernels

#: Rounding errors of an element are less than this many units of the type, of the sum of its terms' magnitudes.
UNITS = 4

#: A convolution's kernel is larger than its input, or than the output of a transposed one, in some dimension.
BEYOND = "beyond_input"

#: What memory holds before a kernel writes to it.
POISON = 1e20

#: Sizes of freed memory, in bytes, that later allocations get.
FREED = [1 << power for power in range(6, 19)]


@dataclass(frozen=True)
class Case:
    """A call of an op: what it computes, and its inputs in float64."""

    op: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    about: str
    flags: frozenset[str] = frozenset()  # conditions of ``kernels.ini`` that it fulfils
    names: tuple[str, ...] = ("input", "weight", "bias")


@dataclass
class Wrong:
    """The calls of an op whose result, or the gradient of one input, is wrong."""

    cases: int = 0
    wrong: list[Case] = field(default_factory=list)


# --- calls ---------------------------------------------------------------------------------------


def laid_out(draw: random.Random, tensor: Tensor) -> Tensor:
    """Returns the tensor's values in another layout."""
    layout = draw.choice(
        ["contiguous", "contiguous", "transposed", "offset", "strided", "channels"]
    )
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "offset":
        return torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape)
    if layout == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
    if layout == "channels" and tensor.dim() in {4, 5}:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return tensor.contiguous(memory_format=formats[tensor.dim()])
    return tensor


def numbers(draw: random.Random, *shape: int) -> Tensor:
    """Returns random numbers that bfloat16 and float16 hold, in some layout."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    drawn = torch.randn(shape, generator=generator).bfloat16().double()
    return laid_out(draw, drawn)


def convolutions(draw: random.Random) -> Case:
    """Returns a convolution, or a transposed one."""
    n = draw.choice([1, 2, 3, 3])
    groups = draw.choice([1, 1, 1, 2, 4])
    few = draw.choice([1, 2, 4, 8, 16])
    channels, made = few * groups, draw.choice([1, 2, 3, 8, 16]) * groups
    kernel = [draw.choice([1, 2, 3, 3, 5, 7]) for _ in range(n)]
    padding = [draw.randint(0, each // 2) for each in kernel]
    stride = [draw.choice([1, 1, 2, 3]) for _ in range(n)]
    dilation = [draw.choice([1, 1, 1, 2]) for _ in range(n)]
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, padding, strict=True)
    ]
    size = [draw.choice([m, m, draw.randint(m, m + 4), draw.randint(m, m + 9)]) for m in least]
    batch = draw.choice([1, 1, 2, 3])
    is_transposed = draw.random() < 0.25
    name = f"conv{'_transpose' if is_transposed else ''}{n}d"
    shape = (channels, made // groups) if is_transposed else (made, channels // groups)
    inputs = (
        numbers(draw, batch, channels, *size),
        numbers(draw, *shape, *kernel),
        numbers(draw, made),
    )
    reaches = zip(kernel, size, stride, padding, dilation, strict=True)
    flags = {
        BEYOND
        for k, n, s, p, d in reaches
        if (2 * p > s * (n - 1) if is_transposed else d * (k - 1) >= n)
    }
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    about = f"input {[batch, channels, *size]}, weight {[*shape, *kernel]}, {settings}"
    return Case(
        name, lambda *all: getattr(F, name)(*all, **settings), inputs, about, frozenset(flags)
    )


def products(draw: random.Random) -> Case:
    """Returns a product of matrices, with sums of few and of many terms."""
    op = draw.choice(["mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "addmv"])
    n, m = (draw.choice([1, 2, 3, 5, 8, 17, 33, 64]) for _ in range(2))
    k = draw.choice([1, 2, 3, 7, 8, 31, 64, 129, 515])
    batch = draw.choice([1, 2, 5])
    shapes = {
        "mm": [(n, k), (k, m)],
        "matmul": [(batch, n, k), (k, m)],
        "bmm": [(batch, n, k), (batch, k, m)],
        "linear": [(batch, n, k), (m, k), (m,)],
        "addmm": [(m,), (n, k), (k, m)],
        "baddbmm": [(batch, n, m), (batch, n, k), (batch, k, m)],
        "mv": [(n, k), (k,)],
        "dot": [(k,), (k,)],
        "addmv": [(n,), (n, k), (k,)],
    }[op]
    function = F.linear if op == "linear" else getattr(torch, op)
    names = {"addmm": ("bias", "input", "weight"), "baddbmm": ("bias", "input", "weight")}
    return Case(
        op, function, tuple(numbers(draw, *each) for each in shapes), str(shapes),
        names=names.get(op, ("input", "weight", "bias")),
    )  # fmt: skip


def attention(draw: random.Random) -> Case:
    """Returns an attention; its probabilities are bounded by those of its values."""
    heads, queries, keys = (draw.choice([1, 2, 3, 8, 17, 40]) for _ in range(3))
    width = draw.choice([1, 4, 8, 16, 33, 64])
    shapes = [(2, heads, queries, width), (2, heads, keys, width), (2, heads, keys, width)]
    return Case(
        "scaled_dot_product_attention", F.scaled_dot_product_attention,
        tuple(numbers(draw, *each) for each in shapes), str(shapes), names=("query", "key", "value"),
    )  # fmt: skip


def norms(draw: random.Random) -> Case:
    """Returns a norm of layers, groups, batches or instances."""
    op = draw.choice(["layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm"])
    batch, channels = draw.choice([2, 3, 5]), draw.choice([2, 4, 8, 16])
    size = [draw.choice([2, 3, 5, 9]) for _ in range(draw.choice([1, 2, 3]))]
    x = numbers(draw, batch, channels, *size)
    weight, bias = numbers(draw, channels), numbers(draw, channels)
    about = f"input {list(x.shape)}"
    if op in {"layer_norm", "rms_norm"}:
        weight, bias = numbers(draw, size[-1]), numbers(draw, size[-1])
        if op == "rms_norm":
            return Case(op, lambda x, w: F.rms_norm(x, w.shape, w), (x, weight), about)
        return Case(op, lambda x, w, b: F.layer_norm(x, w.shape, w, b), (x, weight, bias), about)
    if op == "group_norm":
        return Case(op, lambda x, w, b: F.group_norm(x, 2, w, b), (x, weight, bias), about)
    if op == "batch_norm":
        run = lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)  # noqa: E731
        return Case(op, run, (x, weight, bias), about)
    return Case(op, lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (x, weight, bias), about)


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "convolutions": convolutions,
    "products": products,
    "attention": attention,
    "norms": norms,
}

#: Kinds whose results are sums of products, of which float64 also computes the magnitudes.
SUMS = {"convolutions", "products"}

#: So many calls run in one child process, which may take so many seconds.
AT_ONCE, LIMIT_S = 100, 120

#: Terms whose magnitudes add up to less are taken for this, which underflow may lose.
LEAST_SIZE = 1e-3

#: The largest error of the others, in parts of the largest element, or of 1. Gradients of norms cancel, so only memory
#: that was not written shows.
OTHERS = 100


# --- what is computed ------------------------------------------------------------------------------


def poison(device: str) -> None:
    """Fills memory that the next allocations get."""
    made = [torch.full((size // 4,), POISON, device=device) for size in FREED for _ in range(3)]
    del made


def computed(case: Case, dtype: torch.dtype, device: str, gradient: Tensor | None) -> list[Tensor]:
    """Returns the result in ``dtype``, and the gradient of each input; ``gradient`` is that of the result."""
    inputs = []
    for each in case.inputs:
        low = torch.empty_strided(each.shape, each.stride(), dtype=dtype, device=device)
        inputs.append(low.copy_(each).requires_grad_())
    poison(device)
    result = case.run(*inputs)
    if gradient is None:
        gradient = torch.ones_like(result)
    given = gradient.to(device, dtype)
    poison(device)
    return [result.detach(), *torch.autograd.grad(result, inputs, given)]


def wrong_parts(kind: str, case: Case, dtype: torch.dtype, device: str, seed: int) -> list[str]:
    """Returns which parts are wrong: ``result``, or the names of inputs whose gradients are."""
    exact = computed(case, torch.float64, "cpu", None)
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(exact[0].shape, generator=generator).bfloat16().double()
    exact = computed(case, torch.float64, "cpu", gradient)
    found = computed(case, dtype, device, gradient)
    sizes = [each.abs().max().clamp(min=1).expand_as(each) for each in exact]
    bound = OTHERS
    if kind in SUMS:
        positive = Case(case.op, case.run, tuple(each.abs() for each in case.inputs), case.about)
        sizes, bound = (
            computed(positive, torch.float64, "cpu", gradient.abs()),
            UNITS * torch.finfo(dtype).eps,
        )
    wrong = []
    for part, low, right, size in zip(("result", *case.names), found, exact, sizes, strict=False):
        error = (low.cpu().double() - right).abs() / size.clamp(min=LEAST_SIZE)
        if low.numel() and error.nan_to_num(torch.inf).max() > bound:
            wrong.append(part)
    return wrong


def scan(
    kind: str, cases: int, dtype: torch.dtype, device: str, seed: int
) -> dict[tuple[str, str], Wrong]:
    """Returns op and part -> its wrong calls, of this many calls of a kind; a part may be ``crash``."""
    draw, found = random.Random(f"{kind} {seed}"), collections.defaultdict(Wrong)
    drawn = [KINDS[kind](draw) for _ in range(cases)]
    first = 0
    while first < cases:
        told = missing_kernels.in_child(
            functools.partial(_try, kind, drawn, first, dtype, device), LIMIT_S
        )
        last = first
        for last, wrong in told:
            case = drawn[last]
            if wrong is None:  # it has begun
                continue
            for part in ("result", *case.names[: len(case.inputs)]):
                found[case.op, part].cases += 1
                found[case.op, part].wrong += [case] * (part in wrong)
        if not told or told[-1][1] is None:
            found[drawn[last].op, "crash"].wrong.append(drawn[last])
        first = last + 1
    return found


def _try(  # noqa: PLR0917
    kind: str,
    drawn: list[Case],
    first: int,
    dtype: torch.dtype,
    device: str,
    tell: Callable[[Any], None],
) -> None:
    for number in range(first, min(first + AT_ONCE, len(drawn))):
        tell((number, None))
        with contextlib.suppress(RuntimeError):  # there is no kernel
            tell((number, wrong_parts(kind, drawn[number], dtype, device, number)))
            continue
        tell((number, ["refused"]))


def conditions(found: Mapping[tuple[str, str], Wrong]) -> dict[str, str]:
    """Returns op -> the condition that all its wrong calls fulfil; empty for none."""
    wrong: dict[str, list[Case]] = collections.defaultdict(list)
    for (op, _), each in found.items():
        wrong[op] += each.wrong
    return {
        op: min(frozenset.intersection(*(case.flags for case in cases)), default="")
        for op, cases in wrong.items()
        if cases
    }


def main() -> None:
    """Prints a table; with ``--write`` adds to the file what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="add what is found to kernels.ini")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", type=int, default=1000, help="calls of each kind")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [options.dtype] if options.dtype else ["bfloat16", "float16"]
    for name in names:
        for kind in [options.kind] if options.kind else KINDS:
            found = scan(kind, options.cases, getattr(torch, name), options.device, options.seed)
            for (op, part), each in sorted(found.items()):
                first = f"; {each.wrong[0].about}" if each.wrong else ""
                of = f"{len(each.wrong)} of {each.cases}"
                print(f"{options.device} {name} {op} {part}: {of} wrong{first}", flush=True)
            if options.write and name != "float32":
                sections, flags = missing_kernels.known()
                for op, condition in conditions(found).items():
                    sections[f"{options.device} {name} always"].add(op)
                    flags |= {op: condition} if condition else {}
                written = missing_kernels.text(sections, flags)
                missing_kernels.FILE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
