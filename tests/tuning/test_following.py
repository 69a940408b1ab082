"""What follows its inputs: found where it is enough, written so that it loads, never behind a shipped list."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx.tuning.candidates import Candidate, Kept, assigned, is_following, policy_of

from .oracles import Flow, flow, run_flow

RUNS = 20

# --- the search, on simulated programs ---------------------------------------------------------------


def shipped_sets(program: Flow) -> list[Kept]:
    """Returns sets as lists are: a few ops in low precision, the others follow; or some in fp32."""
    names = program.names
    return [
        frozenset(f"{name}=follows" for name in names[2:]),
        frozenset([names[0], *(f"{name}=follows" for name in names[3:])]),
        frozenset(names[1:]),
    ]


@pytest.mark.parametrize("seed", range(RUNS))
def test_no_shipped_set_that_passes_has_more_in_low_precision(seed: int) -> None:
    """At the error of one, none has more; what is found passes, and nothing can be taken out of it."""
    program = flow(seed)
    shipped = shipped_sets(program)
    for each in shipped:
        tolerance = program.outcome(each).error
        if program.outcome(frozenset()).error <= tolerance:
            continue
        kept, evaluated = run_flow(program, tolerance, shipped)
        assert kept in evaluated
        assert program.outcome(kept).error <= tolerance
        assert all(program.outcome(kept - {member}).error > tolerance for member in kept)
        assert all(kept - {member} in evaluated for member in kept)
        for other in shipped:
            if program.outcome(other).error <= tolerance:
                assert program.kept_work(kept) <= program.kept_work(other) + 1e-9


def test_what_is_found_costs_little_more_than_the_best_of_all_states() -> None:
    """By brute force over low precision, following and fp32 of each op."""
    gaps, counts, followed = [], [], 0
    for seed in range(RUNS):
        program = flow(seed, ops=5)
        tolerance = 0.6 * program.outcome(frozenset()).error
        kept, evaluated = run_flow(program, tolerance, shipped_sets(program))
        best = 1.0
        for states in itertools.product(("", "=follows", "fp32"), repeat=5):
            each = frozenset(
                name if state == "fp32" else name + state
                for name, state in zip(program.names, states, strict=True)
                if state
            )
            if program.outcome(each).error <= tolerance:
                best = min(best, program.kept_work(each))
        gaps.append(program.kept_work(kept) - best)
        counts.append(len(evaluated))
        followed += any(map(is_following, kept))
    assert statistics.mean(gaps) <= 0.06
    assert max(counts) <= 24
    assert followed >= RUNS / 5


# --- models ------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Tables that are added in fp32, and layers whose sums are of low precision alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(32, 16), nn.Embedding(32, 16)
        with torch.no_grad():  # tables that cancel
            self.first.weight += 20
            self.second.weight -= 20
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.first(tokens) + self.second(tokens.flip(-1)))
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        return F.softmax(h, -1)


def tokens() -> Tensor:
    return torch.randint(0, 32, (8, 12), generator=torch.Generator().manual_seed(3))


def sums() -> Sums:
    torch.manual_seed(0)
    return Sums()


def measured(model: nn.Module, **options: Any) -> tuple[float, dict[tuple[str, str], float]]:
    """Returns the error of a conversion, and the share of low precision of each op's calls in each module."""
    calls: dict[tuple[str, str], int] = {}
    low: dict[tuple[str, str], int] = {}
    with torch.no_grad():
        expected = model(tokens()).double()
        with (
            hmpx.record() as recorded,
            hmpx.convert(**options, device_types={"cpu"}, legalize="always"),
        ):
            found = model(tokens()).double()
    for row in recorded.rows:
        spot = row.op, row.module
        calls[spot] = calls.get(spot, 0) + row.calls
        low[spot] = low.get(spot, 0) + row.calls * row.is_low
    error = float((found - expected).norm() / expected.norm())
    return error, {spot: low[spot] / calls[spot] for spot in calls}


def candidates_of(model: nn.Module, by: str) -> tuple[Candidate, ...]:
    return tuned(model, 1e9, by).candidates


def tuned(model: nn.Module, tolerance: float, by: str = "op", **options: Any) -> hmpx.Tuned:
    return hmpx.tune(
        model,
        tokens(),
        tolerance=tolerance,
        by=by,
        device_types={"cpu"},
        progress=False,
        **options,
    )


@pytest.mark.parametrize("by", ["op", "module"])
@pytest.mark.parametrize("name", ["hmp", "autocast-cpu"])
def test_at_the_error_of_a_list(name: str, by: str, tmp_path: Path) -> None:
    """No less is in low precision; what is written loads, and does what was measured."""
    model = sums()
    tolerance, parts = measured(model, lists=name)
    best = tuned(model, tolerance * (1 + 1e-9), by)
    assert best.error <= tolerance * (1 + 1e-9) < best.all_low_error
    assert all(best.error_without(each) > tolerance for each in best.kept)
    work = dict.fromkeys(("list", "loaded"), (0.0, 0.0))
    (path, *_) = best.write(tmp_path)
    use = {"policy": path} if path.name == "policy.yaml" else {"lists": tmp_path}
    error, loaded = measured(model, **use)
    assert error == pytest.approx(best.error)
    for who, found in (("list", parts), ("loaded", loaded)):
        shares = [
            [sum(found[spot] for spot in each.spots) / len(each.spots), each.flops, each.bytes]
            for each in best.candidates
        ]
        work[who] = (
            sum(part * flops for part, flops, _ in shares) / sum(flops for _, flops, _ in shares),
            sum(part * count for part, _, count in shares) / sum(count for _, _, count in shares),
        )
    assert work["loaded"] == pytest.approx(
        (best.low_precision_flops_share, best.low_precision_bytes_share)
    )
    assert all(
        ours >= theirs - 1e-9 for ours, theirs in zip(work["loaded"], work["list"], strict=True)
    )


def test_the_sum_of_tables_follows(tmp_path: Path) -> None:
    """With the tables in fp32 their sum is, too, and those of low precision are not; so it is written, and said."""
    model = sums()
    tolerance, _ = measured(model, lists="hmp")
    best = tuned(model, tolerance * (1 + 1e-9))
    assert best.follows == {"add"}
    assert best.types["add"] == "follows"
    assert "add" not in best.keep_fp32
    assert "add follows" in str(best)
    best.write(tmp_path)
    assert "\nadd\n" in (tmp_path / "widest.txt").read_text()
    assert hmpx.load_policy(lists=tmp_path, strict=True).fingerprint() == best.policy.fingerprint()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kept", ["layer_norm", "softmax", "gelu", "add", "linear"])
@pytest.mark.parametrize("by", ["op", "module"])
def test_each_op_may_follow(kept: str, by: str) -> None:
    """Whatever the shipped lists say of it: in low precision where all or the first of its inputs is."""
    model = sums()
    candidates = candidates_of(model, by)
    members = {f"{each.name}=follows" for each in candidates if min(each.spots)[0] == kept}
    spots = {spot for each in candidates for spot in each.spots if spot[0] == kept}
    types = assigned(candidates, frozenset(members), "bfloat16")
    _, parts = measured(model, policy=policy_of(types, "bfloat16"))
    assert all(
        parts[spot] == 1 for spot in spots
    )  # all else is in low precision, and what is given to it
    others = {each.name for each in candidates if min(each.spots)[0] != kept}
    types = assigned(candidates, frozenset(members | others), "bfloat16")
    _, parts = measured(model, policy=policy_of(types, "bfloat16"))
    assert all(parts[spot] == 0 for spot in spots)
