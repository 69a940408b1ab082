"""`trace` and `diff_runs`: what explains a difference between two runs, and what does not."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from tests import forks


class Net(nn.Module):
    """A block with a norm, dropout, attention and a mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT / 4).masked_fill(mask, -torch.inf)
        x = x + self.drop(scores.softmax(-1) @ v)
        return self.head(torch.tanh(x))


def batch() -> tuple[Tensor, Tensor]:
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    return torch.arange(24).view(3, 8) % 20, mask


def run(
    path: Path,
    change: Callable[[Net], Any] = lambda net: None,
    *,
    low: str = "",
    steps: int = 2,
    given: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Trains a net and returns losses and parameters; with ``path`` None it is not traced."""
    torch.manual_seed(0)
    net = Net()
    change(net)
    ids, mask = given or batch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    regions = {
        "": contextlib.nullcontext,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "hmpx": lambda: hmpx.convert(device_types={"cpu"}),
    }
    traced = hmpx.trace(path, **options) if path else contextlib.nullcontext()
    with regions[low](), traced:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(ids, mask).flatten(0, 1).float(), ids.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, torch.rand(3), *net.parameters()]


# --- what a trace changes, and what is in it ---------------------------------------------------------


@pytest.mark.parametrize("low", ["", "autocast", "hmpx"])
def test_tracing_changes_nothing_and_equal_runs_are_equal(low: str, tmp_path: Path) -> None:
    plain = run(None, low=low)  # type: ignore[arg-type]
    traced = run(tmp_path / "a", low=low)
    assert all(map(torch.equal, plain, traced))
    run(tmp_path / "b", low=low)
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert found.counts == {"equal": len(found.rows)}
    assert str(found).startswith("The runs are equal, bit by bit.")


def test_estimates_agree_with_whole_tensors(tmp_path: Path) -> None:
    """95 of 100 estimates are within two standard errors."""
    results: dict[str, list[Tensor]] = {"": [], "hmpx": []}

    def keep(call: hmpx.OpCall, tensors: hmpx.CallTensors | None) -> None:
        assert tensors is not None
        if call.op != "float" and isinstance(tensors.result, Tensor):
            results[low].append(tensors.result.detach().double().clone())

    for low in results:
        with hmpx.attach(keep, tensors=True, every_op=True):
            run(tmp_path / f"run{low}", low=low, steps=6)
    found = hmpx.diff_runs(tmp_path / "run", tmp_path / "runhmpx")
    rows = [row for row in found.rows if row.phase == "forward" and row.op != "chunk"]
    assert len(rows) == len(results[""]) == len(results["hmpx"])
    within = [
        abs(row.error - ((x - y).nan_to_num().norm() / x[x.isfinite()].norm()).item())
        <= 2 * row.uncertainty + 1e-12
        for row, x, y in zip(rows, results[""], results["hmpx"], strict=True)
        if x.isfinite().all()
    ]
    assert len(within) > 60
    assert sum(within) / len(within) >= 0.95


def test_a_call_takes_less_than_a_kilobyte(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=5)
    calls = [line for line in (tmp_path / "a").read_text().splitlines() if '"call"' in line[:8]]
    assert (tmp_path / "a").stat().st_size / len(calls) < 1000


def traced_with(path: Path, **options: Any) -> hmpx.RunDiff:
    torch.manual_seed(0)
    net, optimizer = Net(), torch.optim.SGD
    stepping = optimizer(net.parameters(), 0.1)
    with hmpx.trace(path, **options):
        for _ in range(4):
            net(*batch()).sum().backward()
            stepping.step()
    return hmpx.diff_runs(path, path)


def test_options(tmp_path: Path) -> None:
    assert {row.step for row in traced_with(tmp_path / "a", steps=range(1, 3)).rows} == {1, 2}
    assert {row.step for row in traced_with(tmp_path / "b", every=3).rows} == {0, 3}
    rows = traced_with(tmp_path / "c", modules=["head", "n*"]).rows
    assert {row.module for row in rows if row.op != "gradient"} == {"head", "norm"}


# --- what is found -----------------------------------------------------------------------------------


def set_eps(net: Net) -> None:
    net.norm.eps = 1e-3


def set_weight(net: Net) -> None:
    with torch.no_grad():
        net.qkv.weight[3, 4] += 0.01


def leave_dropout_on(net: Net) -> None:
    net.drop.p = 0.1


def swap_norm(net: Net) -> None:
    net.norm = nn.RMSNorm(16)  # type: ignore[assignment]


def round_late(net: Net) -> None:
    net.norm.register_forward_hook(lambda module, given, result: result.bfloat16().float())


def round_weight(net: Net) -> None:
    with torch.no_grad():
        net.qkv.weight.copy_(net.qkv.weight.bfloat16())


@pytest.mark.parametrize(
    ("change", "op", "module", "cause"),
    [
        (round_weight, "linear", "qkv", "qkv.weight differs by 1.4e-03: bfloat16 values in b"),
        (set_eps, "layer_norm", "norm", "arguments: (16), 1e-05, True in a, (16), 0.001, True in b"),
        (set_weight, "linear", "qkv", "qkv.weight differs by "),
        (leave_dropout_on, "dropout", "drop", "arguments: 0.0, True in a, 0.1, True in b"),
        (swap_norm, "layer_norm", "norm", ""),
        (round_late, "linear", "qkv", "what layer_norm returned is converted or sliced otherwise: bfloat16"),
    ],
)  # fmt: skip
def test_the_first_call_that_differs_is_named(
    change: Callable[[Net], None], op: str, module: str, cause: str, tmp_path: Path
) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", change)
    first = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.op, first.module) == (op, module)
    assert first.cause.startswith(cause)


def test_random_numbers_and_inputs_that_differ_are_named(tmp_path: Path) -> None:
    ids, mask = batch()
    run(tmp_path / "a", steps=1)
    run(tmp_path / "ids", steps=1, given=((ids + 1) % 20, mask))
    run(tmp_path / "mask", steps=1, given=(ids, mask.clone().fill_(False)))
    said = [hmpx.diff_runs(tmp_path / "a", tmp_path / name).first for name in ("ids", "mask")]
    assert [(row.op, row.cause) for row in said if row] == [
        ("embedding", "a int64[3, 8] tensor made outside of the traced calls differs"),
        ("masked_fill", "a bool[8, 8] tensor made outside of the traced calls differs"),
    ]


class OneUlp(TorchDispatchMode):
    """Moves one value of the first `tanh` by a unit in the last place."""

    is_done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.tanh and not self.is_done:
            self.is_done = True
            result[77] = torch.nextafter(result[77], torch.tensor(9.0))
        return result


def test_one_ulp_in_one_value_is_found(tmp_path: Path) -> None:
    """Only the bits show it: no estimate sees a change this small."""
    x = torch.linspace(-1, 1, 4096)
    for name, mode in (("a", contextlib.nullcontext()), ("b", OneUlp())):
        with hmpx.trace(tmp_path / name), mode:
            torch.tanh(x * 2).exp()
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert (found.first.op, found.first.cause) == ("tanh", "other bits from equal inputs")
    assert [row.verdict for row in found.rows] == ["equal", "unexplained", "rounding"]


@pytest.mark.parametrize("low", ["autocast", "hmpx"])
def test_low_precision_explains_the_difference_of_a_sound_program(low: str, tmp_path: Path) -> None:
    run(tmp_path / "a", steps=4)
    run(tmp_path / "b", low=low, steps=4)
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert found.counts["rounding"] > 10
    (row,) = [r for r in found.rows if (r.op, r.phase, r.step) == ("matmul", "forward", 0)][:1]
    assert row.types == ("float32", "bfloat16")


def test_a_mask_of_the_least_number_of_a_dtype_is_explained(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        given = torch.linspace(0, 1, 16).to(dtype)
        with hmpx.trace(tmp_path / name):
            x = given.sin()
            mask = torch.where(torch.eye(16) > 0, 0.0, torch.finfo(x.dtype).min)
            (x + mask).softmax(-1)
    assert hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first is None


def test_numbers_that_depend_on_a_dtype_are_explained_and_an_eps_is_not(tmp_path: Path) -> None:
    def fill(net: Net) -> None:
        def forward(x: Tensor) -> Tensor:
            return x.masked_fill(x > 5, torch.finfo(net.head.weight.dtype).min / 1e38)

        net.drop.forward = forward  # type: ignore[method-assign]

    def fill_and_round(net: Net) -> None:
        fill(net)
        net.bfloat16()

    run(tmp_path / "a", fill)
    run(tmp_path / "b", fill_and_round)
    assert hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first is None
    run(tmp_path / "a")
    run(tmp_path / "b", set_eps, low="hmpx")
    first = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert first.module == "norm"


@pytest.mark.parametrize("low", ["autocast", "hmpx"])
def test_what_low_precision_does_not_explain(low: str, tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", swap_norm, low=low)
    first = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.op, first.module) == ("layer_norm", "norm")


def test_a_call_that_only_one_run_makes_stays_in_its_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with hmpx.trace(tmp_path / name):
            x = torch.exp(torch.ones(4))
            torch.sin(torch.tanh(x) if name == "b" else x)
    rows = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows
    assert [(row.op, row.verdict) for row in rows][:2] == [("exp", "equal"), ("tanh", "only in b")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flipped_signs_are_no_equal_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size, dtype=dtype) for size in (1, 2, 3, 4, 8, 64) for _ in range(10)]
    for name, sign in (("a", 1.0), ("b", -1.0)):
        with hmpx.trace(tmp_path / name):
            for each in tensors:
                torch.mul(each, sign)
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.counts == {"unexplained": len(tensors)}


@pytest.mark.parametrize("window", [0, 3])
def test_a_mask_and_a_flag_that_say_the_same_are_explained(window: int, tmp_path: Path) -> None:
    q, k, v = torch.rand(3, 1, 1, 8, 4)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    mask = causal.triu(-window) if window else causal
    for name, options in (("a", {"is_causal": True}), ("b", {"attn_mask": mask})):
        with hmpx.trace(tmp_path / name):
            F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
    first = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first
    assert (first and first.cause) == ("tensors: 3 in a, 4 in b" if window else None)


def test_a_wrong_backward_is_named(tmp_path: Path) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return gradient * ctx.factor, None

    for name, factor in (("a", 1.0), ("b", 1.5)):
        x = torch.linspace(0, 1, 50, requires_grad=True)
        with hmpx.trace(tmp_path / name):
            y = torch.sin(x)
            torch.exp(Wrong.apply(y, factor)).sum().backward()
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    first = found.first
    assert first is not None
    assert (first.op, first.cause) == ("mul", "arguments: 1.0 in a, 1.5 in b")
    gradient = next(row for row in found.rows if row.phase == "backward" and row.op == "sin")
    assert gradient.error == pytest.approx(0.5, abs=3 * gradient.uncertainty)


def stepped(
    path: Path, kind: type[torch.optim.Optimizer], options: Any = None, factor: float = 1.0
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = kind(net.parameters(), **(options or {}))
    with hmpx.trace(path):
        for step in range(4):
            if step > 1 and factor != 1:
                optimizer.param_groups[0]["lr"] *= factor
            optimizer.zero_grad()
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options", "factor", "causes"),
    [
        (torch.optim.AdamW, {"lr": 1.1e-3}, 1.0, {0: "lr: 0.001 in a, 0.0011 in b"}),
        (torch.optim.AdamW, {"betas": (0.9, 0.95)}, 1.0, {0: "betas: (0.9, 0.999) in a, (0.9, 0.95) in b"}),
        (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}, 1.0, {0: "amsgrad: False in a, True in b"}),
        (torch.optim.AdamW, {}, 0.5, {2: "lr: 0.001 in a, 0.0005 in b", 3: "lr: 0.001 in a, 0.00025 in b"}),
        (torch.optim.Adam, {}, 1.0, {0: "class: AdamW in a, Adam in b"}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.5)}, 1.0, {0: "lr: 0.001 in a, 0.5 in b"}),
    ],
)  # fmt: skip
def test_other_settings_of_an_optimizer_are_the_cause(
    kind: type[torch.optim.Optimizer],
    options: Any,
    factor: float,
    causes: dict[int, str],
    tmp_path: Path,
) -> None:
    stepped(tmp_path / "a", torch.optim.AdamW)
    stepped(tmp_path / "b", kind, options, factor)
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    unexplained = [row for row in found.rows if row.is_unexplained]
    assert {(row.op, row.phase) for row in unexplained} == {("AdamW", "optimizer")}
    assert {row.step: row.cause for row in unexplained} == causes
    step, cause = next(iter(causes.items()))
    assert f"first unexplained: AdamW, step {step}: {cause}" in " ".join(str(found).split())
    assert "AdamW" in found.to_html()
    assert "AdamW" in found.to_csv()


def test_settings_that_a_trace_lacks_are_not_compared(tmp_path: Path) -> None:
    stepped(tmp_path / "a", torch.optim.AdamW)
    lines = (tmp_path / "a").read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith('{"optimizer"')]
    assert len(lines) == len(older) + 4
    (tmp_path / "b").write_text("".join(older))
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.counts == {"equal": len(found.rows)}


@pytest.mark.parametrize("pair", [("inf", "nan"), ("inf", "-inf"), ("nan", "1"), ("-inf", "nan")])
def test_other_values_that_are_not_finite_are_not_rounding(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    for name, value in zip("ab", pair, strict=True):
        with hmpx.trace(tmp_path / name):
            x = torch.where(torch.arange(8) == 3, torch.tensor(float(value)), torch.ones(8))
            (x * 2).sum()
    rows = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows
    assert [row.verdict for row in rows] == ["unexplained", "inherited", "inherited"]


def test_infinities_in_other_places_are_not_rounding(tmp_path: Path) -> None:
    for name, value in (("a", [torch.inf, 0.0, 1.0]), ("b", [0.0, torch.inf, 1.0])):
        with hmpx.trace(tmp_path / name):
            torch.tensor(value) * 2
    (row,) = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows
    assert (row.verdict, row.error) == ("unexplained", math.inf)


def test_the_same_infinities_in_another_dtype_are_rounding(tmp_path: Path) -> None:
    mask = torch.ones(8, 8).triu(1).bool()
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        given = torch.linspace(0, 1, 64).view(8, 8).to(dtype)
        with hmpx.trace(tmp_path / name):
            given.sin().masked_fill(mask, -torch.inf).softmax(-1)
    rows = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows
    assert [row.verdict for row in rows] == ["rounding"] * 3


def test_other_shapes_are_not_compared(tmp_path: Path) -> None:
    for name, size in (("a", 4), ("b", 8)):
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.rand(size, 5, 8)
        with hmpx.trace(tmp_path / name):
            h = net(x) @ net(x).transpose(1, 2)
            h = h.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
            (h.softmax(-1) @ x).view(size * 5, 8).sum().backward()
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.counts.keys() == {"equal", "not compared"}
    (row, *_) = [row for row in found.rows if row.verdict == "not compared"]
    assert (row.op, row.cause) == ("linear", "float32[4, 5, 8] in a, float32[8, 5, 8] in b")
    said = " ".join(str(found).split())
    assert f"first not compared: {row}, step 0: float32[4, 5, 8] in a" in said


def test_results_of_other_shapes_from_equal_inputs_are_unexplained(tmp_path: Path) -> None:
    x = torch.rand(1, 1, 8, 8)
    for name, padding in (("a", 0), ("b", 1)):
        with hmpx.trace(tmp_path / name):
            F.conv2d(x, torch.ones(1, 1, 3, 3), padding=padding).relu()
    first, second = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows
    assert (first.verdict, first.cause) == (
        "unexplained",
        "arguments: padding=0 in a, padding=1 in b",
    )
    assert (second.verdict, second.cause) == (
        "not compared",
        "float32[1, 1, 6, 6] in a, float32[1, 1, 8, 8] in b",
    )


# --- odd programs and files --------------------------------------------------------------------------


def odd_program() -> list[Tensor]:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    found = [x[:0].exp(), x.double().sin(), x.to(torch.complex64).exp(), x.half() * 2, x.T.relu()]
    with torch.inference_mode():
        found.append(torch.sigmoid(x * 2))
    y = x * 1
    y[1:3].add_(1).relu_()
    y.log_()
    found += [
        y,
        *torch.sort(x),
        x.argmax(0),
        x.amax() * 3.4e38 * 2,
        torch.where(x > 0, x, torch.inf),
    ]
    sparse = x.to_sparse()
    found += [
        (sparse @ x.T).to_dense(),
        torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged).sin()[0],
    ]
    found += [torch.func.vmap(torch.sin)(x), torch.func.grad(lambda z: z.exp().sum())(x)]
    out = torch.empty(4, 6)
    torch.exp(x, out=out)
    found += [
        out,
        torch.empty(3, device="meta").exp().to("meta").shape and x,
        x.expand(2, 4, 6) + 1,
    ]
    found += [x.to(torch.float8_e4m3fn).float(), F.cross_entropy(x[::2], torch.arange(4)[::2])]
    z = x.double().requires_grad_()
    z.sum().backward()  # an expanded gradient
    found += [z.grad, torch.take(x.T, torch.arange(9).view(3, 3).T)]
    return [each for each in found if isinstance(each, Tensor)]


def test_odd_programs_run_and_keep_their_bits(tmp_path: Path) -> None:
    plain = odd_program()
    for name in ("a", "b"):
        with hmpx.trace(tmp_path / name):
            traced = odd_program()
        for one, other in zip(plain, traced, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
    counts = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").counts
    assert counts.keys() <= {"equal", "not compared"}
    assert counts["equal"] > 20


@pytest.mark.parametrize("tool", ["trace", "lint", "expect", "observers"])
def test_observers_leave_torchs_own_kernels(tool: str, tmp_path: Path) -> None:
    """Hmpx has a more exact sum of gradients for bfloat16 embeddings, for conversions."""

    def gradient() -> float:
        layer = nn.Embedding(4, 1).bfloat16()
        layer(torch.zeros(1000, dtype=torch.long)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad[0].item()

    plain = gradient()
    contract = {"expect": [{"op": "embedding", "output": "bfloat16"}]}
    opened = {
        "trace": lambda: hmpx.trace(tmp_path / "a"),
        "lint": hmpx.lint,
        "expect": lambda: hmpx.expect(contract),
        "observers": hmpx.record,
    }
    with opened[tool]():
        assert gradient() == plain


@pytest.mark.parametrize("what", ["ids", "data"])
def test_other_data_in_a_later_step_is_named_between_precisions(what: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        low = hmpx.convert(device_types={"cpu"}) if name == "b" else contextlib.nullcontext()
        with low, hmpx.trace(tmp_path / name):
            for step in range(3):
                other = name == "b" and step == 1
                ids = torch.arange(16) % 7 + (2 if other and what == "ids" else 0)
                scale = torch.full((16, 4), 3.0 if other and what == "data" else 1.0)
                (net(ids) * scale).square().mean().backward()
                optimizer.step()
    first = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    kind = "int64[16]" if what == "ids" else "float32[16, 4]"
    assert first.step == 1
    assert first.cause.startswith(f"a {kind} tensor made outside of the traced calls differs")


def test_a_shorter_run_is_said(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=3)
    run(tmp_path / "b", steps=1)
    said = str(hmpx.diff_runs(tmp_path / "a", tmp_path / "b"))
    assert "the runs have different steps 3 and 1" in said


def test_values_that_can_not_be_read_are_not_compared(tmp_path: Path) -> None:
    """A gradient whose storage was freed, as FSDP does."""

    class Idle(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    layer = nn.Linear(4, 4)
    for name in ("a", "b"):
        layer.zero_grad()
        with hmpx.trace(tmp_path / name):
            layer(torch.ones(2, 4)).sum().backward()
            assert layer.weight.grad is not None
            layer.weight.grad.untyped_storage().resize_(0)
            Idle(layer.parameters(), {}).step()
    verdicts = {row.verdict for row in hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows}
    assert verdicts == {"equal", "not compared"}


def test_threads(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(20):
            torch.exp(torch.ones(8))

    with hmpx.trace(tmp_path / "a"):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(hmpx.diff_runs(tmp_path / "a", tmp_path / "a").rows) == 60


PROGRAM = """
import os, sys, torch, hmpx
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with hmpx.trace("killed"):
    for step in range(5):
        y = model(torch.ones(2, 4))
        if step == 3:
            os.kill(os.getpid(), 9)
        y.sum().backward()
        optimizer.step()
"""


def test_a_killed_run_has_the_steps_that_ended(tmp_path: Path) -> None:
    assert forks.run("-c", PROGRAM, cwd=tmp_path).returncode == -signal.SIGKILL
    lines = (tmp_path / "killed").read_text().splitlines(keepends=True)
    call = next(line for line in lines if line.startswith('{"call"'))
    with (tmp_path / "killed").open("a") as file:
        file.write(call + call[:9])  # of a longer step, part of it is in the file
    found = hmpx.diff_runs(tmp_path / "killed", tmp_path / "killed")
    assert {row.step for row in found.rows} == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "b: not a trace, or damaged: it is empty; hmpx run --trace writes one"),
        (
            "import torch\n",
            "b:1: not a trace, or damaged: Expecting value: line 1 column 1 (char 0); "
            "hmpx run --trace writes one",
        ),
        (
            '{"trace": {"format": 9}}\n',
            "b:1: not a trace, or damaged: it has format 9, this hmpx reads 2 and 3; "
            "hmpx run --trace writes one",
        ),
    ],
)
def test_files_that_are_not_traces(
    text: str, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").write_text(text)
    with pytest.raises(hmpx.OptionError) as error:
        hmpx.diff_runs("b", "b")
    assert str(error.value) == message


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(hmpx.OptionError, match=r"can.t write .*: No such file or directory"):
        hmpx.trace(tmp_path / "no" / "a").__enter__()
    with pytest.raises(hmpx.OptionError, match=r"steps must be numbers .* not 3"):
        hmpx.trace(tmp_path / "a", steps=3)  # type: ignore[arg-type]
    with (
        pytest.warns(hmpx.HmpxWarning, match="no call was in the modules haed"),
        hmpx.trace(tmp_path / "a", modules=["haed"]),
    ):
        torch.ones(2).exp()
    with pytest.raises(hmpx.OptionError, match="every"):
        hmpx.trace(tmp_path / "a", every=0)
    traced = hmpx.trace(tmp_path / "a")
    with traced:
        pass
    with pytest.raises(hmpx.OptionError, match="entered before"), traced:
        pass
    assert not hmpx.is_converted()


def test_data_and_page(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", set_eps)
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    rows = json.loads(found.to_json())["rows"]
    assert len(rows) == len(found.rows)
    assert math.isclose(rows[0]["error"], found.rows[0].error)
    page = found.to_html(tmp_path / "page.html")
    assert "first unexplained: layer_norm in norm" in page
    assert len(repr(found).splitlines()) == len(repr(found.rows[0]).splitlines()) == 1


def test_gradients_whose_parts_cancel_are_explained(tmp_path: Path) -> None:
    """The gradient of a bias before a batch norm is rounding only."""
    for name, region in (
        ("a", contextlib.nullcontext),
        ("b", lambda: hmpx.convert(device_types={"cpu"})),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with region(), hmpx.trace(tmp_path / name):
            for _ in range(2):
                net(torch.randn(4, 3, 8, 8)).square().mean().backward()
                optimizer.step()
    found = hmpx.diff_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert max(row.error for row in found.rows if row.module == "0.bias") > 100


RANK = """
import os, sys, torch, hmpx
import torch.distributed as dist
from torch import nn

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(f"store{size}", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(net.parameters(), 0.1 * float(sys.argv[1]))
with hmpx.trace(f"of{size}"):
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""


def test_two_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    def program(rank: int, size: int) -> forks.Program:
        values = {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        return ["-W", "ignore", "-c", RANK, "1"], {**os.environ, **values}

    for size in (1, 2):
        done = forks.run_together([program(rank, size) for rank in range(size)], cwd=tmp_path)
        assert [each.returncode for each in done] == [0] * size, done
    assert (tmp_path / "of2.rank1").is_file()
    found = hmpx.diff_runs(tmp_path / "of1", tmp_path / "of2")
    assert found.first is None
    gradients = [row for row in found.rows if row.op == "gradient"]
    assert len(gradients) == 12
    assert {row.verdict for row in gradients} <= {"equal", "rounding", "inherited"}
    assert "different processes 1 and 2" in str(found)


def test_values_are_those_at_the_time_of_the_call(tmp_path: Path) -> None:
    """Though they are read later, and the memory has other values then."""
    path, expected = tmp_path / "a.hmpx", tmp_path / "b.hmpx"
    for each, changes in ((path, True), (expected, False)):
        with hmpx.trace(each):
            x = torch.linspace(-1, 1, 6)
            y = torch.tanh(x)
            if changes:
                x.data.zero_()
                y.data.zero_()
    first, second = (
        [json.loads(line) for line in p.read_text().splitlines()] for p in (path, expected)
    )
    tensors = [[line for line in lines if "tensor" in line] for lines in (first, second)]
    assert tensors[0] == tensors[1]
    assert len(tensors[0]) == 2


@pytest.mark.parametrize("nodes", ["compiled", "off"])
@pytest.mark.parametrize(
    "case",
    [
        (1.0, 0.0, 1.0),
        (0.0, 0.0, 0.0),
        (0.0, -0.0, 0.0),
        (0.0, 1.0, math.inf),
        (1e200, 1.001e200, 1e-3),
        (1e-200, 1.001e-200, 1e-3),
        (1e200, 1.0, 1.0),
        (1.0, 1e200, 1e200),
        (1e306, -1e306, 2.0),
        (1e307, -1e307, math.inf),
        (1e308, 1.001e308, math.inf),
    ],
)
def test_errors_of_zeros_and_of_extreme_values(
    case: tuple[float, float, float], nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hmpx import compute, tracing

    a, b, error = case
    if nodes == "off":
        monkeypatch.setattr(tracing.sketches, "nodes_in_use", compute.nodes.Nodes)
    values = torch.linspace(0.5, 1, 100, dtype=torch.float64)
    for name, scale in (("a", a), ("b", b)):
        with hmpx.trace(tmp_path / name):
            torch.stack([values * scale] * 2)
    row = hmpx.diff_runs(tmp_path / "a", tmp_path / "b").rows[-1]
    if row.error != error:
        assert row.error == pytest.approx(error, abs=4 * row.uncertainty)
    assert ("zero in a" in row.cause) == (a == 0 != b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_digests_of_values_of_other_signs(dtype: torch.dtype) -> None:
    """Only the highest bit of one value, or of some, differs."""
    from hmpx.tracing.sketches import sketches, values_of

    flips = torch.eye(1021, dtype=torch.bool)
    drawn = torch.rand(2000, 1021, generator=torch.Generator().manual_seed(0)) < 0.01
    signs = torch.where(torch.cat([flips, drawn]), -1.0, 1.0).unique(dim=0)
    found = sketches([values_of((0.7 * each).to(dtype)) for each in signs])
    assert len({each.digest for each, _ in found}) == len(signs)


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int64, torch.int32,
    torch.uint8, torch.bool,
])  # fmt: skip
@pytest.mark.parametrize("size", [0, 1, 1021, 1022, 300_000, 600_000])
def test_the_kernel_and_torch_give_the_same_sketches(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests bit for bit, and sums but for the order of their terms: of several parts, of NaN and infinities."""
    from hmpx import compute
    from hmpx.tracing import sketches

    drawn = torch.randn(2, size, generator=torch.Generator().manual_seed(size)) * 30
    values = [*drawn.to(dtype)]
    if dtype.is_floating_point and size > 3:
        values[0][1], values[0][-1] = math.nan, -math.inf
    pairs = [sketches.sketches([each])[0] for each in values]
    monkeypatch.setattr(sketches, "nodes_in_use", compute.nodes.Nodes)
    for (found, is_wide), (expected, is_surely_wide) in zip(
        pairs, sketches.sketches(values), strict=True
    ):
        assert is_wide >= is_surely_wide
        for name in ("digest", "nonfinite", "places", "least", "largest"):
            assert getattr(found, name) == getattr(expected, name)
        assert found.norm == pytest.approx(expected.norm, rel=1e-14)
        assert found.projections == pytest.approx(
            expected.projections, rel=1e-12, abs=1e-13 * expected.norm
        )


def test_few_values_have_the_sketches_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read together: integers, low and wide dtypes, NaN and infinities, views that are not contiguous."""
    from hmpx import compute, tracing
    from hmpx.tracing.sketches import sketches, values_of

    monkeypatch.setattr(tracing.sketches, "nodes_in_use", compute.nodes.Nodes)
    x = torch.linspace(-3, 3, 40).view(5, 8)
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.bool,
    ):
        given = [
            values_of(each)
            for each in (x.to(dtype), x.T.to(dtype), x[1].to(dtype), x[:, 2].to(dtype))
        ]
        if dtype is torch.float32:
            given += [values_of(torch.tensor([1.0, math.nan, -math.inf]))]
        for each, (found, _) in zip(given, sketches(given), strict=True):
            ((alone, _),) = sketches([each])
            assert (found.digest, found.nonfinite, found.places) == (
                alone.digest,
                alone.nonfinite,
                alone.places,
            )
            assert (found.least, found.largest) == (alone.least, alone.largest)
            assert found.norm == pytest.approx(alone.norm, rel=1e-14)
            assert found.projections == pytest.approx(alone.projections, rel=1e-12, abs=1e-12)
