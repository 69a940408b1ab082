"""What a model is called with: one grammar in all tools, training batches, and what errors say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import OptionError

CPU: Any = {"device_types": {"cpu"}}


class Seen(nn.Module):
    """Notes how it is called: tensors as their first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        _CALLS.append((sized(args), sized(kwargs)))
        return self.linear(next(tensors((args, kwargs)))) * 1.0


_CALLS: list[tuple[Any, Any]] = []


def sized(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape[0]
    if isinstance(value, dict):
        return {name: sized(each) for name, each in value.items()}
    found = [sized(each) for each in value]
    return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)


def tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
        return
    for each in value.values() if isinstance(value, dict) else value:
        yield from tensors(each)


class Pair(NamedTuple):
    a: Any
    b: Any


def frozen(model: nn.Module, inputs: Any) -> None:
    with hmpx.convert(**CPU):
        hmpx.freeze(model.eval(), inputs).undo()


def tuned(model: nn.Module, batches: Any, **options: Any) -> hmpx.Tuned:
    given = {"tolerance": 0.9, "budget": 2, "progress": False, **CPU, **options}
    return hmpx.tune(model, batches, **given)


TOOLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "bench": lambda model, inputs: hmpx.bench(
        lambda: model, inputs, runs=1, warmup=1, run_s=0.0, variants=["frozen"], device="cpu"
    ),
    "compare": lambda model, inputs: hmpx.compare(model, inputs, **CPU),
    "draw": hmpx.draw,
    "expect.of": hmpx.expect.of,
    "freeze": frozen,
    "invariance": lambda model, inputs: hmpx.invariance(model, inputs, threads=[1]),
    "plan": lambda model, inputs: hmpx.plan(model, inputs, "cpu"),
    "plan a function's": lambda model, inputs: hmpx.plan(lambda: model, lambda: inputs, "cpu"),
    "tune": lambda model, inputs: tuned(model, [inputs]),
}

X = torch.randn(3, 4)

#: Inputs -> the arguments that they mean.
GRAMMAR: list[tuple[Any, Any]] = [
    (X, ((3,), {})),
    ((X, X), ((3, 3), {})),
    (((X, X),), (((3, 3),), {})),
    ([X, X], (([3, 3],), {})),
    ({"x": X, "y": [X]}, ((), {"x": 3, "y": [3]})),
    ((X, {"y": X}), ((3, {"y": 3}), {})),
    (Pair(X, X), ((Pair(3, 3),), {})),
]


@pytest.mark.parametrize("tool", TOOLS)
def test_one_grammar(tool: str) -> None:
    """A tuple is positional arguments, a mapping named ones, anything else the only one."""
    is_slow = tool.startswith(("bench", "plan", "tune", "invariance"))
    for inputs, expected in GRAMMAR[1:5] if is_slow else GRAMMAR:
        _CALLS.clear()
        TOOLS[tool](Seen(), inputs)
        assert expected in _CALLS
        alone = [each for each in _CALLS if each != expected]
        assert not alone or tool == "invariance"  # which runs one row, too


def test_functions_without_arguments_need_no_inputs() -> None:
    linear = nn.Linear(4, 4)
    assert hmpx.compare(lambda: linear(X), **CPU).rows[0].op == "linear"
    assert hmpx.draw(lambda: linear(X)).nodes


@pytest.mark.parametrize(
    ("batches", "count"),
    [
        (X, 1),
        ((X, X), 1),
        ({"x": X}, 1),
        ([X], 1),
        ([X, (X, X), {"x": X}, [X]], 4),
        ((each for each in (X, X)), 2),
        (torch.utils.data.DataLoader([X[0]] * 6, batch_size=2, shuffle=True), 3),
    ],
    ids=["tensor", "tuple", "mapping", "list of one", "list", "generator", "loader"],
)
def test_several_inputs_are_batches(batches: Any, count: int) -> None:
    """An iterable of inputs; random numbers that a loader draws leave the program's alone."""
    _CALLS.clear()
    seen, state = Seen(), torch.get_rng_state()
    tuned(seen, batches, fresh_batches=X, budget=2)
    assert torch.equal(torch.get_rng_state(), state)
    reference = _CALLS[:count]
    assert len(reference) == count
    assert count == 1 or len(_CALLS) > 2 * count


# --- training batches ------------------------------------------------------------------------------

BATCH = (torch.randn(8, 4), torch.randint(0, 4, (8,)))
STEP: Any = {
    "forward_step": lambda model, batch: model(batch[0]),
    "loss_fn": lambda output, batch: F.cross_entropy(output, batch[1]),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def test_compare_takes_a_training_batch() -> None:
    net = model()
    found = hmpx.compare(net, BATCH, **STEP, **CPU)
    assert found.loss == F.cross_entropy(net(BATCH[0]), BATCH[1]).item()
    alone = hmpx.compare(
        net, BATCH[0], loss_fn=lambda output: F.cross_entropy(output, BATCH[1]), **CPU
    )
    assert [row.effect for row in found.rows] == [row.effect for row in alone.rows]
    assert {each.name for each in found.gradients} == {name for name, _ in net.named_parameters()}


def test_a_batch_is_given_to_a_loss_that_names_it() -> None:
    """Though the loss does not require it; another optional argument is not the batch."""
    seen: list[Any] = []

    def optional(output: Tensor, batch: Any = None) -> Tensor:
        seen.append(batch)
        return output.sum()

    def keyword(output: Tensor, *, batch: Any) -> Tensor:
        return optional(output, batch)

    def later(output: Tensor, weight: float = 1.0, batch: Any = None) -> Tensor:
        return optional(output, batch) * weight

    def swapped(batch: Tensor, output: Any) -> Tensor:
        return optional(batch, output)

    def other(output: Tensor, target: Any = None) -> Tensor:
        seen.append(target)
        return output.sum()

    for loss_fn in (optional, keyword, later, swapped):
        seen.clear()
        hmpx.compare(model(), BATCH, **{**STEP, "loss_fn": loss_fn}, **CPU)
        assert seen
        assert all(each is BATCH for each in seen), loss_fn
    seen.clear()
    hmpx.compare(model(), BATCH, **{**STEP, "loss_fn": other}, **CPU)
    assert set(seen) == {None}


def test_tune_takes_training_batches() -> None:
    losses = []

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        losses.append(batch[1])
        return F.cross_entropy(output, batch[1])

    other = (BATCH[0] + 1, BATCH[1].flip(0))
    best = tuned(model(), [BATCH, other], **{**STEP, "loss_fn": loss_fn}, metric="loss", budget=20)
    assert best.is_complete
    assert {id(each) for each in losses} == {id(BATCH[1]), id(other[1])}


def test_plan_takes_a_training_batch() -> None:
    found = hmpx.plan(model(), BATCH, "cpu", **STEP)
    alone = hmpx.plan(
        model(),
        BATCH[0],
        "cpu",
        loss_fn=lambda y: F.cross_entropy(y, torch.zeros(8, dtype=torch.long)),
    )
    assert found.gradient_bytes == alone.gradient_bytes > 0
    assert found.saved_bytes == alone.saved_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
@pytest.mark.parametrize("tool", ["compare", "plan", "tune"])
def test_a_loss_with_parameters_is_as_before(tool: str, device: str) -> None:
    """Its gradients, its running statistics and its attributes."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(3), 0

        def forward(self, output: Tensor, batch: Any) -> Tensor:
            self.calls += 1
            return F.cross_entropy(self.norm(output), batch[1])

    loss_fn, net = Weighted(), nn.Linear(16, 3)
    x, y = torch.randn(8, 16), torch.arange(8) % 3
    given: dict[str, Any] = {"forward_step": lambda model, batch: model(batch[0])}
    before = {name: each.clone() for name, each in loss_fn.state_dict().items()}
    if tool == "plan":
        hmpx.plan(net, (x, y), device, loss_fn=loss_fn, **given)
    elif tool == "compare":
        hmpx.compare(net, (x, y), loss_fn=loss_fn, **given, **CPU)
    else:
        options: dict[str, Any] = {"metric": "loss", "tolerance": 0.5, "progress": False}
        hmpx.tune(net, [(x, y)], loss_fn=loss_fn, **options, **given, **CPU)
    assert loss_fn.calls == 0
    assert all(each.grad is None for each in loss_fn.parameters())
    for name, each in loss_fn.state_dict().items():
        assert torch.equal(each, before[name]), name


@pytest.mark.parametrize("tool", ["compare", "plan", "tune"])
def test_a_batch_that_the_model_does_not_take(tool: str) -> None:
    """The error says which argument to give, and keeps the model's own error."""
    call = TOOLS[tool]
    for batch, part in (
        (BATCH, "batch[0]"),
        ([*BATCH], "batch[0]"),
        ({"x": BATCH[0], "labels": BATCH[1]}, "batch['x']"),
    ):
        with pytest.raises(OptionError) as raised:
            call(model(), batch)
        said = str(raised.value)
        assert said.startswith(f"{tool} called Sequential(")
        assert "float32[8, 4]" in said
        assert "int64[8]" in said
        assert f"give forward_step=lambda model, batch: model({part})" in said
        assert isinstance(raised.value.__cause__, TypeError)


def test_tools_without_a_forward_step_ask_for_the_models_part() -> None:
    with pytest.raises(OptionError, match=r"draw called .* inputs=batch\[0\]"):
        hmpx.draw(model(), BATCH)
    with pytest.raises(OptionError, match=r"expect.of called .* inputs=batch\[0\]"):
        hmpx.expect.of(model(), [*BATCH])
    with pytest.raises(OptionError, match=r"invariance called .* inputs=batch\[0\]"):
        hmpx.invariance(model(), BATCH)


def test_errors_of_the_model_itself_pass() -> None:
    """A model that takes the inputs has raised it for a reason of its own."""

    def broken(x: Tensor, y: Tensor) -> Tensor:
        raise TypeError("of the model")

    with pytest.raises(TypeError, match=r"^of the model"):
        hmpx.compare(broken, (X, X), **CPU)
    with pytest.raises(KeyError, match="nothing"):
        hmpx.compare(model(), BATCH, forward_step=lambda model, batch: {}["nothing"], **CPU)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (F.cross_entropy, "cross_entropy"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss"),
        (lambda output, target: F.cross_entropy(output, target.long()), "function"),
    ],
)
@pytest.mark.parametrize("tool", ["compare", "plan", "tune"])
def test_a_loss_of_the_target(tool: str, loss_fn: Any, name: str) -> None:
    tools: dict[str, Callable[..., object]] = {
        "compare": lambda **given: hmpx.compare(model(), BATCH, **CPU, **given),
        "plan": lambda **given: hmpx.plan(model(), BATCH, "cpu", **given),
        "tune": lambda **given: tuned(model(), BATCH, metric="loss", **given),
    }
    with pytest.raises(OptionError) as raised:
        tools[tool](**{**STEP, "loss_fn": loss_fn})
    said = str(raised.value)
    assert f"{tool} called {name}(output, batch) with the batch (float32[8, 4], int64[8])" in said
    assert f"give loss_fn=lambda output, batch: {name}(output, batch[1])" in said
    assert raised.value.__cause__ is not None


def test_errors_of_the_loss_itself_pass() -> None:
    def broken(output: Tensor, batch: Any) -> Tensor:
        raise KeyError("of the loss")

    with pytest.raises(KeyError, match="of the loss"):
        hmpx.compare(model(), BATCH, **{**STEP, "loss_fn": broken}, **CPU)


@pytest.mark.parametrize("name", ["model", "forward_step", "loss_fn"])
def test_they_must_be_functions(name: str) -> None:
    for call in (hmpx.compare, hmpx.tune, hmpx.plan):
        given: dict[str, Any] = {"model": model(), name: 3}
        second = {"batches" if call is hmpx.tune else "inputs": X}
        with pytest.raises(OptionError, match=rf"{name} must be a .*function.*, not 3"):
            call(**given, **second)


# --- old names -------------------------------------------------------------------------------------


def test_old_ways_to_call_warn_and_work() -> None:
    """At the user's line."""
    with pytest.warns(DeprecationWarning, match=r"inputs=\(x, y\)") as caught:
        hmpx.compare(lambda x, y: x @ y, X, X.T, **CPU)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"draw takes several inputs as a tuple"):
        hmpx.draw(lambda x, y: x @ y, X, X.T.requires_grad_())
    with pytest.warns(DeprecationWarning, match=r"invariance takes several inputs as a tuple"):
        hmpx.invariance(lambda x, y: x @ y, X, torch.ones(4, 4), threads=[1])
    with pytest.warns(DeprecationWarning, match=r"tune\(inputs=...\) is now batches=..."):
        hmpx.tune(Seen(), inputs=X, tolerance=0.9, budget=2, progress=False, device_types={"cpu"})  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"is now (model|inputs)=..."):
        hmpx.plan(model_fn=model, inputs_fn=X, device="cpu")  # type: ignore[call-arg]


def test_freeze_still_takes_names() -> None:
    net = nn.Bilinear(4, 4, 2).eval()
    with hmpx.convert(**CPU):
        for args, kwargs in (((X,), {"input2": X}), ((), {"input1": X, "input2": X}), ((X, X), {})):
            with pytest.warns(
                DeprecationWarning, match=r"freeze takes (named|several) inputs as a"
            ):
                frozen = hmpx.freeze(net, *args, **kwargs)
            frozen.undo()
