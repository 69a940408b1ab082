"""`compare`: what it finds, and what it leaves as it was."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx import OptionError
from hmpx.comparing.rows import compared_gradients
from tests import forks

CPU = {"device_types": {"cpu"}}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def low(*ops):
    return {"policy": hmpx.Policy.from_ops(low=ops), **CPU}


class Net(nn.Module):
    """Norms with statistics, dropout, an in-place op, a tied weight."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        h = self.norm(self.first(x))
        h = self.drop(F.relu_(h))
        h += 1
        return self.last(h)


def rows_of(comparison, op):
    return [row for row in comparison.rows if row.op == op]


# --- numbers -----------------------------------------------------------------------------------------


def test_local_errors_are_those_of_the_op_alone():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    row = hmpx.compare(lambda: F.linear(x, w), **low("linear"), legalize="never").rows[0]
    exact = x @ w.T
    difference = F.linear(x.bfloat16(), w.bfloat16()).float() - exact
    assert row.op == "linear" and row.dtype == "bfloat16" and row.calls == 1
    assert row.error == pytest.approx((difference.norm() / exact.norm()).item(), rel=1e-5)
    assert row.max_abs == pytest.approx(difference.abs().max().item(), rel=1e-5)
    assert row.sqnr_db == pytest.approx(-20 * math.log10(row.error), abs=1e-6)
    assert row.cosine == pytest.approx(
        F.cosine_similarity((exact + difference).flatten(), exact.flatten(), dim=0).item(), abs=1e-6
    )
    assert row.range == pytest.approx((exact.abs().min().item(), exact.abs().max().item()))
    assert row.flops == 2 * 4 * 8 * 3
    assert 0 < row.ulp < 4


def test_the_effect_on_a_loss_is_gradient_times_difference():
    x = torch.randn(5, 8)

    def model(x):
        return torch.tanh(x)

    def loss_fn(y):
        return (y * weights).sum()

    weights = torch.randn(5, 8)
    row = rows_of(hmpx.compare(model, x, loss_fn=loss_fn, **low("tanh")), "tanh")[0]
    product = weights * (torch.tanh(x.bfloat16()).float() - torch.tanh(x)).bfloat16().float()
    squares = (product**2).sum(), (product.sum(1) ** 2).sum()
    assert row.effect == pytest.approx(math.sqrt(sum(squares).item() / 2), rel=1e-4)


def test_without_a_loss_the_effect_is_that_on_the_outputs():
    model = nn.Linear(64, 64)
    x = torch.randn(64, 64)
    found = hmpx.compare(model, x, **low("linear"))
    assert found.rows[0].effect == pytest.approx(found.output_error, rel=0.1)
    assert math.isnan(found.loss)


def test_what_follows_low_inputs_has_its_own_error_only():
    def model(x, w):
        h = torch.mm(x, w)
        return F.gelu(h), F.relu(h)

    found = hmpx.compare(
        model, (torch.randn(8, 8), torch.randn(8, 8)), **low("mm"), legalize="never"
    )
    (gelu,), (relu,) = rows_of(found, "gelu"), rows_of(found, "relu")
    assert gelu.dtype == relu.dtype == "bfloat16"
    assert gelu.error > 0
    assert relu.error == 0, "it rounds nothing itself"
    assert relu.propagated_error > 0


def test_propagated_errors_hold_those_of_the_calls_before():
    def model(x):
        return torch.exp(torch.tanh(x) * 20)

    policy = hmpx.Policy.from_ops(low=["tanh"], fp32=["exp"])
    found = hmpx.compare(model, torch.rand(4, 64), policy=policy, **CPU)
    (exp,) = rows_of(found, "exp")
    assert exp.error == 0 and exp.dtype == ""
    assert exp.propagated_error > 0.01


def test_float64_as_reference():
    x = torch.randn(64, 512)

    def model(x):
        return F.linear(x, x)

    with_itself = hmpx.compare(model, x, **low("tanh")).rows[0]
    assert with_itself.error == 0
    exact = hmpx.compare(model, x, reference=torch.float64, **low("linear")).rows[0]
    usual = hmpx.compare(model, x, **low("linear")).rows[0]
    assert exact.error == pytest.approx(usual.error, rel=1e-3)
    assert exact.error != usual.error


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "posit16_1"])
def test_number_formats(name):
    found = hmpx.compare(nn.Linear(8, 4), torch.randn(2, 8), low_precision_type=name, **CPU)
    (row,) = found.rows
    assert row.dtype == name
    assert 0 < row.error < 0.2
    assert found.gradients


def test_gradients_of_parameters():
    model = nn.Linear(8, 4)
    x = torch.randn(16, 8)
    found = hmpx.compare(model, x, loss_fn=lambda y: y.square().sum(), **low("linear"))
    assert {each.name for each in found.gradients} == {"weight", "bias"}
    assert all(0 < each.error < 0.02 and each.cosine > 0.999 for each in found.gradients)


def test_passes_find_the_same():
    model = Net()
    x = torch.randn(6, 8)
    one, three = (hmpx.compare(model, x, passes=n, **low("linear", "batch_norm")) for n in (1, 3))
    assert [(r.op, r.module, r.effect, r.error, r.calls) for r in one.rows] == [
        (r.op, r.module, r.effect, r.error, r.calls) for r in three.rows
    ]


def test_flips_of_indices():
    x = torch.cat([torch.full((1, 8), 1.0), torch.full((1, 8), 1.001)])

    def model(x):
        return torch.max(x * 1.0, dim=0)[1].float() + x.sum()

    found = hmpx.compare(model, x, **low("max"))
    assert rows_of(found, "max")[0].flips == 1


# --- hard cases --------------------------------------------------------------------------------------


def test_masks_of_minus_infinity():
    def model(q):
        logits = (q @ q.T).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
        return torch.softmax(logits, -1) @ q

    found = hmpx.compare(model, torch.randn(8, 8), **low("matmul", "masked_fill", "softmax"))
    assert all(math.isfinite(row.effect) for row in found.rows)
    assert rows_of(found, "softmax")[0].effect > 0


def test_overflow_in_the_low_type_has_infinite_effect():
    def model(x):
        return torch.log(torch.exp(x))

    policy = hmpx.Policy.from_ops(low=["exp", "log"], low_precision_type="float16")
    found = hmpx.compare(model, torch.full((4,), 20.0), policy=policy, **CPU)
    assert found.rows[0].op == "exp"
    assert found.rows[0].effect == math.inf
    assert found.rows[0].lost == 4 and not found.rows[0].fits


def test_dropout_draws_the_same():
    def model(x):
        return F.dropout(x, 0.5)

    (row,) = hmpx.compare(model, torch.randn(32, 32), **low("dropout")).rows
    assert row.lost == 0 and row.error < 2**-8


def test_a_model_without_a_backward():
    model = Net().eval()  # adds to what relu has returned, in place

    found = hmpx.compare(model, torch.randn(4, 8), **low("linear"))
    assert "modified by an inplace operation" in found.backward_error
    assert "the backward failed" in str(found)
    assert all(math.isnan(row.effect) and row.error > 0 for row in rows_of(found, "linear"))
    with pytest.raises(RuntimeError, match="inplace operation"):
        hmpx.compare(model, torch.randn(4, 8), loss_fn=torch.sum, **low("linear"))


def test_where_no_gradient_arrives_the_effect_is_unknown():
    found = hmpx.compare(lambda x: torch.tanh(x).argmax(), torch.randn(64), **low("tanh"))
    assert math.isnan(found.rows[0].effect) and found.rows[0].error > 0
    assert "no gradient" in str(found)


def test_a_call_that_depends_on_values():
    def model(x):
        y = torch.tanh(x)
        return y if y[0] > math.tanh(1.001) - 1e-5 else torch.sin(y)

    x = torch.full((4,), 1.001)
    found = hmpx.compare(model, x, **low("tanh"))
    assert found.unmatched + len(found.rows) >= 1
    assert rows_of(found, "tanh")


def test_compiled_models():
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="eager")
    found = hmpx.compare(model, torch.randn(4, 8), **low("linear"))
    assert rows_of(found, "linear")[0].module == "0"
    assert {each.name for each in found.gradients} == {"0.weight", "0.bias"}


def test_several_calls_of_one_line_are_one_row():
    layer = nn.Linear(8, 8)

    def model(x):
        for _ in range(3):
            x = layer(x)
        return x

    (row,) = rows_of(hmpx.compare(model, torch.randn(4, 8), **low("linear")), "linear")
    assert row.calls == 3


# --- what is left as it was --------------------------------------------------------------------------


def test_model_gradients_buffers_and_random_numbers_are_as_before():
    model = Net()
    model(torch.randn(4, 8)).sum().backward()
    gradients = [each.grad for each in model.parameters()]
    values = [each.clone() for each in gradients]
    state = {name: each.clone() for name, each in model.state_dict().items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    x = torch.randn(6, 8, requires_grad=True)
    torch.set_rng_state(torch_state)
    hmpx.compare(model, x, **CPU)
    assert all(a.grad is b for a, b in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, values, strict=True))
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert x.grad is None and model.training
    assert not any(each._backward_hooks for each in model.parameters())
    assert not hmpx.is_converted()


def test_an_error_of_the_model_leaves_nothing_behind():
    model = Net()

    def broken(x):
        model(x)
        raise KeyError("mine")

    state = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(KeyError, match="mine"):
        hmpx.compare(broken, torch.randn(4, 8), **CPU)
    assert not hmpx.is_converted()
    del state  # a function's modules are not known: its buffers are its own


def test_the_conversion_in_force_is_used_and_stays():
    with hmpx.convert(**low("tanh", "linear")) as session:
        found = hmpx.compare(lambda x: torch.tanh(x) + F.linear(x, x), torch.randn(4, 4))
        assert {row.op for row in found.rows if row.dtype} == {"tanh", "linear", "add"}
        hmpx.compare(torch.tanh, torch.randn(4), **low("sin"))
        assert torch.tanh(torch.ones(2)).dtype is torch.bfloat16
        assert "in force" in repr(session) and "not" not in repr(session)


def test_inputs_are_not_written_to():
    x = torch.ones(4)
    hmpx.compare(lambda x: x.mul_(2), x, **low("tanh"))
    assert torch.equal(x, torch.ones(4))


def test_nothing_keeps_the_model_and_its_inputs():
    code = """
import gc, weakref, torch, hmpx
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), torch.randn(2, 4)
found = hmpx.compare(model, x)  # the first: it imports parts of torch
living = [weakref.ref(model), weakref.ref(model[1].running_mean), weakref.ref(x)]
del model, x
gc.collect()
print([each() for each in living])
"""
    done = forks.run("-c", code)
    assert (done.returncode, done.stdout) == (0, "[None, None, None]\n"), done.stderr


# --- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"passes": 0}, "passes must be an int of at least 1, not 0"),
        ({"seed": -1}, "seed must be an int of at least 0, not -1"),
        ({"reference": torch.float16}, "reference must be torch.float32 or torch.float64"),
        ({"loss_fn": 3}, "loss_fn must be a function of the output and the batch, not 3"),
        ({"loss_fn": lambda y: y}, "loss_fn must return a floating-point tensor of one element"),
        ({"low_precision_typ": "fp8"}, "low_precision_typ"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((OptionError, TypeError), match=message):
        hmpx.compare(nn.Linear(4, 4), torch.ones(2, 4), **arguments)
    assert not hmpx.is_converted()


async def _coroutine(x):
    return torch.tanh(x)


async def _asynchronous(x):
    yield torch.tanh(x)


def _generator(x):
    yield torch.tanh(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_generator, r"returns a generator, .* lambda \*inputs: list\(model\(\*inputs\)\)"),
        (_coroutine, "returns a coroutine, which has run nothing yet"),
        (_asynchronous, "returns an asynchronous generator"),
    ],
)
def test_what_has_not_run_is_refused(model, message):
    with pytest.raises(OptionError, match=message):
        hmpx.compare(model, torch.ones(2))
    with pytest.raises(OptionError, match=message):
        hmpx.tune(model, torch.ones(2), progress=False)
    assert not hmpx.is_converted()
    found = hmpx.compare(lambda x: list(_generator(x)), torch.ones(2), **low("tanh"))
    assert [row.dtype for row in found.rows] == ["bfloat16"]


# --- gradients that are not finite, or zero ---------------------------------------------------------


class ByHand(nn.Module):
    """A sum that cancels, and an ELU by hand: its gradient is NaN where the exponential overflows."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        h = (self.first(x) + 256.0) - 256.0
        h = self.norm(h) * 60
        h = torch.where(h > 0, h, torch.expm1(h))
        return self.last(h / 60)


def test_the_effect_before_a_gradient_that_is_not_finite_is_unknown():
    policy = {"lists": "none", "low": ["*"]}
    found = hmpx.compare(ByHand(), torch.randn(32, 16) * 4, policy=policy, **CPU)
    for row in found.rows:
        if row.op in ("add", "sub", "batch_norm", "mul"):
            assert math.isnan(row.effect) and row.unseen == 1, row
        elif row.op in ("truediv", "where"):
            assert row.effect > 0 and row.unseen == 0, row
    (sub,) = [line.split() for line in str(found).splitlines() if line.startswith("sub")]
    assert sub[3:5] == ["1", "-"]
    gradients = {each.name: each for each in found.gradients}
    assert math.isnan(gradients["first.weight"].error)
    assert gradients["last.weight"].error < 1
    assert "first.weight is not finite in float32" in str(found)
    assert math.isnan(found.gradients[0].error), "they come first"


def test_a_gradient_that_is_not_finite_where_nothing_differs_does_not_matter():
    def model(x):
        h = torch.tanh(x)
        masked = torch.where(x > 0, h, torch.zeros(()))  # exact in bfloat16
        return h.sum() + torch.sqrt(masked.relu()).mul(0).nan_to_num().sum()

    (row,) = rows_of(hmpx.compare(model, torch.randn(4, 8), **low("tanh")), "tanh")
    assert row.effect > 0


class Attention(nn.Module):
    """Keys whose bias has no effect, and a product whose bias a norm takes away."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x):
        h = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(self.norm(self.out(h).flatten(0, 1)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_that_are_zero_up_to_rounding_do_not_alarm(dtype):
    found = hmpx.compare(Attention(), torch.randn(4, 8, 16), low_precision_type=dtype, **CPU)
    gradients = {each.name: each for each in found.gradients}
    for name in ("key.bias", "value.bias", "out.bias"):
        assert (gradients[name].error, gradients[name].cosine) == (0.0, 1.0), name
    for name in ("query.bias", "key.weight", "out.weight", "norm.bias"):
        assert 0 < gradients[name].error < 0.5, name
    assert ".bias differs by 0" not in str(found)


@pytest.mark.parametrize(
    ("norms", "error"),
    [
        ((1e-3, 1e-7, 1e-3), 0.0),  # difference, float32, low; those of the weight are 1e-3, 1, 1
        ((1e12, 1e-7, 1e12), 1e19),  # explodes
        ((1e-8, 1e-7, 1e-7), 0.1),  # small, and not noise
        ((1e-3, 1e-2, 1e-2), 0.1),
        ((2e-2, 1e-2, 1e-2), 2.0),
    ],
)
def test_which_gradients_are_zero_up_to_rounding(norms, error):
    found = {"0.weight": (1e-3, 1.0, 1.0), "0.bias": norms, "1.bias": (1e-9, 1e-8, 1e-8)}
    rows = compared_gradients([(name, torch.tensor(each)) for name, each in found.items()])
    errors = {row.name: row.error for row in rows}
    assert errors["0.bias"] == pytest.approx(error)
    assert errors["1.bias"] == pytest.approx(0.1)


# --- calls without a gradient ------------------------------------------------------------------------


def test_calls_without_a_gradient_are_counted_beside_those_that_have_one():
    def model(x):
        parts = []
        for each in (x, torch.linspace(0.1, 3, 8)):
            part = torch.sin(each)
            parts.append(part if each is x else part.detach())
        return parts[0] + parts[1]

    found = hmpx.compare(model, torch.randn(4, 8), **low("sin"))
    (row,) = rows_of(found, "sin")
    assert row.calls == 2
    assert row.effect > 0
    assert row.unseen == 1
    assert "no gradient: 1" in str(found)
    assert "unseen" in found.to_csv().splitlines()[0]
    (alone,) = rows_of(hmpx.compare(lambda x: x.sin(), torch.randn(4, 8), **low("sin")), "sin")
    assert alone.unseen == 0
