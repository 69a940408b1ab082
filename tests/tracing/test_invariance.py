"""`hmpx.invariance`: the calls that depend on the batch, found as by brute force, and the remedies for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hmpx


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


# --- as by brute force ---------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "matmul": (lambda x, w: torch.matmul(x, w), (96,), ((96, 40),)),
    "wide matmul": (lambda x, w: torch.matmul(x, w), (1000,), ((1000, 64),)),
    "linear of sequences": (lambda x, w: F.linear(x, w), (5, 64), ((48, 64),)),
    "conv1d": (lambda x, w: F.conv1d(x, w), (8, 50), ((12, 8, 5),)),
    "conv2d": (lambda x, w: F.conv2d(x, w), (3, 16, 16), ((16, 3, 3, 3),)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 33, 16), ()),
    "softmax": (lambda x: torch.softmax(x, -1), (100,), ()),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[1:]), (100,), ()),
}


def brute_force(
    function: Callable[..., Tensor], x: Tensor, others: list[Tensor]
) -> dict[str, bool]:
    """Returns which ways to repeat a call give other values."""
    size, full = x.shape[0], function(x, *others)
    more = 1 << size.bit_length()
    padded = torch.cat([x, x[:1].expand(more - size, *x.shape[1:])])
    back = torch.arange(size).flip(0)
    found = {
        "alone": any(
            not torch.equal(function(x[i : i + 1].clone(), *others)[0], full[i])
            for i in range(size)
        ),
        "permuted": not torch.equal(function(x[back], *others), full[back]),
        "padded": not torch.equal(function(padded, *others)[:size], full),
    }
    torch.set_num_threads(1)
    found["threads"] = not torch.equal(function(x, *others), full)
    torch.set_num_threads(2)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 5, 7, 16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_differences_are_those_of_brute_force(name: str, size: int) -> None:
    """Call by call: in the same ways, and nowhere else."""
    function, shape, shapes = FUNCTIONS[name]
    x, others = torch.randn(size, *shape), [torch.randn(each) for each in shapes]

    def model(x: Tensor) -> Tensor:
        return function(x, *others)

    found = hmpx.invariance(model, x, rows=size, threads=[1])
    expected = {kind for kind, differs in brute_force(function, x, others).items() if differs}
    assert {kind for each in found.variations for kind in each.found} == expected
    assert (found.calls, found.skipped, found.by_definition) == (1, {}, ())


def test_the_place_of_a_call_without_code_of_the_program_is_that_of_the_tool() -> None:
    found = hmpx.invariance(torch.nn.BatchNorm1d(8), torch.randn(8, 8))
    places = {each.location.rpartition(":")[0] for each in found.by_definition}
    assert places == {__file__}


def test_float32_products_depend_on_the_batch_here() -> None:
    """Otherwise the tests above would compare nothing with nothing."""
    x, weight = torch.randn(7, 1000), torch.randn(1000, 64)
    if not any(brute_force(lambda x, w: torch.matmul(x, w), x, [weight]).values()):
        pytest.skip("this processor's products don't depend on the batch")
    found = hmpx.invariance(lambda x: x @ weight, x)
    assert found.first is not None
    assert found.first.op == "matmul"
    assert "of 64 values, up to" in found.first.found["alone"]
    assert found.first.location.rpartition(":")[0] == __file__
    assert "1 of 1 calls differ by rounding, at 1 places" in str(found)


# --- where the rows are ----------------------------------------------------------------------------


class Layouts(nn.Module):
    """Flattens the batch in both orders, with the batch's sizes as numbers, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        """Takes [batch, time, 16]."""
        batch, time, channels = x.shape
        y = self.first(x.view(batch * time, channels))
        y = y.view(batch, time, channels).transpose(0, 1).reshape(time * batch, channels)
        y = self.second(y).view(time, batch, channels)
        y += 1
        y.mul_(scale)
        parts = torch.cat([y, F.relu(y, inplace=True)], -1)
        return torch.softmax(parts.transpose(0, 1).expand(batch, time, 2 * channels), -1)


def test_rows_are_found_in_any_layout() -> None:
    """No call is skipped, and none but the products depends on the batch."""
    model = Layouts()
    found = hmpx.invariance(model, {"x": torch.randn(5, 3, 16), "scale": torch.ones(16)})
    assert found.skipped == {}
    assert {each.op for each in found.variations} <= {"linear"}
    assert found.by_definition == ()
    assert found.calls >= 6


def test_what_depends_on_the_batch_by_definition() -> None:
    norm, dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def step(x: Tensor) -> Tensor:
        mean: Tensor = dropout(norm(x)).mean()
        return mean

    found = hmpx.invariance(step, torch.randn(6, 8, 3))
    said = {each.op: each.says for each in found.by_definition}
    assert said == {
        "batch_norm": "by definition: uses the values of other rows",
        "dropout": "by definition: draws random numbers for the whole batch",
        "mean": "by definition: its result combines the rows",
    }


def test_batch_norms_in_training_run_on_one_row() -> None:
    found = hmpx.invariance(nn.Sequential(nn.BatchNorm1d(8)), torch.randn(4, 8))
    (norm,) = found.by_definition
    assert (norm.op, norm.says) == ("batch_norm", "by definition: uses the values of other rows")
    assert found.skipped == {}
    with pytest.raises(ValueError, match="more than 1 value"):
        nn.BatchNorm1d(8)(torch.randn(1, 8))


def test_dropout_that_drops_nothing_is_no_finding() -> None:
    found = hmpx.invariance(nn.Dropout(0.5).eval(), torch.randn(4, 8))
    assert (found.variations, found.by_definition) == ((), ())


def test_shapes_by_values_are_skipped_and_named() -> None:
    found = hmpx.invariance(lambda x: torch.exp(x[x > 0]), torch.randn(4, 8))
    assert found.skipped == {"the shapes of its tensors do not follow the batch": 1}
    assert "not repeated with other batches: 1, the shapes" in str(found)


def test_calls_that_one_row_does_not_make_are_skipped() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.exp(x) if len(x) > 1 else x

    found = hmpx.invariance(model, torch.randn(4, 8))
    assert found.skipped == {"the run on one row has no such call": 1}


def test_places_in_the_batch_are_named() -> None:
    """An index of rows of the whole batch is out of range for one row."""

    def model(x: Tensor) -> Tensor:
        rows = list(range(len(x)))
        return torch.gather(x, 0, torch.tensor([rows]).T) * 2

    found = hmpx.invariance(model, torch.randn(4, 8))
    assert found.calls == 2
    assert found.skipped == {"its integers depend on the batch": 1}


def test_inputs_stay_as_they_are() -> None:
    """Also those without rows, to which the model writes."""
    total = torch.zeros(1)

    def model(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum())
        return x * 2

    found = hmpx.invariance(model, (torch.ones(4, 8), total))
    assert total.item() == 0
    assert [each.op for each in found.by_definition] == ["sum"]


# --- nothing changes -------------------------------------------------------------------------------


def test_nothing_changes() -> None:
    """Outputs, buffers, gradients, the RNG state and the number of threads are those without."""
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(6, 8)
    torch.manual_seed(1)
    expected = model(x)
    outputs: list[Tensor] = []
    norm.reset_running_stats()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try:
        hmpx.invariance(lambda x: model(torch.cat([x, x[:1]]) if len(x) == 1 else x), x)
    finally:
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[-1], expected)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert torch.get_num_threads() == 2
    assert not hmpx.is_converted()


@pytest.mark.parametrize("policy", ["converted", "autocast"])
def test_calls_are_repeated_as_the_program_casts_them(policy: str) -> None:
    """Repeated the same, they give the same; a bfloat16 product rarely differs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval()
    context: Any = (
        hmpx.convert(device_types={"cpu"})
        if policy == "converted"
        else torch.autocast("cpu", torch.bfloat16)
    )
    with context:
        found = hmpx.invariance(model, torch.randn(5, 64))
    assert found.calls == 3
    assert not any("repeated" in each.found for each in found.variations)


def test_mistakes() -> None:
    with pytest.raises(hmpx.OptionError, match="at least two rows"):
        hmpx.invariance(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(hmpx.OptionError, match="rows"):
        hmpx.invariance(nn.Linear(2, 2), torch.ones(2, 2), rows=0)
    with pytest.raises(RuntimeError, match="shape") as error:
        hmpx.invariance(lambda x: x.view(2, 2), torch.ones(2, 2))
    assert error.value.__notes__ == ["Raised by the run on one row of the batch"]


# --- remedies ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes [batch, time, width]."""
        batch, time, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, time, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        x += self.down(F.gelu(self.up(self.norms[1](x))))
        return x


class GPT(nn.Module):
    """A small language model with random weights."""

    def __init__(self, words: int = 97, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Takes [batch, time]; returns the scores of the next words."""
        x = self.words(words) + self.places.weight[: words.shape[1]]
        scores: Tensor = self.head(self.blocks(x))
        return scores

    def written(self, words: Tensor, count: int) -> Tensor:
        """Returns the words, with ``count`` greedy ones behind them."""
        for _ in range(count):
            words = torch.cat([words, self(words)[:, -1].argmax(-1, keepdim=True)], 1)
        return words


def remedied(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """Returns the remedies found at some sizes of the batch."""
    lines = dict.fromkeys(
        line
        for size in (2, 17, len(inputs))
        for line in hmpx.invariance(model, inputs[:size], threads=[2]).policy.get("fp32", [])
    )
    return {"lists": "none", "fp32": [*lines]}


@torch.no_grad()
def test_the_remedy_gives_equal_bits_for_each_size_of_the_batch() -> None:
    model = nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 10))
    x = torch.randn(64, 96)
    policy, expected = remedied(model, x), model(x)
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        full = model(x)
        assert torch.allclose(full, expected, rtol=1e-5, atol=1e-6)
        for size in range(1, 65):
            assert torch.equal(model(x[:size].clone()), full[:size]), size


@pytest.mark.sampled(3)
@torch.no_grad()
def test_the_remedy_gives_equal_texts() -> None:
    model, words = GPT().eval(), torch.randint(0, 97, (64, 6))
    policy, expected = remedied(model, words), model(words)
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        texts = model.written(words, 6)
        scores = model(words)
        assert torch.allclose(scores, expected, rtol=1e-4, atol=1e-5)
        for size in (1, 2, 7, 33):
            assert torch.equal(model(words[:size]), scores[:size]), size
            assert torch.equal(model.written(words[:size], 6), texts[:size]), size


def test_nothing_else_is_cast_by_the_policy() -> None:
    x = torch.randn(4, 8).relu()
    found = hmpx.invariance(torch.relu, x)
    assert found.policy == {"lists": "none"}
    with hmpx.convert(policy=found.policy, device_types={"cpu"}):
        assert (x @ x.T).dtype is torch.float32
        assert hmpx.invariance(torch.relu, x).policy == {}


def test_complex_results_have_no_line() -> None:
    """`accumulate=` does not round them."""
    found = hmpx.invariance(lambda x: torch.fft.rfft(x), torch.randn(3, 64))
    assert found.policy == {"lists": "none"}


def test_remedies_have_a_price() -> None:
    """Lines are preferred; row by row is the last resort."""
    row = hmpx.Variation("mm", "", "", {"alone": "differs"}, remedies={"row by row": 3.0})
    line = hmpx.Variation(
        "mm", "", "", {"alone": "differs"}, remedies={"row by row": 3.0, "accumulate=float64": 4.0}
    )
    assert (row.remedy, line.remedy) == ("row by row", "accumulate=float64")
    nothing = hmpx.Variation("mm", "", "", {"alone": ""}, remedies={"fp32": float("nan")})
    assert nothing.remedy == ""
