"""Casts off, or as they were, without being asked: printing, optimizers, checkpoints."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hmpx
from hmpx import Policy

FP32, BF16 = torch.float32, torch.bfloat16
POLICY = Policy.from_ops(low=["mul", "matmul", "linear", "add", "sub", "div"])


# --- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=False),
}


def stepped(name: str) -> tuple[Tensor, list[torch.dtype]]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5))
    optimizer = OPTIMIZERS[name]([parameter])
    for _ in range(3):
        parameter.grad = torch.linspace(-1, 1, 5)
        optimizer.step()
    state = [
        v.dtype
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, Tensor) and v.is_floating_point()
    ]
    return parameter.detach(), state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_arithmetic_is_not_cast(name: str) -> None:
    """The step equals that of unconverted torch bit for bit, and its state stays fp32."""
    expected, _ = stepped(name)
    with hmpx.convert(policy=POLICY):
        actual, state = stepped(name)
        assert hmpx.casts_enabled()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert set(state) <= {FP32}


class Plain(torch.optim.Optimizer):
    """An optimizer of the user's own: records what a product gives inside step."""

    def __init__(self, params: list[Tensor], fails: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.seen: list[torch.dtype] = []
        self.fails = fails

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        self.seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        if closure is not None:
            self.seen.append(closure().dtype)
        if self.fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("is_early", [True, False])
def test_the_step_that_a_scheduler_holds(is_early: bool) -> None:
    """A scheduler of learning rates keeps the step of its optimizer as it was."""
    optimizer = Plain([nn.Parameter(torch.ones(2, 2))])
    if is_early:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with hmpx.convert(policy=POLICY):
        if not is_early:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    assert optimizer.seen == [FP32, BF16]
    optimizer.step(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    assert optimizer.seen[2:] == [FP32, FP32]


def test_a_users_optimizer_defined_before_or_after_convert() -> None:
    """Its step is not cast, its closure is: that is the user's forward."""
    a = torch.ones(2, 2)
    before = Plain([nn.Parameter(a)])
    with hmpx.convert(policy=POLICY):

        class Later(Plain):
            def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
                super().step(closure)

        for optimizer in (before, Plain([nn.Parameter(a)]), Later([nn.Parameter(a)])):
            optimizer.step(lambda: a @ a)
            assert optimizer.seen == [FP32, BF16]
            optimizer.step(closure=lambda: a @ a)
            assert optimizer.seen[2:] == [FP32, BF16]
            with hmpx.disable_casts():
                optimizer.step(lambda: a @ a)
            assert optimizer.seen[4:] == [FP32, FP32]
        kept = Later([nn.Parameter(a)])
    kept.step(lambda: a @ a)
    assert kept.seen == [FP32, FP32]


def test_an_exception_in_step_leaves_casts_on() -> None:
    """The region closes however the step is left."""
    with hmpx.convert(policy=POLICY):
        with pytest.raises(ZeroDivisionError):
            Plain([nn.Parameter(torch.ones(2))], fails=True).step()
        assert hmpx.casts_enabled()


def test_lbfgs_runs_its_closure_with_casts_on() -> None:
    """LBFGS calls the closure several times from inside step."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1), torch.randn(8, 3)
    seen: set[torch.dtype] = set()
    with hmpx.convert(policy=POLICY):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            output = model(data)
            seen.add(output.dtype)
            loss = output.float().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert seen == {BF16}
    assert {p.dtype for p in model.parameters()} == {FP32}


# --- loss scaling, and clipping gradients --------------------------------------------------------

#: Lists under which an op of any name runs in low precision.
EVERYTHING = {"lists": "none", "low": ["*"]}


def scaled_steps(forward: Callable[[], contextlib.AbstractContextManager[object]]) -> list[Tensor]:
    """Returns loss, gradients' norm, scale and weights after each step of a training in float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        with forward():
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        weight = model[0].weight.detach().clone()
        found += [loss.detach(), norm, torch.tensor(scaler.get_scale()), weight]
    return found


@pytest.mark.native
def test_loss_scaling_is_as_under_autocast() -> None:
    """HMP's lists have `mul`; a scale of 65,536 is infinite in float16, and the step was skipped."""
    expected = scaled_steps(lambda: torch.autocast("cpu", torch.float16))
    with hmpx.convert(lists="hmp", low_precision_type=torch.float16, device_types={"cpu"}):
        actual = scaled_steps(contextlib.nullcontext)
    assert [scale.item() for scale in actual[2::4]] == [65536.0] * 4
    weights = actual[3::4]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class OwnScaler(torch.amp.GradScaler):
    """A loss scaler of the user's own."""

    def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        """Returns them times the scale."""
        return outputs * torch.full((), 65536.0)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Returns the loss, scaled."""
        return self.scale(closure())


def test_loss_scalers_in_other_classes() -> None:
    """Also those of classes made after `convert`; what a closure computes is the user's forward."""
    a = torch.ones(2, 2)
    own_scale = vars(OwnScaler)["scale"]
    kept = torch.amp.GradScaler("cpu")
    with hmpx.convert(policy=EVERYTHING, low_precision_type=torch.float16, device_types={"cpu"}):

        class Later(OwnScaler):
            def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
                return outputs * torch.full((), 65536.0)

        for scaler in (OwnScaler("cpu"), Later("cpu"), kept, torch.amp.GradScaler("cpu")):
            assert scaler.scale(torch.ones(())).item() == 65536
            assert (a @ a).dtype is torch.float16
            assert scaler.get_scale() == 65536
        losses: list[Tensor] = []
        optimizer = torch.optim.SGD([nn.Parameter(a)])
        for scaler in (OwnScaler("cpu"), Later("cpu")):
            assert scaler.step(optimizer, lambda: losses.append(a @ a) or a).dtype is FP32
        assert [loss.dtype for loss in losses] == [torch.float16] * 2
        late = Later
    assert vars(OwnScaler)["scale"] is own_scale
    assert late("cpu").scale(torch.ones(())).item() == 65536


class Trainer:
    """Holds functions that it took before `convert`, where no module's names say so."""

    clip_norm = staticmethod(nn.utils.clip_grad_norm_)
    clip_value = staticmethod(nn.utils.clip_grad_value_)
    clip_with_norm = staticmethod(nn.utils.clip_grads_with_norm_)
    total_norm = staticmethod(nn.utils.get_total_norm)


def with_gradients(dtype: torch.dtype) -> list[Tensor]:
    """Returns parameters with gradients beyond what float16 holds."""
    parameters = [nn.Parameter(torch.zeros(n, 3, dtype=dtype)) for n in (2, 5)]
    for position, parameter in enumerate(parameters):
        values = torch.linspace(-9, 7, parameter.numel()).exp2() * 777 * (1 + position)
        parameter.grad = values.view_as(parameter).to(dtype)
    return parameters


def clipped_by_norm(parameters: list[Tensor], norm_type: float, foreach: bool) -> list[Tensor]:
    norm = Trainer.clip_norm(parameters, 1.1, norm_type, foreach=foreach)
    return [norm, *[p.grad for p in parameters if p.grad is not None]]


def clipped_in_two_steps(parameters: list[Tensor], norm_type: float, foreach: bool) -> list[Tensor]:
    found = [p.grad for p in parameters if p.grad is not None]
    norm = Trainer.total_norm(found, norm_type, foreach=foreach)
    Trainer.clip_with_norm(parameters, 1.1, norm, foreach)
    return [norm, *found]


def clipped_by_value(parameters: list[Tensor], norm_type: float, foreach: bool) -> list[Tensor]:
    Trainer.clip_value(parameters, norm_type * 1.1, foreach)
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("clip", [clipped_by_norm, clipped_in_two_steps, clipped_by_value])
@pytest.mark.parametrize("policy", [EVERYTHING, {"lists": "none", "fp32": ["*"]}])
def test_clipping_gradients_is_not_cast(
    clip: Callable[[list[Tensor], float, bool], list[Tensor]], policy: dict[str, object]
) -> None:
    """Whoever holds the functions, since whenever; bits and dtypes are those of torch alone."""
    cases = list(itertools.product((FP32, BF16), (1.0, 2.0, 0.5, float("inf")), (False, True)))
    expected = [clip(with_gradients(dtype), *how) for dtype, *how in cases]
    parameters = [with_gradients(dtype) for dtype, *_ in cases]
    with hmpx.convert(policy=policy, low_precision_type=torch.float16, device_types={"cpu"}):
        actual = [clip(p, *how) for p, (_, *how) in zip(parameters, cases, strict=True)]
        assert hmpx.casts_enabled()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# --- checkpoints --------------------------------------------------------------------------------


class Recorder(nn.Module):
    """A linear layer that records the dtype of its output in forward and in recomputation."""

    def __init__(self, inner_off: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.inner_off = inner_off

    def forward(self, x: Tensor) -> Tensor:
        with hmpx.disable_casts() if self.inner_off else contextlib.nullcontext():
            output = self.linear(x)
        self.seen.append(output.dtype)
        return torch.tanh(output.float())


def gradients(
    module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor], off: str
) -> list[Tensor]:
    """Returns the gradients of a pass with casts off in ``off``: forward, backward, both or none."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    with hmpx.disable_casts() if off in ("forward", "both") else contextlib.nullcontext():
        output = run(leaf)
    with hmpx.disable_casts() if off in ("backward", "both") else contextlib.nullcontext():
        output.sum().backward()
    assert leaf.grad is not None
    return [leaf.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inner_off", [True, False])
@pytest.mark.parametrize("off", ["none", "forward", "backward", "both"])
def test_recomputation_sees_the_state_of_its_forward(
    use_reentrant: bool, inner_off: bool, off: str
) -> None:
    """Same dtypes and gradients as without a checkpoint (pytorch #71169, #141896, #148831)."""
    module, x = Recorder(inner_off), torch.randn(3, 4)
    with hmpx.convert(policy=Policy.from_ops(low=["linear"])):
        expected = gradients(module, x, module, off)
        module.seen.clear()
        actual = gradients(
            module, x, lambda t: checkpoint(module, t, use_reentrant=use_reentrant), off
        )
    want = FP32 if inner_off or off in ("forward", "both") else BF16
    assert module.seen == [want, want]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_checkpoint_sequential() -> None:
    """A sequence of segments is recomputed with casts on, though they are off in the backward."""
    module = nn.Sequential(Recorder(), Recorder())
    with hmpx.convert(policy=Policy.from_ops(low=["linear"])):
        gradients(
            module,
            torch.randn(3, 4),
            lambda t: checkpoint_sequential(module, 2, t, use_reentrant=False),
            "backward",
        )
    assert {dtype for part in module for dtype in part.seen} == {BF16}  # type: ignore[union-attr]


# --- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_an_rnn_takes_the_low_precision_output_of_a_layer(kind: str) -> None:
    """nn.RNNBase checks its input's dtype in Python, before the op that would cast the weights."""
    torch.manual_seed(0)
    rnn, linear, x = getattr(nn, kind)(4, 3), nn.Linear(4, 4), torch.randn(5, 2, 4)
    message = "RNN input dtype"
    with hmpx.convert():
        output, _ = rnn(linear(x))
        assert output.dtype is BF16
        with hmpx.disable_casts(), pytest.raises(ValueError, match=message):
            rnn(x.bfloat16())
    with pytest.raises(ValueError, match=message):
        rnn(x.bfloat16())
    output.float().sum().backward()
    assert {p.grad.dtype for p in rnn.parameters() if p.grad is not None} == {FP32}


def test_transformer_encoders_fast_path_is_off_while_converted() -> None:
    """It would bypass the lists: one fused kernel in the dtype of its weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        fast = layer(x)
        assert torch.backends.mha.get_fastpath_enabled()
        with hmpx.convert(policy=Policy.from_ops(low=["linear"])):
            assert not torch.backends.mha.get_fastpath_enabled()
            converted = layer(x)
            with hmpx.disable_casts():
                torch.testing.assert_close(layer(x), fast, rtol=0, atol=0)
        assert torch.backends.mha.get_fastpath_enabled()
    assert not torch.equal(converted, fast)
    torch.testing.assert_close(converted, fast, rtol=0.1, atol=0.1)  # bf16 linears: 2^-8 relative
