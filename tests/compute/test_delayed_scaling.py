"""Formats with a history: tensors are scaled by the amaxes of earlier training steps."""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import OptionError, formats
from hmpx.compute import delayed
from hmpx.formats import Float, Scaled, quantize
from hmpx.integrations import converted_run
from tests.values import normal

E4M3, E5M2 = formats.get("float8_e4m3fn"), formats.get("float8_e5m2")
assert isinstance(E4M3, Float)
assert isinstance(E5M2, Float)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

STEPS = 20

#: Fields of a format, and those of Transformer Engine's ``DelayedScaling`` that say the same.
RECIPES: dict[str, tuple[dict[str, Any], tuple[int, str, int]]] = {
    "max of 4": ({"history": 4}, (4, "max", 0)),
    "max of 1": ({"history": 1, "amax_rule": "max"}, (1, "max", 0)),
    "max of 16, margin": ({"history": 16, "margin": 2}, (16, "max", 2)),
    "most recent": ({"history": 3, "amax_rule": "most_recent"}, (3, "most_recent", 0)),
}


def scaled(element: Float = E4M3, **fields: Any) -> Scaled:
    """Returns a format with a history."""
    return Scaled(f"{element.name}_of_a_test", element, **{"history": 4, **fields})


def converted(
    history: dict[str, Any] | None = None, ops: tuple[str, ...] = ("linear",)
) -> hmpx.Session:
    """Converts to e4m3 forward and e5m2 backward, with results in float32, as tensor cores have them."""
    fields = history or {}
    decision = hmpx.Decision(
        hmpx.ALLOW,
        dtype=scaled(**fields),
        gradients=scaled(E5M2, **fields),
        output_dtype=torch.float32,
    )
    policy = hmpx.Policy(dict.fromkeys(ops, decision))
    return hmpx.convert(policy=policy, device_types={"cpu"})


# --- the oracle: Transformer Engine's rule, with torch's own casts to 8 bits ------------------------


class Recipe:
    """The amaxes and the scale of one tensor of one layer."""

    def __init__(self, length: int, algorithm: str, margin: int) -> None:
        self.amax_history = [0.0] * length
        self.algorithm, self.margin = algorithm, margin
        self.scale_inv: Tensor | None = None

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns ``x`` as 8 bits hold it."""
        amax, most = x.detach().abs().max(), torch.finfo(dtype).max
        self.amax_history[0] = max(self.amax_history[0], amax.item())
        scale_inv = amax / most if self.scale_inv is None else self.scale_inv
        return (x / scale_inv).clamp(-most, most).to(dtype).float() * scale_inv

    def update(self, dtype: torch.dtype) -> None:
        """Ends a step."""
        amax = max(self.amax_history) if self.algorithm == "max" else self.amax_history[0]
        if amax > 0 and math.isfinite(amax):
            self.scale_inv = torch.tensor(amax) / torch.finfo(dtype).max * 2.0**self.margin
        self.amax_history = [0.0, *self.amax_history[:-1]]


class Product(torch.autograd.Function):
    """A product of 8-bit matrices, whose gradients are such products as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Reference) -> Tensor:
        x, weight = layer.x.cast(x, torch.float8_e4m3fn), layer.w.cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = ctx.layer.g.cast(gradient, torch.float8_e5m2)
        return gradient @ weight, gradient.t() @ x, None


class Reference(nn.Linear):
    """A linear layer as Transformer Engine computes it."""

    def prepare(self, *recipe: Any) -> None:
        """Starts its histories."""
        self.x, self.w, self.g = (Recipe(*recipe) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [n, k] times the weight."""
        return Product.apply(x, self.weight, self) + self.bias  # type: ignore[no-any-return, no-untyped-call]

    def update(self) -> None:
        """Ends a step."""
        self.x.update(torch.float8_e4m3fn)
        self.w.update(torch.float8_e4m3fn)
        self.g.update(torch.float8_e5m2)


class Net(nn.Module):
    """Two layers; the first may be computed again in the backward."""

    def __init__(self, layer: type[nn.Linear] = nn.Linear, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = layer(8, 16), layer(16, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Returns [n, 4] for [n, 8]."""
        if self.reentrant is None:
            return self.second(self.first(x).relu())  # type: ignore[no-any-return]
        hidden = checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=self.reentrant)
        return self.second(hidden)  # type: ignore[no-any-return]


def batch(step: int) -> Tensor:
    """Returns inputs whose range changes from step to step."""
    return normal(32, 8, seed=step) * (1.0 + step % 5)


def train(
    model: nn.Module,
    after: Callable[[], None] = lambda: None,
    *,
    steps: range = range(STEPS),
    parts: int = 1,
    closure: bool = False,
) -> list[float]:
    """Trains; returns the losses.

    Args:
        model: The model.
        after: Called after each step.
        steps: Their numbers.
        parts: How many parts of a batch accumulate gradients.
        closure: The optimizer runs the step.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in steps:

        def run(step: int = step) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in batch(step).chunk(parts):
                loss = model(part.clone().requires_grad_()).square().mean()
                loss.backward()
                total = total + loss.detach()
            return total

        if closure:
            losses.append(optimizer.step(run).item())  # type: ignore[attr-defined]
        else:
            losses.append(run().item())
            optimizer.step()
        after()
    return losses


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    """Checks that two models have the same parameters, bit for bit."""
    for value, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(value, expected)


@pytest.fixture(params=["numbers", "tensors"])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Keeps amaxes as numbers, as on the CPU, or in tensors, as on devices."""
    if request.param == "tensors":
        monkeypatch.setattr(delayed, "_is_on_host", lambda x: False)
    return str(request.param)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_trains_as_transformer_engine(name: str, parts: int, kept_as: str) -> None:
    """Losses and weights of twenty steps, bit for bit; also where two backwards make one step."""
    fields, recipe = RECIPES[name]
    reference = Net(Reference)
    layers = [reference.first, reference.second]
    for layer in layers:
        layer.prepare(*recipe)  # type: ignore[operator]
    expected = train(reference, lambda: [layer.update() for layer in layers] and None, parts=parts)  # type: ignore[func-returns-value, operator]
    model = Net()
    with converted(fields):
        assert train(model, parts=parts) == expected
    assert_equal(model, reference)
    plain = Net()
    with converted({"history": None, "amax_rule": None, "margin": 0}):
        assert train(plain, parts=parts) != expected  # scales by the tensors at hand are others


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(reentrant: bool, kept_as: str) -> None:
    """A checkpoint sees the scales of its forward, and its tensors are counted once."""
    model, other = Net(), Net(reentrant=reentrant)
    with converted() as session:
        expected = train(model)
        states = session.histories.state_dict()
    with converted() as session:
        assert train(other) == expected
        assert session.histories.state_dict() == states
    assert_equal(other, model)


def test_graphs_scale_by_the_steps_between_their_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CUDA graph folds in amaxes, Python does not know of it: every step ends the histories."""
    monkeypatch.setattr(delayed, "_is_on_host", lambda x: False)
    with converted():
        expected = train(Net())
    monkeypatch.setattr("hmpx.compute.amaxes.is_captured", lambda amax: True)
    model = Net()
    with converted() as session:
        assert train(model) == expected
        steps = {each["steps"] for each in session.histories.state_dict().values()}
        torch.optim.SGD(model.parameters()).step()
        after = {each["steps"] for each in session.histories.state_dict().values()}
    assert (steps, after) == ({STEPS}, {STEPS + 1})


def test_recomputation_in_a_later_step_is_said() -> None:
    """Its scales are others; once a conversion."""
    model = Net(reentrant=False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with converted():
        for number in range(2):
            loss = model(batch(0)).sum()
            optimizer.step()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                loss.backward()
            said = [str(each.message) for each in found]
            assert ["recomputed after a step of an optimizer" in each for each in said] == (
                [True] if number == 0 else []
            )


def test_a_closure_ends_no_step_of_its_own() -> None:
    """Neither one that is called once, nor those that LBFGS calls to search along a line."""
    model, other = Net(), Net()
    with converted():
        expected = train(model)
    with converted():
        assert train(other, closure=True) == expected
    searched = Net()
    optimizer = torch.optim.LBFGS(searched.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    references: list[list[float]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = searched(batch(len(steps))).square().mean()
        loss.backward()
        references[-1].append(reference_of(session, "first:linear:weight"))
        return loss

    with converted() as session:
        steps: list[int] = []
        for _ in range(3):
            references.append([])
            optimizer.step(closure)  # type: ignore[arg-type]
            steps.append(1)
    assert all(len(each) > 1 for each in references)
    assert [len(set(each)) for each in references] == [1, 1, 1]
    assert references[0][0] == 0 < references[1][0]


def reference_of(session: hmpx.Session, place: str) -> float:
    """Returns the amax by which a tensor of `Net` is scaled."""
    state = session.histories.state_dict()
    return float(next(value["reference"] for key, value in state.items() if place in key))


def test_evaluation_changes_nothing_and_uses_the_last_scales(kept_as: str) -> None:
    """Without gradients nothing is counted."""
    model, other = Net(), Net()
    with converted():
        expected = train(model)

    def evaluate() -> None:
        with torch.no_grad():
            other.eval()
            other(batch(3) * 100)
            other.train()

    with converted() as session:
        assert train(other, evaluate) == expected
        assert_equal(other, model)
        linear = other.first
        references = [reference_of(session, f"first:linear:{each}") for each in ("input", "weight")]
        x = batch(1) * 8
        assert x.abs().max() > references[0]
        with torch.no_grad():
            found = other(x)
        format = scaled()
        scales = [format.scale(torch.tensor(each)) for each in references]
        rounded = quantize(x, format, scale=scales[0])
        hidden = F.linear(rounded, quantize(linear.weight, format, scale=scales[1]).detach())
    assert rounded.max() == scales[0] * 448
    with torch.no_grad():
        hidden = (hidden + linear.bias).relu()
        references = [
            reference_of(session, f"second:linear:{each}") for each in ("input", "weight")
        ]
        scales = [format.scale(torch.tensor(each)) for each in references]
        expected_result = F.linear(
            quantize(hidden, format, scale=scales[0]),
            quantize(other.second.weight, format, scale=scales[1]),
        )
        assert torch.equal(found, expected_result + other.second.bias)


def test_inference_alone_is_current_scaling() -> None:
    """There is no earlier step, nor is one made."""
    model, x = Net(), batch(1)
    with torch.no_grad():
        with converted({"history": None}):
            expected = model(x)
        with converted() as session:
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x * 8), model(x * 8))
            assert session.histories.state_dict() == {}


def test_a_conversion_starts_anew_and_goes_on() -> None:
    """`revert` forgets; an equal `convert` and new rules do not; a nested conversion has its own."""
    with converted():
        first = train(Net())
    with converted() as session:
        model = Net()
        found = train(model, steps=range(8))
        kept = session.histories.state_dict()
        assert converted() is session
        with hmpx.convert(low_precision_type=scaled(), device_types={"cpu"}) as inner:
            model(batch(1))
            assert inner.histories is not session.histories

        @hmpx.register_rule("linear")
        def nothing(call: Any) -> None:
            call.module  # noqa: B018  # so that it is asked by place

        try:
            assert session.histories.state_dict() == kept
            found += train(model, steps=range(8, STEPS))
        finally:
            hmpx.unregister_rule("linear")
        session.revert()
    assert found == first


def test_a_checkpoint_carries_the_histories(kept_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, into another conversion and another model; a longer history takes them, too."""
    with converted():
        expected = train(Net())
    model = Net()
    with converted() as session:
        train(model, steps=range(7))
        text = json.dumps(session.histories.state_dict())
    with converted() as session:
        session.histories.load_state_dict(json.loads(text))
        assert session.histories.state_dict() == json.loads(text)
        assert train(model, steps=range(7, STEPS)) == expected[7:]
    with converted({"history": 9}) as session:
        session.histories.load_state_dict(json.loads(text))
        monkeypatch.setattr(delayed, "_is_on_host", lambda x: kept_as == "tensors")
        train(Net(), steps=range(1))
        lengths = {len(each["amaxes"]) for each in session.histories.state_dict().values()}
        assert lengths == {9}


def test_the_plugins_carry_the_histories() -> None:
    """What a framework's checkpoint holds goes on in another run."""
    low = "float8_e4m3fn_delayed"
    with converted_run.ConvertedRun({"low_precision_type": low}, None, None) as run:
        expected = train(Net(), steps=range(6))
    model = Net()
    with converted_run.ConvertedRun({"low_precision_type": low}, None, None) as run:
        train(model, steps=range(3))
        saved = json.loads(json.dumps(run.state_dict()))
    with converted_run.ConvertedRun({"low_precision_type": low}, None, None) as run:
        run.load_state_dict(saved)
        assert train(model, steps=range(3, 6)) == expected[3:]
    with converted_run.ConvertedRun({}, None, None) as run:
        assert run.state_dict().keys() == {"hmpx", "policy"}


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"x": {"steps": 1}},
        {"x": {"steps": 1, "pending": None, "reference": math.nan, "amaxes": []}},
        {"x": {"steps": -1, "pending": None, "reference": 1.0, "amaxes": []}},
        {"x": {"steps": 1, "pending": None, "reference": 1.0, "amaxes": [-1.0]}},
        {"x": {"steps": 1, "pending": None, "reference": 1.0, "amaxes": [1.0] * 65537}},
    ],
    ids=lambda state: str(state)[:60],
)
def test_wrong_states_are_refused(state: Any) -> None:
    """A clear error; what there was stays."""
    with converted() as session:
        train(Net(), steps=range(2))
        kept = session.histories.state_dict()
        with pytest.raises(OptionError, match=r"(form|result) of Histories\.state_dict\(\)"):
            session.histories.load_state_dict(state)
        assert session.histories.state_dict() == kept


# --- keys --------------------------------------------------------------------------------------------


def one_step(session: hmpx.Session, *calls: Callable[[], Tensor]) -> None:
    """Runs calls, their backwards, and the end of a step."""
    for call in calls:
        call().sum().backward()
    session.histories.end_step()


def test_models_of_one_class_have_their_own() -> None:
    """A teacher's activations don't scale a student's; what a model leaves is not another's."""
    with converted() as session:
        models = [Net(), Net()]
        student, teacher = (
            lambda model=model, factor=factor: model(batch(0) * factor)
            for model, factor in zip(models, (1, 64), strict=True)
        )
        one_step(session, student, teacher)
        state = session.histories.state_dict()
        names = {key.partition(":")[0] for key in state}
        assert names == {"Net", "Net#2"}
        small, large = (
            next(
                v["reference"]
                for k, v in state.items()
                if k.startswith(f"{name}:first:linear:input")
            )
            for name in ("Net", "Net#2")
        )
        assert large == 64 * small
        del models[0], student
        gc.collect()
        heir = Net()
        x = batch(0) * 8
        found = heir(x)
        state = session.histories.state_dict()
    with converted({"history": None}):
        assert torch.equal(found, heir(x))  # no history yet
    assert {key.partition(":")[0] for key in state} == {"Net", "Net#2"}


def test_functions_outside_of_modules() -> None:
    """Their ops have keys without a module."""
    weight = normal(4, 8, seed=1).requires_grad_()
    with converted() as session:
        one_step(session, lambda: F.linear(batch(0), weight))
        assert reference_of(session, "::linear:input") == batch(0).abs().max().item()


def test_two_optimizers() -> None:
    """A step ends the histories that have seen something since their last."""
    discriminator, generator = nn.Linear(8, 1), nn.Linear(4, 8)
    noise = normal(16, 4, seed=5)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (discriminator, generator)]
    with converted({"history": 8}) as session:
        for _ in range(2):
            with torch.no_grad():
                fake = generator(noise)
            discriminator(fake).mean().backward()
            steps[0].step()
            discriminator(generator(noise)).mean().backward()
            steps[1].step()
            steps[0].step()  # has seen nothing
        state = session.histories.state_dict()
    counts = {key: value["steps"] for key, value in state.items() if ":input:" in key}
    assert sorted(counts.values()) == [2, 4]
    gradient = "Linear::linear:gradient"  # the generator's, which was called first
    assert next(v["steps"] for k, v in state.items() if k.startswith(gradient)) == 2


def test_roles() -> None:
    """Inputs, weights, results, what is added, and the gradients of all."""
    low = scaled()
    policy = hmpx.Policy({"linear": hmpx.Decision(hmpx.ALLOW, dtype=low, gradients=low)})
    linear = nn.Linear(8, 4)
    with hmpx.convert(policy=policy, device_types={"cpu"}) as session:
        one_step(session, lambda: linear(batch(0).requires_grad_()))
        roles = {key.split(":")[3] for key in session.histories.state_dict()}
    inputs = {"input", "weight", "bias"}
    assert roles == {*inputs, "result", "gradient", *(f"gradient of {each}" for each in inputs)}


def test_factors_in_lists() -> None:
    """Each has a role where the product is taken apart; else those of one argument share it."""
    a, b = batch(0), normal(8, 4, seed=2).requires_grad_()
    with converted(ops=("einsum",)) as session:
        one_step(session, lambda: torch.einsum("nk,km->nm", a, b))
        assert reference_of(session, "einsum:factor 0") == a.abs().max().item()
        assert reference_of(session, "einsum:factor 1") == b.abs().max().item()


# --- torch.compile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_train_as_eager_ones(backend: str, fresh_dynamo: None) -> None:
    """The graph looks at the histories when it runs; inductor adds up means in another order."""
    model, other = Net(), Net()
    with converted() as session:
        expected = train(model)
        states = session.histories.state_dict()
    with converted() as session:
        compiled: Any = torch.compile(other, backend=backend, fullgraph=True)
        found = train(compiled)
        assert session.histories.state_dict().keys() == states.keys()
        if backend == "aot_eager":
            assert found == expected
            assert session.histories.state_dict() == states
        kept = session.histories.state_dict()
        with torch.no_grad():
            if backend == "aot_eager":
                assert torch.equal(compiled(batch(1)), other(batch(1)))
        assert session.histories.state_dict() == kept
    assert {value["steps"] for value in kept.values()} == {STEPS}
    assert found == pytest.approx(expected, rel=0.01)
    with converted({"history": None}):
        assert train(Net()) != pytest.approx(expected, rel=0.01)


def called(model: nn.Module, x: Tensor) -> Tensor:
    """Returns a model's result."""
    return model(x)  # type: ignore[no-any-return]


def test_a_compiled_step_ends_a_step(fresh_dynamo: None) -> None:
    """The optimizer's may be part of a graph."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="aot_eager")
    with converted() as session:
        for number in range(3):
            model(batch(number)).sum().backward()
            step()
        counts = [value["steps"] for value in session.histories.state_dict().values()]
    assert counts == [3] * 6


# --- hostile values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_and_not_kept(value: float, kept_as: str) -> None:
    """It makes NaN of all its tensor, as without a history, and leaves the scales alone."""
    linear = nn.Linear(8, 4)
    broken = batch(0)
    broken[3, 2] = value
    with converted() as session:
        one_step(session, lambda: linear(broken))
        assert reference_of(session, "linear:input") == 0
        one_step(session, lambda: linear(batch(1)))
        assert linear(broken).isnan().all()
        session.histories.end_step()
        assert reference_of(session, "linear:input") == batch(1).abs().max().item()
        with torch.no_grad():
            assert linear(broken).isnan().all()
            assert linear(batch(1)).isfinite().all()


def test_zeros_keep_the_last_scale(kept_as: str) -> None:
    """Also for longer than the history is; and zeros before there is any leave the tensor its own."""
    linear = nn.Linear(8, 4)
    with converted({"history": 2}) as session:
        one_step(session, lambda: linear(torch.zeros(2, 8)))
        found = linear(batch(1))
        session.histories.end_step()
        for _ in range(3):
            one_step(session, lambda: linear(torch.zeros(2, 8)))
        assert reference_of(session, "linear:input") == batch(1).abs().max().item()
    with converted({"history": None}):
        assert torch.equal(found, linear(batch(1)))


def test_gradients_of_torch_func_have_histories() -> None:
    """`torch.func.grad`, and parameters that are updated by hand: as with an optimizer."""
    model, other = Net(), Net()
    parameters = {name: value.detach().clone() for name, value in other.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(other, parameters, (x,)).square().mean()

    with converted():
        train(model, steps=range(6))
    with converted() as session:
        for step in range(6):
            gradients = torch.func.grad(loss)(parameters, batch(step))
            parameters = {
                name: torch.add(parameters[name], gradients[name], alpha=-0.05)
                for name in gradients
            }
            session.histories.end_step()
    for name, value in model.named_parameters():
        assert torch.equal(value, parameters[name])


# --- formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": "row"}, "history is for one scale a tensor, .*granularity 'row'.*leave"),
        ({"granularity": 16}, "granularity 16"),
        ({"granularity": (2, 3)}, r"granularity \(2, 3\)"),
        ({"scale_format": "e4m3", "tensor_scale": True}, "in addition to those of blocks"),
        ({"history": 0}, "history must be an integer from 1 to 65536, not 0"),
        ({"history": True}, "history must be an integer"),
        ({"history": 2.0}, "history must be an integer"),
        ({"amax_rule": "mean"}, "amax_rule must be 'max' or 'most_recent', not 'mean'"),
        ({"margin": -1}, "margin must be an integer from 0 to 64"),
        ({"history": None, "margin": 1}, "margin is for a history; add history=16"),
        ({"history": None, "amax_rule": "max"}, "amax_rule is for a history"),
    ],
    ids=str,
)
def test_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    """One error each."""
    with pytest.raises(OptionError, match=message):
        scaled(**fields)


def test_by_itself_a_format_keeps_nothing() -> None:
    """`quantize` scales by the tensor at hand."""
    x = batch(0)
    assert torch.equal(quantize(x, scaled()), quantize(x, "float8_e4m3fn_tensor"))
    assert torch.equal(quantize(x, "float8_e5m2_delayed"), quantize(x, "float8_e5m2_tensor"))


def test_by_name_on_a_list(tmp_path: Any) -> None:
    """On lines of lists, and in policy files."""
    path = tmp_path / "fp8.txt"
    path.write_text("linear float8_e4m3fn_delayed gradients=float8_e5m2_delayed output=float32\n")
    with hmpx.convert(path, device_types={"cpu"}) as session:
        one_step(session, lambda: nn.Linear(8, 4)(batch(0)))
        names = {key.rpartition(":")[2] for key in session.histories.state_dict()}
        text = session.policy.to_yaml()
    assert names == {"float8_e4m3fn_delayed", "float8_e5m2_delayed"}
    assert "float8_e4m3fn_delayed" in text
