"""`hmpx.lint`: each rule finds its program, and is silent about the mended one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from tests.upstream_bugs import BUGS, Bug, drawn

BF16, FP16 = torch.bfloat16, torch.float16
LOW = drawn(64, 128).to(BF16)


def codes(run: Callable[[], object]) -> list[str]:
    with hmpx.lint() as findings:
        run()
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


@pytest.mark.parametrize(
    ("program", "wrong", "right", "code"),
    [
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
}


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
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_cancellations_are_found(difference: str) -> None:
    """The calls after them are not reported as well."""
    x = drawn(64, 128) / 4

    def run(dtype: torch.dtype) -> None:
        DIFFERENCES[difference](x.to(dtype)).float().square().mean()

    assert codes(lambda: run(BF16)) == ["HP103"]
    assert not codes(lambda: run(torch.float32))


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
    assert (found.code, found.calls) == ("HP102", 3)


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
