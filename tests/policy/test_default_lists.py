"""The lists of the default: what they must hold, and what each line says of itself."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx
from hmpx import CastPolicy
from hmpx.policy import lists as sets

FP32, LOW = torch.float32, torch.bfloat16
FILES = [path.name for path in sorted((sets.directory() / "hmpx").iterdir())]

#: Functions with a ``reduction`` that do not return a loss.
NO_LOSS: set[str] = {"embedding_bag"}


@pytest.fixture(scope="module")
def policy() -> hmpx.Policy:
    """Returns the policy of the set."""
    return hmpx.load_policy(lists="hmpx")


@pytest.mark.parametrize("file", FILES)
def test_each_line_gives_its_reason(file: str) -> None:
    """In a comment on the line itself: it stays with the line in a copy, and in a diff."""
    lines = (sets.directory() / "hmpx" / file).read_text("utf-8").splitlines()
    named = [line for line in lines if line[0] not in "#@"]
    assert named
    assert [line for line in named if len(line.partition("  # ")[2].split()) < 3] == []


def losses() -> Iterator[str]:
    """Yields the names of torch's losses: they have a ``reduction``, or are named so."""
    for name, function in vars(F).items():
        if name.startswith("_") or not callable(function) or inspect.isclass(function):
            continue
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            parameters = {}
        if "reduction" in parameters or name.endswith(("_loss", "entropy")):
            yield name


def test_every_loss_runs_in_fp32(policy: hmpx.Policy) -> None:
    """A total of low losses stops growing at 256 times one of them."""
    found = set(losses()) - NO_LOSS
    assert len(found) > 20
    assert {name: policy[name].cast_policy for name in found} == dict.fromkeys(
        found, CastPolicy.FP32
    )


@pytest.mark.parametrize("kind", ["low", "fp32", "widest"])
def test_what_torch_autocast_casts_is_cast_alike(kind: str, policy: hmpx.Policy) -> None:
    """Except for ops that cost more than they gain."""
    follows = {
        "low": {
            *("prelu", "_convolution", "convolution", "_scaled_dot_product_flash_attention"),
            # Updates repeat these, and states that are passed on stop moving.
            *("addmv", "addr", "mv", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
        },
        "fp32": {
            *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
            *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
        },
        "widest": set(),
    }
    expected = CastPolicy(kind)
    differing = {
        op
        for op in sets.read_set("autocast-cuda")[kind].ops
        if policy[op].cast_policy is not expected
    }
    # Of two vectors' product one number is kept: rounding it saves nothing.
    assert differing - {"linalg_vecdot"} <= follows[kind]


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (lambda x: F.layer_norm(x, (8,), torch.ones(8), torch.zeros(8)), FP32),
        (lambda x: F.group_norm(x, 4, torch.ones(8), torch.zeros(8)), FP32),
        (lambda x: F.rms_norm(x, (8,), torch.ones(8)), FP32),
        (lambda x: F.instance_norm(x[..., None].expand(-1, -1, 4)), LOW),
        (lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True), LOW),
    ],
    ids=["layer_norm", "group_norm", "rms_norm", "instance_norm", "batch_norm"],
)
def test_norms_return_what_they_return_under_torch_autocast(
    norm: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """On CUDA. An fp32 input is not rounded."""
    x = torch.randn(16, 8) + 500
    exact = norm(x)
    with hmpx.convert(device_types={"cpu"}):
        assert torch.equal(norm(x), exact)
        assert norm(x.to(LOW)).dtype is dtype


def test_a_hand_written_rms_norm_stays_finite_in_float16() -> None:
    """Its squares would overflow."""
    with hmpx.convert(low_precision_type=torch.float16, device_types={"cpu"}):
        x = 500 * torch.eye(8) @ torch.eye(8)
        assert x.dtype is torch.float16
        found = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(found.float().diagonal(), torch.full((8,), 8**0.5), rtol=1e-3)


EINSUMS = {
    "i,j->ij": ((5,), (6,)),
    "i,j": ((5,), (6,)),
    "ii->i": ((5, 5),),
    "ij->i": ((5, 6),),
    "ij,ij->ij": ((5, 6), (5, 6)),
    "ij,j->ij": ((5, 6), (6,)),
    "bh,->bh": ((2, 3), ()),
    "k,bkc...->bc...": ((2,), (2, 2, 3, 4)),
    "k, bkc... -> bc...": ((1,), (2, 1, 3, 4)),
    "ij,ik->jk": ((1, 3), (1, 4)),
    "ij,k->k": ((2, 3), (4,)),
    "ij,jk": ((5, 6), (6, 7)),
    "ij,ij->i": ((5, 6), (5, 6)),
    "i,i->": ((6,), (6,)),
    "bij,bjk->bik": ((2, 5, 6), (2, 6, 7)),
    "... i j, ... j k -> ... i k": ((2, 3, 4), (2, 4, 5)),
    "n...i,n...j->nij": ((2, 3, 4), (2, 3, 5)),
    "...i,n...j->nij": ((3, 1), (2, 1, 1)),
    "...i,...i": ((3, 4), (3, 1)),
    "ij,kj,lk->il": ((5, 6), (7, 6), (8, 7)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lists", ["hmpx", "autocast-cpu"])
@pytest.mark.parametrize("equation", EINSUMS)
def test_only_einsums_that_sum_products_are_low(equation: str, lists: str) -> None:
    """As under torch.autocast, for fp32 and low inputs in any order."""
    for dtypes in itertools.product([FP32, LOW], repeat=len(EINSUMS[equation])):
        inputs = [
            torch.rand(shape, dtype=dtype)
            for shape, dtype in zip(EINSUMS[equation], dtypes, strict=True)
        ]
        with torch.autocast("cpu", LOW):
            expected = torch.einsum(equation, inputs)
        with hmpx.convert(lists=lists, device_types={"cpu"}):
            assert torch.einsum(equation, inputs).dtype is expected.dtype
            assert torch.einsum(equation, *inputs).dtype is expected.dtype


def test_positions_keep_apart_in_an_outer_product_by_einsum(tmp_path: Path) -> None:
    """Rotary embeddings multiply them so by frequencies; a user's own line is obeyed."""
    positions = torch.arange(2048.0)
    with hmpx.convert(device_types={"cpu"}):
        assert torch.equal(
            torch.einsum("i,j->ij", positions, torch.ones(1)), positions.unsqueeze(1)
        )
    assert "calls that sum no products" in str(hmpx.explain("einsum"))
    mine = tmp_path / "mine.txt"
    mine.write_text("einsum\n", encoding="utf-8")
    with hmpx.convert(mine, device_types={"cpu"}):
        assert torch.einsum("i,j->ij", positions, torch.ones(1)).dtype is LOW


@pytest.mark.parametrize(
    "call",
    [
        lambda m: torch.linalg.inv(m),
        lambda m: torch.linalg.qr(m),
        lambda m: torch.linalg.svdvals(m),
        lambda m: torch.linalg.slogdet(m),
        lambda m: torch.linalg.cholesky(m),
        lambda m: torch.trace(m),
        lambda m: torch.quantile(m, 0.5),
    ],
    ids=["inv", "qr", "svdvals", "slogdet", "cholesky", "trace", "quantile"],
)
def test_what_torch_computes_in_fp32_only_stays_fp32(call: object) -> None:
    """Rounded, the parts of a factorization no longer fit together."""
    assert callable(call)
    low = (torch.eye(4) + 0.01).to(LOW)
    expected = call(low.float())
    with hmpx.convert(device_types={"cpu"}):
        found = call(low)
    is_one = isinstance(found, torch.Tensor)
    pairs = [(found, expected)] if is_one else zip(found, expected, strict=True)
    assert all(a.dtype is FP32 and torch.equal(a, e) for a, e in pairs)
