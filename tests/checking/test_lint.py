"""`hmpx.lint`: each rule finds its program, and is silent about the mended one."""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import hmpx
from hmpx.checking.kernel_traits import scatters_terms
from hmpx.observers import LEFT_OUT
from tests.samples import sample_inputs
from tests.upstream_bugs import BUGS, Bug, drawn

BF16, FP16 = torch.bfloat16, torch.float16
LOW = drawn(64, 128).to(BF16)


def codes(run: Callable[[], object]) -> list[str]:
    left_out = LEFT_OUT.total()
    with hmpx.lint() as findings:
        run()
    assert LEFT_OUT.total() == left_out, findings.about
    return [each.code for each in findings]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.run.__name__)
def test_bugs_of_other_projects_are_found_until_they_are_fixed(bug: Bug) -> None:
    assert bug.code in codes(lambda: bug.run(False))
    assert not codes(lambda: bug.run(True))


def softmax_of_scores(dtype: torch.dtype) -> None:
    scores = LOW.to(dtype) @ (LOW.to(dtype).T * 4)
    scores.float().softmax(-1)


def timestep_type_promotion(is_low: bool) -> None:
    torch.arange(990, 1000) * (torch.ones(10).to(BF16) if is_low else torch.ones(10))


def range_made_low(dtype: torch.dtype) -> None:
    torch.arange(5000, dtype=dtype)


def variance_by_difference(dtype: torch.dtype) -> None:
    x = (drawn(64, 256) + 100).to(dtype)
    (x * x).mean(-1) - x.mean(-1) * x.mean(-1)


def running_sum(dtype: torch.dtype) -> None:
    total, one = torch.zeros(8, dtype=dtype), torch.ones(8, dtype=dtype)
    for _ in range(600):
        total += one


def scaled_stream(dtype: torch.dtype) -> None:
    LOW.exp() * nn.Parameter(torch.full((128,), 1.1, dtype=dtype))


def masked_stream(dtype: torch.dtype) -> None:
    LOW.exp() + torch.zeros(1, 128, dtype=dtype)


def island(is_wide: bool) -> None:
    y = LOW.exp()
    F.relu(y.float()).to(BF16) if is_wide else F.relu(y)


def trained(dtype: torch.dtype) -> None:
    model = nn.Linear(16, 16).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model(drawn(4, 16).to(dtype)).sum().backward()
    optimizer.step()


def joined(dtype: torch.dtype) -> None:
    torch.cat([LOW.exp(), LOW.to(dtype)])


def attended(dtype: torch.dtype) -> None:
    q = drawn(1, 2, 8, 16)
    with torch.autocast("cpu", BF16):
        torch.stack([q.to(BF16), q.to(dtype)])


def near_the_end(scale: float) -> None:
    torch.full((10,), 300.0).to(FP16) * scale


def subnormal(scale: float) -> None:
    drawn(1000).to(FP16) * scale


def unscaled(scale: float) -> None:
    loss = nn.Linear(16, 16).to(FP16)(drawn(4, 16).to(FP16)).float().mean() * 1e-4
    (loss * scale).backward()


def rounded_weights(is_rounded: bool) -> None:
    layer = nn.Linear(64, 16)
    if is_rounded:
        layer.weight.data = layer.weight.data.to(BF16).float()
    layer(drawn(2, 64))


def mostly_wide_products(is_wide: bool) -> None:
    x, w = drawn(64, 128), drawn(512, 128)
    with torch.autocast("cpu", BF16, enabled=not is_wide):
        hidden = F.linear(x, w)
    with torch.autocast("cpu", BF16):
        F.linear(hidden, w.T[:16])


def routed(dtype: torch.dtype) -> None:
    scores = F.linear(LOW, drawn(16, 128).to(BF16)).to(dtype)
    (scores / 64 + 8).softmax(-1).topk(2)


def nearest(dtype: torch.dtype) -> None:
    scores = F.linear(LOW, drawn(16, 128).to(BF16)).to(dtype)
    (scores / 64 + 8).argmax(-1)


def log_of_complements(dtype: torch.dtype) -> None:
    p = torch.sigmoid(LOW - 6)
    torch.log(1 - p.to(dtype))


class TwoMatrices(torch.autograd.Function):
    """A product whose backward upcasts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, is_wide: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.is_wide = is_wide
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        g, (x, w) = gradients[0], ctx.saved_tensors
        dtype = torch.float32 if ctx.is_wide else BF16
        return g.to(dtype) @ w.to(dtype), g.to(dtype).T @ x.to(dtype), None


def wide_backward(is_wide: bool) -> None:
    w = drawn(128, 128).requires_grad_()
    with torch.autocast("cpu", BF16):
        y = TwoMatrices.apply(drawn(64, 128), w, is_wide)
    y.float().sum().backward()


def wide_buffer(is_wide: bool) -> None:
    x, w = drawn(64, 128), drawn(128, 256)
    with torch.autocast("cpu", BF16):
        F.linear(x, w[:, :16].T)
        torch.mm(x, w, out=torch.empty(64, 256)) if is_wide else torch.mm(x, w)


def clipped(is_late: bool, clip: Callable[..., object] = nn.utils.clip_grad_norm_) -> None:
    layer = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with torch.autocast("cpu", FP16):
        loss = layer(drawn(4, 16)).float().square().mean()
    scaler.scale(loss).backward()
    if is_late:
        scaler.unscale_(optimizer)
    clip(layer.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def upcast_weight(is_wide: bool) -> None:
    x = drawn(16, 128)
    F.linear(x, LOW.float()) if is_wide else F.linear(x.to(BF16), LOW)


def upcast_within_autocast(is_wide: bool) -> None:
    w = drawn(128, 128)
    with torch.autocast("cpu", BF16):
        hidden = F.linear(drawn(64, 128), w)
        F.linear(F.relu(hidden.float() if is_wide else hidden), w)


def decays(dtype: torch.dtype) -> None:
    (1 - 2.0 ** -torch.linspace(6, 9, 8)).to(dtype)


def masked_rows(off: float) -> None:
    mask = torch.zeros(4, 8, dtype=torch.bool).index_fill_(0, torch.arange(3), 1)
    torch.where(mask, LOW[:4, :8].half() * 1.1, off).softmax(-1)


def overwritten_masters(is_wrong: bool) -> None:
    low = nn.Linear(16, 16).to(BF16)
    masters = [nn.Parameter(each.detach().float()) for each in low.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-4)
    for _ in range(2):
        low(drawn(4, 16).to(BF16)).square().sum().backward()
        for master, each in zip(masters, low.parameters(), strict=True):
            if is_wrong:
                master.data.copy_(each.data)
            master.grad = None if each.grad is None else each.grad.float()
        optimizer.step()
        for master, each in zip(masters, low.parameters(), strict=True):
            each.data.copy_(master.data)
            each.grad = None


@pytest.mark.parametrize(
    ("program", "wrong", "right", "code"),
    [
        (upcast_weight, True, False, "HP105"),
        (upcast_within_autocast, True, False, "HP106"),
        (overwritten_masters, True, False, "HP107"),
        (masked_rows, -1e30, -1e4, "HP109"),
        (decays, BF16, torch.float32, "HP111"),
        (log_of_complements, BF16, torch.float32, "HP101"),
        (wide_backward, True, False, "HP105"),
        (wide_buffer, True, False, "HP105"),
        (clipped, False, True, "HP110"),
        (lambda is_late: clipped(is_late, nn.utils.clip_grad_value_), False, True, "HP110"),
        (mostly_wide_products, True, False, "HP105"),
        (routed, BF16, torch.float32, "HP101"),
        (nearest, BF16, torch.float32, "HP101"),
        (softmax_of_scores, BF16, torch.float32, "HP101"),
        (timestep_type_promotion, True, False, "HP102"),
        (range_made_low, BF16, torch.float32, "HP102"),
        (variance_by_difference, BF16, torch.float32, "HP103"),
        (running_sum, BF16, torch.float32, "HP104"),
        (scaled_stream, torch.float32, BF16, "HP105"),
        (masked_stream, torch.float32, BF16, "HP105"),
        (island, True, False, "HP106"),
        (trained, BF16, torch.float32, "HP107"),
        (joined, torch.float32, BF16, "HP108"),
        (attended, torch.float32, BF16, "HP108"),
        (near_the_end, 100.0, 2.0, "HP109"),
        (subnormal, 1e-5, 1.0, "HP109"),
        (unscaled, 1.0, 2.0**16, "HP110"),
        (rounded_weights, True, False, "HP111"),
    ],
)  # fmt: skip
def test_each_rule_alarms_until_the_program_is_mended(
    program: Callable[[object], object], wrong: object, right: object, code: str
) -> None:
    found = codes(lambda: program(wrong))
    assert found
    assert {*found} == {code}
    assert not codes(lambda: program(right))


#: What may be between the call that rounds and the one that suffers.
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.float().view(8, -1, x.shape[-1]),
    "view before the upcast": lambda x: x.unsqueeze(0).float(),
    "slice": lambda x: x.float()[1:, :32],
    "transpose": lambda x: x.float().t(),
    "flip": lambda x: x.float().flip(0),
    "index": lambda x: x.float().index_select(0, torch.arange(9)),
    "join": lambda x: torch.cat([x.float(), x.float()]),
    "join of low": lambda x: torch.cat([x, x]).float(),
    "split": lambda x: x.float().split(16)[1],
    "stack": lambda x: torch.stack(x.float().unbind(0)),
    "mask": lambda x: x.float().masked_fill(torch.ones(x.shape).triu(1).bool(), -1e9),
    "added mask": lambda x: (
        x.float() + torch.zeros(x.shape).masked_fill_(torch.ones(x.shape).triu(1).bool(), -1e9)
    ),
    "choice": lambda x: torch.where(torch.ones(x.shape).tril().bool(), x.float(), -1e9),
    "scalar": lambda x: x.float() / 1.1,
    "number added": lambda x: x.float() + 1.0,
    "repeat": lambda x: x.float().repeat(2, 1),
    "clone": lambda x: x.clone().float().clone(),
    "contiguous": lambda x: x.t().contiguous().float(),
    "detached": lambda x: x.detach().float(),
    "mask in place": lambda x: x.float().masked_fill_(torch.ones(x.shape).triu(1).bool(), -1e9),
    "scalar in place": lambda x: x.float().mul_(0.9),
    "copy": lambda x: torch.zeros(x.shape).copy_(x),
    "items": lambda x: assigned(torch.zeros(x.shape), x),
    "norm": lambda x: F.rms_norm(x.float(), (x.shape[-1],)) * 60,
}


def assigned(target: Tensor, values: Tensor) -> Tensor:
    target[:] = values
    return target


def moved(move: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    scores = LOW.to(dtype) @ (LOW.to(dtype).T * 4)
    move(scores).softmax(-1)


@pytest.mark.parametrize("move", MOVES)
def test_values_are_followed(move: str) -> None:
    """Through all that rounds nothing."""
    assert codes(lambda: moved(MOVES[move], BF16)) == ["HP101"]
    assert not codes(lambda: moved(MOVES[move], torch.float32))


def test_values_are_followed_into_calls_that_upcast() -> None:
    """By ``dtype=``, or as the lists say."""
    scores = LOW @ (LOW.T * 4)
    assert codes(lambda: (LOW @ (LOW.T * 4)).softmax(-1, dtype=torch.float32)) == ["HP101"]
    assert not codes(lambda: scores.softmax(-1, dtype=torch.float32))
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        wide = LOW.float()
        assert codes(lambda: (wide @ (wide.t() * 4)).softmax(-1)) == ["HP101"]


def test_elements_that_change_places_are_no_finding() -> None:
    """The largest of rounded values is as good, though its gradient may go to another one."""
    x = LOW.float().requires_grad_()

    def run() -> None:
        scores = x.to(BF16) @ (x.to(BF16).T * 4)
        (scores.float().amax(-1) + scores.float().max(-1).values).sum().backward()

    assert not codes(run)


def test_arguments_that_changed_since_are_not_read() -> None:
    """The rounding call can't be repeated then."""

    def run() -> None:
        given = LOW.clone()
        scores = given @ (LOW.T * 4)
        given.mul_(0.9)
        scores.float().softmax(-1)

    assert not codes(run)


#: Differences of rounded values.
DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "of views": lambda x: (x.exp() + 100).unsqueeze(0) - (x.cos() + 100).unsqueeze(0),
    "with a number": lambda x: (x + 256.0) - 256.0,
    "from a number": lambda x: 256.0 - (256.0 - x),
    "of parts": lambda x: torch.sub(*torch.cat([x.exp() + 100, x.cos() + 100]).chunk(2)),
    "of upcast copies": lambda x: (x.exp() + 100).float().clone() - (x.cos() + 100).float(),
    "of copies": lambda x: (x.exp() + 100).clone() - (x.cos() + 100).t().contiguous().t(),
    "to zero": lambda x: near_a_large_bias(x) - near_a_large_bias(x * 1.001),
    "on a diagonal": lambda x: 1 - F.normalize(x, dim=-1) @ F.normalize(x * 1.001 + 1e-3, dim=-1).T,
    "of upcast squares": lambda x: upcast_variance(x),
    "in place": lambda x: (x.exp() + 100).sub_(x.cos() + 100),
    "of casts": lambda x: (x.float().exp() + 100).to(x.dtype) - (x.float().cos() + 100).to(x.dtype),
}


def near_a_large_bias(x: Tensor) -> Tensor:
    return F.linear(x, drawn(1, 128, seed=2).to(x.dtype), torch.full((1,), 2000.0).to(x.dtype))


def upcast_variance(x: Tensor) -> Tensor:
    values = (x + 200).float()
    return values.pow(2).mean(-1) - values.mean(-1).pow(2)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_cancellations_are_found(difference: str) -> None:
    """The calls after them are not reported as well."""
    x = drawn(64, 128) / 4

    def run(dtype: torch.dtype) -> None:
        DIFFERENCES[difference](x.to(dtype)).float().square().mean()

    assert codes(lambda: run(BF16)) == ["HP103"]
    assert not codes(lambda: run(torch.float32))


def counted(dtype: torch.dtype) -> None:
    steps = torch.zeros((), dtype=dtype)
    for _ in range(400):
        steps += 1


def counted_by_an_op(dtype: torch.dtype) -> None:
    steps = torch.zeros(2, dtype=dtype)
    for _ in range(400):
        steps = steps + 1


def positions_of_a_mask(dtype: torch.dtype) -> None:
    torch.ones(2, 900, dtype=torch.bool).to(dtype).cumsum(-1)


def whole_steps(dtype: torch.dtype) -> None:
    torch.linspace(0, 999, 1000, dtype=dtype)


def many_steps(dtype: torch.dtype) -> None:
    torch.linspace(0, 1, 1000, dtype=dtype)


def copied_positions(dtype: torch.dtype) -> None:
    torch.empty(1000, dtype=dtype).copy_(torch.arange(1000))


def average_in_place(dtype: torch.dtype) -> None:
    mean, x = (drawn(64).abs() + 1).to(dtype), (drawn(64, seed=1).abs() + 1).to(dtype)
    for _ in range(5):
        mean.mul_(0.999).add_(x, alpha=0.001)


def average_by_lerp(dtype: torch.dtype) -> None:
    mean, x = (drawn(64).abs() + 1).to(dtype), (drawn(64, seed=1).abs() + 1).to(dtype)
    for _ in range(5):
        mean.lerp_(x, 0.001)


def average_of_a_list(dtype: torch.dtype) -> None:
    mean, x = [(drawn(64).abs() + 1).to(dtype)], [(drawn(64, seed=1).abs() + 1).to(dtype)]
    for _ in range(5):
        torch._foreach_lerp_(mean, x, 0.001)


def micro_batches(dtype: torch.dtype) -> None:
    weight = torch.zeros(64, dtype=dtype, requires_grad=True)
    for seed in range(300):
        (weight * drawn(64, seed=seed).abs().to(dtype)).sum().backward()


def tied_weight(is_low: bool) -> None:
    """Its gradients add up within one backward, one far smaller than the other."""
    weight, x = torch.ones(64, requires_grad=True), drawn(64)
    low = weight.to(BF16) if is_low else weight
    ((low * x.to(low.dtype)) + (low * x.to(low.dtype)) * 1e-4).sum().backward()


def all_infinite(scale: float) -> None:
    (drawn(1000).abs() + 300).to(FP16) * scale


def cast_small(scale: float) -> None:
    (drawn(1000) * scale).half()


def epsilon(value: float) -> None:
    x = torch.cat([torch.zeros(4, 8), drawn(4, 8)]).to(FP16)
    x / (x.norm(dim=-1, keepdim=True) + value)


def chosen(dtype: torch.dtype) -> None:
    torch.where(LOW > 0, LOW.exp(), LOW.to(dtype))


def towers(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Linear(4, 4, dtype=each) for each in (BF16, BF16, dtype)])
    model.forward = lambda: None
    model()


def experts(dtype: torch.dtype) -> None:
    """Equal ones, of which one gets another dtype."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(drawn(4, 4).to(BF16))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.to(x.dtype)

    model = nn.ModuleList([Expert(), Expert(), Expert()])
    model.forward = lambda x: [
        each(x.to(d)) for each, d in zip(model, (BF16, BF16, dtype), strict=True)
    ]
    model(drawn(2, 4))


#: Ways to add 3,000 values to two.
SCATTERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "index_put_": lambda out, at, x: out.index_put_((at,), x, accumulate=True),
    "index_put": lambda out, at, x: torch.index_put(out, (at,), x, True),
    "put_": lambda out, at, x: out.put_(at, x, accumulate=True),
    "index_reduce": lambda out, at, x: out.index_reduce(0, at, x, "mean"),
    "segment_reduce": lambda out, at, x: torch.segment_reduce(x, "sum", lengths=at.bincount()),
    "embedding": lambda out, at, x: F.embedding(at, _learnt(out[:, None])).backward(x[:, None]),
    "index": lambda out, at, x: _learnt(out)[at].backward(x),
    "take": lambda out, at, x: torch.take(_learnt(out), at).backward(x),
}


def _learnt(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


def scattered(way: str, dtype: torch.dtype, count: int = 3000) -> None:
    SCATTERS[way](
        torch.zeros(2, dtype=dtype), torch.arange(count) % 2, drawn(count).abs().to(dtype)
    )


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("way", SCATTERS)
def test_sums_at_indices_are_found(way: str) -> None:
    assert codes(lambda: scattered(way, BF16)) == ["HP104"]
    assert not codes(lambda: scattered(way, torch.float32))
    assert not codes(lambda: scattered(way, BF16, 4))


PEAKS = torch.arange(2048) % 512 == 511

#: Ways to add up in one element what windows share.
WINDOWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "unfold": lambda x, size: x.unfold(-1, size, 1),
    "unfold, images": lambda x, size: F.unfold(x[:, :, None], (1, size)),
    "average pool": lambda x, size: F.avg_pool1d(x, size, 1),
    "maximum pool": lambda x, size: F.max_pool2d((x * PEAKS.to(x.dtype))[None], (1, size), 1),
}


@pytest.mark.parametrize("way", WINDOWS)
def test_sums_of_what_windows_share_are_found_in_the_backward(way: str) -> None:
    def run(dtype: torch.dtype, size: int = 512) -> None:
        found = WINDOWS[way](_learnt(torch.ones(1, 2, 2048, dtype=dtype)), size)
        found.backward(drawn(*found.shape).abs().to(dtype))

    assert codes(lambda: run(BF16)) == ["HP104"]
    assert not codes(lambda: run(torch.float32))
    assert not codes(lambda: run(BF16, 2))


def test_kernels_that_add_at_indices_are_known_by_their_schemas() -> None:
    names = {each.name for each in torch._C._jit_get_all_schemas() if each.name[:6] == "aten::"}
    packets = [getattr(torch.ops.aten, name[6:], None) for name in names]
    found = {
        packet.__name__.strip("_")
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for each in packet.overloads()
        if scatters_terms(getattr(packet, each))
    }
    assert found >= {
        "index_put", "index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "segment_reduce",
        "put", "embedding_bag", "embedding_dense_backward", "unfold_backward", "col2im", "avg_pool2d_backward",
    }  # fmt: skip
    assert not found & {
        "index_copy",
        "gather",
        "index_select",
        "embedding",
        "topk",
        "convolution_backward",
    }


def stepped_by_hand(dtype: torch.dtype) -> None:
    weight = nn.Parameter(drawn(16, 16).to(dtype))
    for _ in range(4):
        F.linear(drawn(4, 16).to(dtype), weight).sum().backward()
        with torch.no_grad():
            weight -= 1e-5 * weight.grad


def updated_once(way: str, dtype: torch.dtype) -> None:
    """By one small step of one of `UPDATES`."""
    weight = nn.Parameter(drawn(16, 16).sign().to(dtype))
    (gradient,) = torch.autograd.grad(F.linear(drawn(4, 16).to(dtype), weight).sum(), [weight])
    with torch.no_grad():
        UPDATES[way](weight, 1e-5 * gradient)


#: Ways to add a small tensor to a weight.
UPDATES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "sub_": lambda w, u: w.sub_(u),
    "add_ to data": lambda w, u: w.data.add_(u, alpha=-2),
    "isub": lambda w, u: w.__isub__(u),
    "lerp_": lambda w, u: w.lerp_(u, 1e-3),
    "mul_ and add_": lambda w, u: w.mul_(1 - 1e-4).add_(u),
    "addcdiv_": lambda w, u: w.addcdiv_(u, torch.full_like(u, 2.0)),
    "addcmul_": lambda w, u: w.addcmul_(u, u),
    "data": lambda w, u: setattr(w, "data", w.data - u),
    "copy of an upcast weight": lambda w, u: w.copy_(w.float() - u.float()),
    "copy of a low average": lambda w, u: w.copy_(w * 0.9999 + u),
    "foreach": lambda w, u: torch._foreach_sub_([w], [u]),
    "foreach lerp": lambda w, u: torch._foreach_lerp_([w], [u], 1e-3),
}


@pytest.mark.parametrize("way", UPDATES)
def test_weights_that_one_update_does_not_move_are_found_without_an_optimizer(way: str) -> None:
    with hmpx.lint() as findings:
        updated_once(way, BF16)
    assert {each.code for each in findings} == {"HP107"}
    assert all(f'"{way}"' in _line(each) or "UPDATES[way]" in _line(each) for each in findings)
    assert not codes(lambda: updated_once(way, torch.float32))


def _line(finding: hmpx.Finding) -> str:
    path, _, line = finding.location.rpartition(":")
    return linecache.getline(path, int(line))


def target_after_the_step(dtype: torch.dtype) -> None:
    """An average of weights that follows the optimizer's step."""
    online, target = nn.Linear(16, 16), nn.Linear(16, 16, dtype=dtype)
    optimizer = torch.optim.SGD(online.parameters(), lr=1e-2)
    for _ in range(2):
        with torch.no_grad():
            target(drawn(4, 16).to(dtype))
        online(drawn(4, 16)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast.to(dtype), 1e-4)


def decayed(dtype: torch.dtype) -> None:
    class Decay(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            for each in self.param_groups[0]["params"]:
                each.data.mul_(0.9999)

    Decay(nn.Linear(16, 16).to(dtype).parameters(), {}).step()


def position_embedding(dtype: torch.dtype) -> None:
    """As large as the stream."""
    LOW.exp() + nn.Parameter(drawn(*LOW.shape).to(dtype))


def unscaled_by_hand(scale: float) -> None:
    """Without a module, and without gradients at the end."""
    weight = drawn(16, 16).requires_grad_()
    (F.linear(drawn(4, 16).to(FP16), weight.to(FP16)).float().mean() * 1e-4 * scale).backward()
    with torch.no_grad():
        weight -= 1e-4 * weight.grad
    weight.grad = None


def loaded_and_trained(is_rounded: bool) -> None:
    layer = nn.Linear(64, 16)
    if is_rounded:
        layer.load_state_dict({name: each.to(BF16) for name, each in layer.state_dict().items()})
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    layer(drawn(2, 64)).square().sum().backward()
    optimizer.step()


def functional_weight(is_rounded: bool) -> None:
    weight = drawn(16, 64)
    weight = (weight.to(BF16).float() if is_rounded else weight).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-2)
    F.linear(drawn(2, 64), weight).square().sum().backward()
    optimizer.step()


def bin_edges(dtype: torch.dtype) -> None:
    torch.linspace(0, 1, 1001).to(dtype)


@pytest.mark.parametrize(
    ("program", "wrong", "right", "code"),
    [
        *[(each, BF16, torch.float32, "HP102") for each in (counted, counted_by_an_op, positions_of_a_mask)],
        *[(each, BF16, torch.float32, "HP102") for each in (whole_steps, many_steps, copied_positions)],
        *[(each, BF16, torch.float32, "HP104") for each in (average_in_place, average_by_lerp)],
        *[(each, BF16, torch.float32, "HP104") for each in (average_of_a_list, micro_batches)],
        (position_embedding, torch.float32, BF16, "HP105"),
        *[(each, BF16, torch.float32, "HP107") for each in (stepped_by_hand, target_after_the_step)],
        (decayed, BF16, torch.float32, "HP107"),
        (chosen, torch.float32, BF16, "HP108"),
        (towers, torch.float32, BF16, "HP108"),
        (experts, torch.float32, BF16, "HP108"),
        (all_infinite, 300.0, 2.0, "HP109"),
        (cast_small, 1e-6, 1.0, "HP109"),
        (cast_small, 1e-9, 1.0, "HP109"),
        (epsilon, 1e-8, 1e-3, "HP109"),
        (unscaled_by_hand, 1.0, 2.0**16, "HP110"),
        (loaded_and_trained, True, False, "HP111"),
        (functional_weight, True, False, "HP111"),
        (bin_edges, BF16, torch.float32, "HP111"),
    ],
)  # fmt: skip
def test_other_spellings_alarm_until_the_program_is_mended(
    program: Callable[[object], object], wrong: object, right: object, code: str
) -> None:
    assert {*codes(lambda: program(wrong))} == {code}
    assert not codes(lambda: program(right))


def compensated() -> None:
    """Kahan's sum."""
    total = lost = torch.zeros(8, dtype=BF16)
    for seed in range(300):
        term = drawn(8, seed=seed).abs().to(BF16) - lost
        new = total + term
        lost, total = (new - total) - term, new


def straight_through() -> None:
    x = (drawn(64, 64).to(BF16) * 1.1).requires_grad_()
    (x + ((x * 4).round() / 4 - x).detach()).sum().backward()


def master_weights() -> None:
    class Masters(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for each in self.param_groups[0]["params"]:
                master = self.state[each].setdefault("master", each.float())
                each.copy_(master.sub_(each.grad, alpha=1e-4))

    train(Masters)


def stochastic_rounding() -> None:
    class Stochastic(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for each in self.param_groups[0]["params"]:
                bits = (each.float() - 1e-4 * each.grad.float()).view(torch.int32)
                bits += torch.randint_like(bits, 0, 1 << 16)
                each.copy_((bits & -(1 << 16)).view(torch.float32))

    train(Stochastic)


def overwritten(dtype: torch.dtype) -> None:
    """Writes the last of many values."""
    out = torch.ones(2, dtype=dtype)
    out[torch.arange(3000) % 2] += drawn(3000).abs().to(dtype)


def by_hand(step: Callable[[nn.Parameter, Tensor], object]) -> None:
    weight = nn.Parameter(drawn(16, 16).to(BF16))
    for _ in range(3):
        (gradient,) = torch.autograd.grad((drawn(4, 16).to(BF16) @ weight).sum(), [weight])
        with torch.no_grad():
            step(weight, 1e-5 * gradient)


def masters_by_hand() -> None:
    masters: list[Tensor] = []

    def step(weight: nn.Parameter, update: Tensor) -> None:
        masters[:] = masters or [weight.float()]
        weight.copy_(masters[0].sub_(update))

    by_hand(step)


def new_masters_by_hand() -> None:
    masters: list[Tensor] = []

    def step(weight: nn.Parameter, update: Tensor) -> None:
        masters[:] = [(masters or [weight.float()])[0] - update]
        weight.copy_(masters[0])

    by_hand(step)


def stochastic_rounding_by_hand() -> None:
    def step(weight: nn.Parameter, update: Tensor) -> None:
        noise = (torch.rand(weight.shape) - 0.5) * 2**-8 * weight.float().abs()
        weight.copy_(weight.float() - update + noise)

    by_hand(step)


class Compensated(torch.optim.Optimizer):
    """Keeps what each update loses, and adds it to the next."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for each in self.param_groups[0]["params"]:
            lost = self.state[each].setdefault("lost", torch.zeros_like(each))
            compensate(each, lost.sub_(each.grad, alpha=1e-5))


def compensate(weight: Tensor, lost: Tensor) -> None:
    before = weight.detach().clone()
    weight.data.add_(lost)
    lost.copy_(before.sub_(weight.data).add_(lost))


def compensated_by_hand() -> None:
    lost = torch.zeros(16, 16, dtype=BF16)
    by_hand(lambda weight, update: compensate(weight, lost.sub_(update)))


#: Updates of a low weight that keep what is lost, as optimizers of several packages write them.
COMPENSATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "new sum": lambda weight, lost: _kahan(weight, lost, weight + lost),
    "old minus new": lambda weight, lost: lost.add_(weight.clone().sub_(weight.add_(lost))),
    "new minus old": lambda weight, lost: lost.sub_(-(weight.clone() - weight.add_(lost))),
    "lists": lambda weight, lost: torch._foreach_add_(
        [lost], torch._foreach_sub([weight.clone()], [weight.add_(lost)])
    ),
}


def _kahan(weight: Tensor, lost: Tensor, total: Tensor) -> None:
    lost.sub_(total - weight)
    weight.copy_(total)


@pytest.mark.parametrize("way", [*COMPENSATIONS, "none"])
def test_optimizers_that_compensate_are_no_findings(way: str) -> None:
    class Optimizer(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for each in self.param_groups[0]["params"]:
                lost = self.state[each].setdefault("lost", torch.zeros_like(each))
                lost.sub_(each.grad, alpha=1e-5)
                if way == "none":
                    each.add_(lost)
                else:
                    COMPENSATIONS[way](each, lost)

    model = nn.Linear(16, 16).to(BF16)
    optimizer = Optimizer(model.parameters(), {})

    def run() -> None:
        for seed in range(3):
            model(drawn(4, 16, seed=seed).to(BF16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert {*codes(run)} == ({"HP107"} if way == "none" else set())


def far_from_a_teacher() -> None:
    """An error of 0.9% in a gradient."""
    x = drawn(16, 32, seed=1).to(BF16)
    logits = x @ (drawn(32, 50, seed=2) * 2).to(BF16), x @ (drawn(32, 50, seed=1) * 0.3).to(BF16)
    target, found = (F.log_softmax(each.float() / 2, -1) for each in logits)
    F.kl_div(found, target, log_target=True, reduction="batchmean")


def gradients_of_zero(model: nn.Module, lose: Callable[[Tensor], Tensor], count: int = 4) -> None:
    with torch.autocast("cpu", FP16):
        found = model(drawn(count, 16))
    lose(found.float()).sum().backward()


def zero_head() -> nn.Module:
    head = nn.Linear(16, 4)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Linear(16, 16), head)


def nearest_code() -> None:
    """The distances of the codes that are chosen are 0."""
    codebook, ids = drawn(16, 32).to(BF16), torch.arange(64) % 16
    found = F.one_hot(ids, 16).to(BF16) @ codebook
    (found - codebook[ids]).float().square().mean()


def scaled_mask() -> None:
    mask = (drawn(64, 64) > 0).half()
    (1 - mask) * -1e4 + mask * 1e-5


def tiny_mask() -> None:
    mask = (drawn(64, 64) > 0).half()
    (1 - mask) * 1e-6


def converged() -> None:
    by_hand(lambda weight, update: weight.sub_(update * 0))


def train(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Linear(16, 16).to(BF16)
    optimizer = kind(model.parameters(), {})
    for _ in range(2):
        model(drawn(4, 16).to(BF16)).square().sum().backward()
        optimizer.step()


def promoted_on_purpose() -> None:
    (LOW.exp() * drawn(1, 128)).to(BF16)


def promoted_into_fp32() -> None:
    stream = drawn(64, 128) + 1
    for scale in (drawn(64, 1), drawn(64, 1, seed=1)):
        stream = stream + LOW.exp() * scale


def table_of_a_schedule() -> None:
    torch.linspace(1, 0.98, 1000).cumprod(0).sqrt().flip(0).to(BF16)


def first_of_equals() -> None:
    """A rounding makes a few fall on others."""
    F.linear(LOW, drawn(64, 128, seed=1).to(BF16)).argmax(-1)


def mostly_fp32() -> None:
    """A model of its own."""
    F.linear(drawn(64, 128), drawn(256, 128))
    F.linear(LOW, drawn(16, 128).to(BF16))


def upcast_for_a_residual() -> None:
    w = drawn(128, 128)
    with torch.autocast("cpu", BF16):
        hidden = F.relu(F.linear(drawn(64, 128), w).float())
        F.linear(hidden, w) + hidden * 1.01
        hidden = F.relu(F.linear(drawn(64, 128), w).float())
        kept = hidden * 1.01
        F.linear(hidden, w) + kept


def compensated_by_its_remainder() -> None:
    def step(self: Any) -> None:
        for each in self.param_groups[0]["params"]:
            rest = self.state[each].setdefault("rest", torch.zeros_like(each))
            with torch.no_grad():
                new = each.float() + rest.float() - 1e-5 * each.grad.float()
                each.copy_(new)
                rest.copy_(new - each.float())

    train(type("Compensating", (torch.optim.Optimizer,), {"step": step}))


def pruned() -> None:
    clipped(False, lambda each, limit: [p.grad.mul_((p > 0).float()) for p in each])


def evaluated_in_low() -> None:
    layer = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for _ in range(2):
        layer(drawn(4, 16)).square().sum().backward()
        optimizer.step()
        kept = {name: each.clone() for name, each in layer.state_dict().items()}
        layer.load_state_dict({name: each.to(BF16) for name, each in kept.items()})
        layer.load_state_dict(kept)


def probabilities() -> None:
    torch.sigmoid(drawn(64) + 6).to(BF16)


def pooled() -> None:
    images = F.conv2d(drawn(2, 3, 16, 16).to(BF16), drawn(8, 3, 3, 3).to(BF16))
    F.max_pool2d(images, 2, return_indices=True)
    F.relu(images.flatten()).nonzero()


@pytest.mark.parametrize(
    "program",
    [
        pruned,
        evaluated_in_low,
        probabilities,
        pooled,
        upcast_for_a_residual,
        compensated_by_its_remainder,
        promoted_into_fp32,
        table_of_a_schedule,
        first_of_equals,
        mostly_fp32,
        compensated,
        straight_through,
        master_weights,
        stochastic_rounding,
        promoted_on_purpose,
        lambda: tied_weight(True),
        lambda: overwritten(BF16),
        masters_by_hand,
        new_masters_by_hand,
        stochastic_rounding_by_hand,
        converged,
        compensated_by_hand,
        far_from_a_teacher,
        nearest_code,
        scaled_mask,
        tiny_mask,
        lambda: gradients_of_zero(nn.Linear(16, 16), lambda found: found * 0),
        lambda: gradients_of_zero(nn.Linear(16, 16), lambda found: found.clamp(99, 100)),
        lambda: gradients_of_zero(nn.Linear(16, 16), Tensor.square, 0),
        lambda: gradients_of_zero(zero_head(), Tensor.square),
    ],
)
def test_healthy_programs_are_no_findings(program: Callable[[], object]) -> None:
    assert not codes(program)


def test_calls_that_are_reported_keep_no_tensor() -> None:
    x, scale = drawn(8, 16).to(BF16), torch.ones(1, 16)
    with hmpx.lint(), torch.no_grad():
        results = [weakref.ref(x.exp() * scale) for _ in range(1500)]
        assert sum(each() is not None for each in results) < 1100


def test_flops_in_inference_mode() -> None:
    def run() -> None:
        with torch.inference_mode():
            x, w = drawn(64, 128), drawn(512, 128)
            hidden = F.linear(x, w)
            with torch.autocast("cpu", BF16):
                F.linear(hidden, w.T[:16])

    assert codes(run) == ["HP105"]


def variance_far_from_zero(mean: float) -> None:
    x = drawn(128, 3) + mean
    (x * x).mean(0) - x.mean(0) * x.mean(0)


def tiny_growth(is_wrong: bool) -> None:
    rate = drawn(64).abs() * 2e-8
    torch.exp(rate * 2) - 1 if is_wrong else torch.expm1(rate * 2)


def versine(is_wrong: bool) -> None:
    """Well conditioned, and the difference is not."""
    x = (drawn(64).clamp(-1, 1) * 0.05 + 0.3).to(BF16)
    1 - x.cos() if is_wrong else 2 * (x / 2).sin().square()


def penalty(dtype: torch.dtype) -> None:
    """One term of a sum is taken away from it, which compensates nothing."""
    start = drawn(64).to(dtype)
    new = start + drawn(64, seed=2).to(dtype) * 0.01
    (new - start).square().sum()


def decayed(dtype: torch.dtype) -> None:
    weight = nn.Parameter(drawn(32, 32).to(dtype))
    with torch.no_grad():
        weight.mul_(1 - 5e-4)


def slow_statistics(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm1d(8, momentum=0.002).to(dtype)
    for seed in range(12):
        norm((drawn(16, 8, seed=seed) / 2 + 2).to(dtype))


def second_loss(is_scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    with torch.autocast("cpu", FP16):
        losses = [each(drawn(4, 16)).float().square().mean() for each in (first, second)]
    scaler.scale(losses[0]).backward()
    loss = losses[1] * 1e-4
    (scaler.scale(loss) if is_scaled else loss).backward()


def promoted_to_products(is_cast: bool) -> None:
    """A cast for one call undoes no promotion of the stream."""
    x = LOW.exp() * drawn(1, 128)
    low = x.to(BF16)
    (low if is_cast else x) @ (low if is_cast else x).T


def rounded_and_upcast(is_used: bool) -> None:
    """What was lost is used."""
    x = drawn(64, 8)
    low = x.to(BF16)
    high = low.view(-1).float().view(64, 8)
    x - high if is_used else high.exp()


def upcast_to_be_rounded(is_used: bool) -> None:
    layer, x = nn.Linear(128, 8), LOW.exp()
    with torch.autocast("cpu", BF16):
        wide = x.float()
        layer(wide)
        wide.sqrt() if is_used else None


def probabilities_of_survival(dtype: torch.dtype) -> None:
    (drawn(4, 64).sigmoid().to(dtype).cumprod(1) > 0).sum(1)


def iterated(is_wrong: bool) -> None:
    """Near a fixed point, steps are as small as the roundings of its inputs."""
    x = drawn(64).abs()
    for _ in range(40):
        x, before = x.cos(), x
        x - before
    if is_wrong:
        variance_far_from_zero(20000.0)


@pytest.mark.parametrize(
    ("program", "wrong", "right", "code"),
    [
        (variance_far_from_zero, 20000.0, 0.5, "HP103"),
        (tiny_growth, True, False, "HP103"),
        (versine, True, False, "HP103"),
        (penalty, BF16, torch.float32, "HP103"),
        (iterated, True, False, "HP103"),
        (slow_statistics, BF16, torch.float32, "HP104"),
        (promoted_to_products, False, True, "HP105"),
        (rounded_and_upcast, False, True, "HP106"),
        (upcast_to_be_rounded, False, True, "HP106"),
        (decayed, BF16, torch.float32, "HP107"),
        (probabilities_of_survival, FP16, torch.float32, "HP109"),
        (second_loss, False, True, "HP110"),
    ],
)  # fmt: skip
def test_losses_are_told_from_their_look_alikes(
    program: Callable[[Any], object], wrong: object, right: object, code: str
) -> None:
    assert codes(lambda: program(wrong)) == [code]
    assert not codes(lambda: program(right))


def test_the_effect_on_a_result_that_is_almost_zero_is_bounded() -> None:
    x = drawn(4096, seed=1)
    with hmpx.lint(select=["HP101"]) as findings:
        (x - x.mean()).to(BF16).float().sum()
    (found,) = findings
    assert found.effect == 1000
    assert "effect over 1,000; 0 with: no cast to bf16" in str(found)


def test_a_remedy_has_no_line_that_gains_nothing() -> None:
    """The places that are sampled are as large as the image; the image is rounded as usual."""
    image, places = drawn(1, 1, 256, 256, seed=1), drawn(1, 64, 64, 2, seed=2).clamp(-0.9, 0.9)
    with hmpx.lint(select=["HP101"]) as findings:
        given = image.exp().to(BF16).float(), places.add(0.01).to(BF16).float()
        F.grid_sample(*given, align_corners=False)
    (found,) = findings
    assert found.remedied < 0.01 < found.effect
    assert found.evidence.count("rounded in") == 1
    assert found.remedy.count("no cast to bf16") == 1


def test_an_optimizer_that_compensates_runs() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(16, 16).to(BF16)
        optimizer = Compensated(model.parameters(), {})
        for seed in range(3):
            model(drawn(4, 16, seed=seed).to(BF16)).square().sum().backward()
            optimizer.step()
        return [*model.parameters()]

    expected = run()
    with hmpx.lint():
        assert all(map(torch.equal, run(), expected))


def test_gradients_that_all_underflow_are_found() -> None:
    with hmpx.lint(select=["HP110"]) as findings:
        unscaled(1e-6)
    (found,) = findings
    assert found.code == "HP110"
    assert found.evidence == "100% of the gradients are zero in fp16, without a loss scaler"


def test_zero_gradients_without_a_backward_are_no_finding() -> None:
    model = nn.Linear(16, 16).to(FP16)
    model(drawn(4, 16).to(FP16)).float().mean().backward()
    model.zero_grad(set_to_none=False)
    assert not codes(lambda: model(drawn(4, 16).to(FP16)))


def test_a_step_without_a_learning_rate_is_no_finding() -> None:
    def run(lr: float) -> None:
        model = nn.Linear(16, 16).to(BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model(drawn(4, 16).to(BF16)).sum().backward()
        optimizer.step()

    assert "HP107" in codes(lambda: run(1e-4))
    assert "HP107" not in codes(lambda: run(0.0))


def test_layers_of_a_kind_are_one_finding() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.arange(5000, dtype=BF16)
            return x

    with hmpx.lint() as findings:
        nn.Sequential(Layer(), Layer(), Layer())(torch.ones(2))
    (found,) = findings
    assert (found.module, found.calls) == ("0", 3)
    assert "arange in 0 (3 calls): " in str(found)


def test_rounding_that_the_remedy_would_leave_is_no_finding() -> None:
    """Below torch.autocast the inputs of a product are rounded, too, and here that error is larger."""
    x, weight = drawn(64, 128) + 30, drawn(64, 128, seed=1)
    weight -= weight.mean(-1, keepdim=True)
    with torch.autocast("cpu"):
        assert not codes(lambda: F.linear(x, weight).float().softmax(-1))


def test_masks_are_no_findings() -> None:
    least = torch.finfo(torch.float32).min
    mask = torch.where(drawn(8, 8) > 0, 0.0, least)
    with torch.autocast("cpu"):
        found = codes(lambda: LOW[:8, :8] + mask) + codes(
            lambda: LOW.masked_fill(LOW > 0, torch.finfo(BF16).max)
        )
    assert not {"HP102", "HP109"} & {*found}


def test_a_finding_has_the_place_the_proof_the_measured_effect_and_a_tried_remedy() -> None:
    with hmpx.lint() as findings:
        softmax_of_scores(BF16)
    (found,) = findings
    assert found.location.startswith(__file__)
    assert "rounded in matmul (" in found.evidence
    assert found.effect > 0.01 > 4 * found.remedied
    assert found.remedy == "matmul output=float32"
    assert f"HP101 late upcast: softmax: {found.evidence}" in str(findings)


PACKAGE = """
import torch

def scores(x):
    return (x @ (x.T * 4)).float().softmax(-1)

def scaled(x, factor):
    return x * factor
"""


@pytest.fixture
def package(tmp_path: Path) -> Any:
    """An installed package."""
    path = tmp_path / "site-packages" / "installed_scores.py"
    path.parent.mkdir()
    path.write_text(PACKAGE, "utf-8")
    spec = importlib.util.spec_from_file_location("installed_scores", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_line_is_the_programs_where_a_package_is_called(package: Any) -> None:
    with hmpx.lint() as findings:
        package.scores(LOW)
    (found,) = findings
    assert found.location.startswith(__file__)
    assert found.evidence.endswith("; at installed_scores.py:5")


def test_dtypes_that_autocast_and_a_package_choose_are_no_findings(package: Any) -> None:
    scale = nn.Parameter(torch.full((128,), 1.1))
    with torch.autocast("cpu", BF16):
        assert not codes(lambda: package.scaled(LOW, scale))
        assert codes(lambda: LOW * scale) == ["HP105"]
    assert codes(lambda: package.scaled(LOW, scale)) == ["HP105"]


def test_unscaled_gradients_are_found_at_the_backward() -> None:
    with hmpx.lint(select=["HP110"]) as findings:
        unscaled(1.0)
    (found,) = findings
    line = int(found.location.rpartition(":")[2])
    assert ".backward()" in linecache.getline(__file__, line)


def test_observers_do_not_warn_of_casts(recwarn: pytest.WarningsRecorder) -> None:
    """They cast nothing, and nobody called convert or revert."""
    plain = torch.index_select
    try:
        with hmpx.lint():
            torch.jit.script(swish)
            torch.index_select = lambda *args: plain(*args)
    finally:
        torch.index_select = plain
    assert not [each for each in recwarn if issubclass(each.category, hmpx.HmpxWarning)]


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def test_lines_of_the_program_can_ignore_codes() -> None:
    with hmpx.lint() as findings:
        torch.arange(3000, dtype=BF16)  # hmpx: ignore[HP102]
        torch.arange(3000, dtype=BF16)  # hmpx: ignore
        torch.arange(3000, dtype=BF16)  # hmpx: ignore[HP101]
    assert len(findings) == 1
    with hmpx.lint(ignore=["HP102"]) as ignoring, hmpx.lint(select=["HP101"]) as selecting:
        torch.arange(3000, dtype=BF16)
    assert not len(ignoring)
    assert not len(selecting)
    with pytest.raises(hmpx.OptionError, match="HP999"):
        hmpx.lint(select=["HP999"])


def test_steps_between_the_checked_ones_are_not_looked_at() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hmpx.lint(every=3) as findings:
        for _ in range(7):
            torch.ones(300).cumsum(0).to(BF16)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    (found,) = findings
    assert (found.code, found.calls) == ("HP102", 4)  # in steps 0, 1, 3 and 6


def test_a_compiled_function_that_calls_a_module_is_run() -> None:
    """Torch has its dispatch keys back where a compiled function ends: lint's mode may not end within one."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    with hmpx.lint():
        for _ in range(5):
            loss(torch.ones(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.ones(2).sum() == 2


def test_infinite_and_moved_values_do_not_stop_a_program() -> None:
    x = torch.tensor([0.0, 1.0, 3.0, float("inf")], dtype=FP16)
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def give_new_memory(*given: object) -> None:
        for each in model.parameters():
            each.data = each.data.clone()

    optimizer.register_step_pre_hook(give_new_memory)
    shaped = torch.ones(1, 4, 4).half()
    with hmpx.lint() as findings:
        found = [x * 10000, x + x, x.cumsum(0)]
        model(torch.ones(2, 4).bfloat16()).sum().backward()
        optimizer.step()
        shaped.set_(torch.ones(3).half())
        torch.add(shaped, shaped, out=shaped)
    assert found[0].tolist() == [0.0, 10000.0, 30000.0, float("inf")]
    assert shaped.tolist() == [2.0] * 3
    assert len(findings) == 0


def test_operators_of_others_that_have_running_averages() -> None:
    """They are given or left out; float64 may have no kernel."""
    library = torch.library.Library("lint_test", "DEF")
    library.define("shift(Tensor x, Tensor(a!)? running_mean=None) -> Tensor")

    def shift(x: Tensor, running_mean: Tensor | None = None) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("no kernel for float64")
        if running_mean is not None:
            running_mean.mul_(0.9)
        return x + 1

    library.impl("shift", shift, "CPU")
    x = torch.ones(4, dtype=BF16)
    with hmpx.lint():
        found = (
            torch.ops.lint_test.shift(x),
            torch.ops.lint_test.shift(x, torch.ones(4, dtype=BF16)),
        )
    assert all(torch.equal(each, x + 1) for each in found)


def test_threads_that_train_models_of_their_own() -> None:
    done = []

    def train() -> None:
        model = nn.Linear(8, 4).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            model(torch.ones(32, 8).bfloat16()).sum().backward()
            optimizer.step()
        done.append(None)

    with hmpx.lint():
        threads = [threading.Thread(target=train) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(done) == 3


def test_what_the_first_step_hides_is_found() -> None:
    """A copy of the model equals it in the first step."""
    model, reference = nn.Linear(16, 100), nn.Linear(16, 100)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hmpx.lint() as findings:
        for _ in range(3):
            x, y = drawn(4, 200, 16), torch.randint(0, 100, (4, 200, 1))
            scores = [
                each(x).log_softmax(-1).gather(-1, y).sum((1, 2)) for each in (model, reference)
            ]
            difference = scores[0].to(BF16) - scores[1].detach().to(BF16)
            F.softplus(-0.1 * difference.float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "HP103" in {each.code for each in findings}


def test_results_and_gradients_keep_their_bits() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.5), nn.Linear(32, 8)
        )
        with torch.autocast("cpu"):
            result = model(drawn(4, 32))
        F.cross_entropy(result, torch.arange(4)).backward()
        return [result, *[each.grad for each in model.parameters() if each.grad is not None]]

    plain = run()
    with hmpx.lint():
        observed = run()
    assert all(map(torch.equal, plain, observed))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_running_statistics_are_updated_once(norm: str, dtype: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        mean, var = torch.zeros(4), torch.ones(4)
        function = getattr(F, norm)
        option = {"training": True} if norm == "batch_norm" else {"use_input_stats": True}
        with torch.autocast("cpu", dtype):
            function(
                (drawn(6, 4) @ torch.eye(4)).unsqueeze(-1).expand(6, 4, 3), mean, var, **option
            )
        return [mean, var]

    expected = run()
    with hmpx.lint():
        assert all(map(torch.equal, run(), expected))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    "call",
    [
        lambda out: torch.add(out, torch.ones_like(out), out=out),
        lambda out: torch.mul(out, 2, out=out),
        lambda out: torch.arange(0, out.numel(), out=out.view(-1)),
        lambda out: torch.linspace(0, 1, out.numel(), out=out.view(-1)),
        lambda out: torch.cumsum(out.clone(), 0, out=out),
        lambda out: torch.sum(out.clone(), 0, keepdim=True, out=out[:1]),
    ],
)
def test_an_out_tensor_is_written_once(
    call: Callable[[torch.Tensor], object], dtype: torch.dtype
) -> None:
    expected, found = drawn(8, 4).to(dtype), drawn(8, 4).to(dtype)
    for _ in range(5):
        call(expected)
    with hmpx.lint():
        for _ in range(5):
            call(found)
    assert torch.equal(found, expected)


def test_the_programs_hooks_on_saved_tensors_see_its_own_alone() -> None:
    model, packed = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    def run() -> int:
        packed.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each)
        with hooks, torch.autocast("cpu"):
            model(torch.ones(2, 4)).float().log_softmax(-1).sum().backward()
        return len(packed)

    expected = run()
    with hmpx.lint():
        assert run() == expected


def test_tensors_can_be_swapped_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a weak reference can't."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = nn.Linear(4, 4)
    with hmpx.lint() as findings:
        model(torch.ones(2, 4)).sum().backward()
    assert model.half().weight.dtype is FP16
    assert not findings


def low_calls_with_out() -> Iterator[tuple[str, Callable[[torch.Tensor], object], torch.Tensor]]:
    """Yields torch's ops that take ``out=``: the name, a call on one sample, and the result."""
    for op in op_db:
        if not op.supports_out or BF16 not in op.dtypes:
            continue
        sample = next(iter(sample_inputs(op, BF16)))

        def call(out: torch.Tensor | None, op: Any = op, sample: Any = sample) -> Any:
            torch.manual_seed(0)
            given = {} if out is None else {"out": out}
            return op(sample.input, *sample.args, **sample.kwargs, **given)

        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # no kernel
            result = call(None)
            if isinstance(result, torch.Tensor) and result.dtype is BF16:
                call(torch.empty_like(result))
                yield op.name, call, result


@pytest.mark.filterwarnings("ignore")
def test_each_op_writes_its_out_tensor_as_without_lint() -> None:
    calls = list(low_calls_with_out())
    expected = [torch.zeros_like(result) for _, _, result in calls]
    for (_, call, _), out in zip(calls, expected, strict=True):
        call(out)
    assert len(calls) > 150
    with hmpx.lint():
        for (name, call, _), out in zip(calls, expected, strict=True):
            found = torch.zeros_like(out)
            call(found)
            assert torch.equal(found.nan_to_num(), out.nan_to_num()), name
