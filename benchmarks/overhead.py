"""What a patched op costs: microseconds a call on tiny tensors, and a model bound by overhead.

    python benchmarks/overhead.py [--save] [--repeats N]

Every figure of one table comes from one process, the candidates interleaved, the minimum over the
repeats taken; compare within a table only. No op is legalized, so that all compute the same.
Candidates:

raw            the unpatched op on inputs that have the right dtype already
autocast       the same inputs inside torch.autocast(bfloat16)
pass-through   hmpx, the same inputs: nothing to cast
disabled       hmpx inside disable_casts()
ruled          pass-through, with a rule that looks at shapes, whose verdict is known
naive          a wrapper as one would write it: cast every tensor in *args and **kwargs
casting        hmpx, fp32 inputs to an op in the bf16 list (bf16 inputs to one in the fp32 list)
by hand        the unpatched op on the same inputs, cast by hand
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

BF16, FP32 = torch.bfloat16, torch.float32


def naive(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Returns ``function`` with every floating tensor argument cast to ``dtype``."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        if isinstance(value, list | tuple):
            return type(value)(cast(v) for v in value)
        return value

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*[cast(a) for a in args], **{k: cast(v) for k, v in kwargs.items()})

    return wrapper


def op_cases() -> dict[str, tuple[Callable[[], Callable[..., Any]], torch.dtype, tuple[Any, ...]]]:
    """Returns op kind -> (how a user spells it, the dtype it runs in, fp32 arguments)."""
    x, w, b = torch.randn(2, 2), nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2))
    return {
        "linear": (lambda: F.linear, BF16, (x, w, b)),
        "matmul": (lambda: torch.matmul, BF16, (x, w)),
        "add": (lambda: torch.add, BF16, (x, x)),
        "cat": (lambda: torch.cat, BF16, ([x, x],)),
        "softmax": (lambda: torch.softmax, FP32, (x, -1)),
        "layer_norm": (lambda: torch.layer_norm, BF16, (x, (2,), w[0].detach(), b.detach())),
    }


def cast_all(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns ``args`` with every tensor in ``dtype``."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(dtype)
        return [cast(v) for v in value] if isinstance(value, list) else value

    return tuple(cast(a) for a in args)


def by_shape(call: hmpx.Call) -> hmpx.CastPolicy | None:
    """Leaves all but empty tensors to the lists."""
    return hmpx.DENY if call.shapes[0].numel() == 0 else None


def measure_op(kind: str, repeats: int) -> dict[str, float]:
    """Returns candidate -> microseconds of one op."""
    spelled, dtype, fp32_args = op_cases()[kind]
    original = spelled()
    other = FP32 if dtype is BF16 else BF16
    right, wrong = cast_all(fp32_args, dtype), cast_all(fp32_args, other)
    wrapped = naive(original, dtype)
    with hmpx.convert(legalize="never"):
        patched = spelled()  # "add" and "cat" are left to torch: no wrapper at all

        def by_hand() -> Any:
            return original(
                *[
                    a.to(dtype)
                    if isinstance(a, Tensor)
                    else [t.to(dtype) for t in a]
                    if isinstance(a, list)
                    else a
                    for a in wrong
                ]
            )

        def autocast() -> Any:
            return original(*right)

        times = timing.fastest(
            {
                "raw": lambda: original(*right),
                "pass-through": lambda: patched(*right),
                "naive": lambda: wrapped(*right),
                "by hand": by_hand,
                "casting": lambda: patched(*wrong),
            },
            200,
            repeats,
        )
        with hmpx.disable_casts():
            times |= timing.fastest(
                {"raw ": lambda: original(*right), "disabled": lambda: patched(*right)},
                200,
                repeats,
            )
        with torch.autocast("cpu", BF16):
            times |= timing.fastest({"raw  ": autocast}, 200, repeats)
        hmpx.register_rule(kind, by_shape)
        ruled = spelled()
        times |= timing.fastest(
            {"raw   ": lambda: original(*right), "ruled": lambda: ruled(*right)}, 200, repeats
        )
        hmpx.unregister_rule(kind)
    times["ruled"] += times["raw"] - times.pop("raw   ")
    times["disabled"] += times["raw"] - times.pop("raw ")
    times["autocast"] = times.pop("raw  ")
    return times


class CastLinear(nn.Linear):
    """The HMP lists' linear, cast by hand."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class CastLayerNorm(nn.LayerNorm):
    """The HMP lists' layer_norm, cast by hand: its weights stay fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input.bfloat16(), self.normalized_shape, self.weight, self.bias)


class TinyGPT(nn.Module):
    """Two blocks of width 16 on 4 tokens: the arithmetic takes no time, the calls all of it."""

    def __init__(self, casts: bool = False, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.Sequential(*[Block(width, heads, casts) for _ in range(2)])
        self.norm = (CastLayerNorm if casts else nn.LayerNorm)(width)
        self.head = (CastLinear if casts else nn.Linear)(width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class Block(nn.Module):
    """Attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int, casts: bool) -> None:
        super().__init__()
        linear = CastLinear if casts else nn.Linear
        norm = CastLayerNorm if casts else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.heads, self.casts = heads, casts

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, tokens, width]
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x))
        q, k, v = qkv.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        weights = torch.softmax(scores.float() if self.casts else scores, -1)
        mixed = (weights.bfloat16() if self.casts else weights) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def measure_model(repeats: int, *, training: bool) -> dict[str, float]:
    """Returns candidate -> microseconds of one forward, or one forward and backward."""
    torch.manual_seed(0)
    plain, hand = TinyGPT(), TinyGPT(casts=True)
    hand.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 32, (1, 4))

    def run(model: nn.Module) -> None:
        if training:
            F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        else:
            with torch.no_grad():
                model(tokens)

    def with_autocast() -> None:
        with torch.autocast("cpu", BF16):
            run(plain)

    def with_disabled_casts() -> None:
        with hmpx.disable_casts():
            run(plain)

    best = dict.fromkeys(("fp32", "by hand", "autocast", "hmpx", "hmpx disabled"), float("inf"))
    for _ in range(repeats):
        for name, candidate in (
            ("fp32", lambda: run(plain)),
            ("by hand", lambda: run(hand)),
            ("autocast", with_autocast),
        ):
            best[name] = min(best[name], timing.fastest({"": candidate}, 10, 3)[""])
        with hmpx.convert(legalize="never"):
            for name, candidate in (
                ("hmpx", lambda: run(plain)),
                ("hmpx disabled", with_disabled_casts),
            ):
                best[name] = min(best[name], timing.fastest({"": candidate}, 10, 3)[""])
    return best


def measure_convert() -> dict[str, float]:
    """Returns milliseconds of the first convert in a process, of later ones, of revert, and of equal blocks.

    "with transformers" also searches the modules of transformers for stored functions. Equal blocks are
    ``with hmpx.convert()`` from the second on. For comparison: a torch.autocast region.
    """
    times: dict[str, float] = {}
    for name in ("first convert", "later convert", "with transformers"):
        if name == "with transformers":
            importlib.import_module("transformers.models.llama.modeling_llama")
        start = time.perf_counter()
        hmpx.convert()
        times[name] = (time.perf_counter() - start) * 1e3
        start = time.perf_counter()
        hmpx.revert()
        times["revert"] = (time.perf_counter() - start) * 1e3

    def block() -> None:
        with hmpx.convert():
            pass

    def region() -> None:
        with torch.autocast("cpu"):
            pass

    found = timing.fastest({"block": block, "autocast region": region}, 1, 300)
    return times | {name: microseconds / 1e3 for name, microseconds in found.items()}


def main() -> None:
    """Prints the tables; with ``--save`` also writes the figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    converting = measure_convert()
    print("milliseconds  " + "  ".join(f"{k} {v:.3g}" for k, v in converting.items()))
    print("\nmicroseconds over raw")
    columns = ("autocast", "pass-through", "disabled", "ruled", "naive", "by hand", "casting")
    print(f"{'op':12}{'raw':>8}" + "".join(f"{c:>14}" for c in columns))
    ops_us = {}
    for kind in op_cases():
        times = ops_us[kind] = measure_op(kind, options.repeats)
        over = "".join(f"{times[c] - times['raw']:14.2f}" for c in columns)
        print(f"{kind:12}{times['raw']:8.2f}{over}")
    models_us = {}
    for name, training in (("forward", False), ("training step", True)):
        times = models_us[name] = measure_model(options.repeats // 2, training=training)
        shown = "  ".join(f"{k} {v / times['by hand']:.2f}" for k, v in times.items())
        print(f"\ntiny GPT {name}, by hand = 1.00 ({times['by hand']:.0f} us):  {shown}")
    figures = {"convert_ms": converting, "ops_us": ops_us, "models_us": models_us}
    timing.save(options.save, "overhead", figures, device="cpu", threads=1)


if __name__ == "__main__":
    main()
