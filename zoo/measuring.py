"""Runs one model in one mode, stage by stage, and measures how far it is from fp32."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Entry
from .modes import Mode

SEED = 11
#: What losses are multiplied by, as a GradScaler does: gradients of fp16 would vanish. A power of two
#: changes nothing in bf16 and fp32.
LOSS_SCALE = 256.0
#: Outputs of this size are masks, not numbers.
_LARGEST = 1e20


@dataclass
class Run:
    """What one model did in one mode, in full."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    long_outputs: list[Tensor] = field(default_factory=list)
    tokens: Tensor | None = None
    #: Parameters and buffers as built in this mode, by name.
    built: dict[str, Tensor] = field(default_factory=dict)
    #: Stage -> class and first line of the error that ended it.
    errors: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the floating and complex tensors in nested outputs, in their order.

    Caches of keys and values are left out: they are inputs of a later call.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name != "past_key_values":
                yield from floating_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from floating_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from floating_tensors(getattr(value, f.name))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of all parameters and buffers, those outside of the state dict included."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def moved(value: Any, device: str) -> Any:
    """Returns nested inputs with their tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(item, device) for item in value)
    return value


def settle(model: nn.Module, entry: Entry, batch: Mapping[str, Any]) -> None:
    """Sets the statistics of batch norms to those of the batch.

    As built they are 0 and 1, and the activations of an untrained network grow or vanish with its
    depth.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [m for m in norms if m.track_running_stats and m.running_mean is not None]
    if not norms:
        return
    momenta = [m.momentum for m in norms]
    entry.compared_mode(model)
    for m in norms:
        m.train()
        m.momentum = 1.0
    with torch.no_grad():
        entry.forward(model, batch)
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum


def built(entry: Entry, seed: int = SEED) -> nn.Module:
    """Returns the model with the weights of this seed."""
    torch.manual_seed(seed)
    model = entry.build()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model


def loss_of(outputs: Any) -> Tensor | None:
    """Returns the loss among a model's outputs, if there is one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None


def backward(outputs: Any, seed: int = SEED) -> None:
    """Computes the gradients of the loss, or of a fixed random projection of the outputs.

    The projection's weights are given to autograd, so that no op of the measure is ever cast.
    """
    loss = loss_of(outputs)
    if loss is not None:
        loss.backward(torch.full_like(loss, LOSS_SCALE))
        return
    ends = [t for t in floating_tensors(outputs) if t.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(t.shape, generator=generator) for t in ends]
    scaled = [w * (LOSS_SCALE / max(w.numel(), 1) ** 0.5) for w in weights]
    torch.autograd.backward(ends, [w.to(t) for w, t in zip(scaled, ends, strict=True)])


def first_line(error: BaseException) -> str:
    """Returns an error's class and what its message begins with."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]


def run(
    entry: Entry,
    mode: Mode,
    notify: Callable[[str], None] = lambda stage: None,
    seed: int = SEED,
    device: str = "cpu",
) -> Run:
    """Returns what the model did in the mode; a stage that fails ends what depends on it.

    Args:
        entry: the model.
        mode: the way to run it.
        notify: is called with each stage's name before it begins.
        seed: of the weights, of the outputs' projection and of random ops.
        device: where the model runs; it is built on the CPU, with the same weights for each.
    """
    result = Run()
    start = time.perf_counter()
    model = built(entry, seed)
    batch = moved(entry.batch(model), device)
    long_batch = entry.long_batch(model) if entry.long_batch and mode.is_long else None
    long_batch = moved(long_batch, device)
    model.to(device)
    settle(model, entry, batch)
    entry.compared_mode(model)
    state: dict[str, Any] = {}

    def stage(name: str, function: Callable[[], None], *needs: str) -> None:
        if any(need in result.errors or need in state.get("skipped", ()) for need in needs):
            state.setdefault("skipped", set()).add(name)
            return
        notify(name)
        torch.manual_seed(seed)
        try:
            function()
        except Exception as error:
            result.errors[name] = first_line(error)

    def build() -> None:
        state["built after"] = built(entry, seed)
        result.built = tensors_of(state["built after"])

    def forward() -> None:
        with mode.region(device):
            state["outputs"] = entry.forward(model, batch)
        result.outputs = [t.detach().cpu().clone() for t in floating_tensors(state["outputs"])]

    def differentiate() -> None:
        backward(state.pop("outputs"), seed)
        for p in model.parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense() / LOSS_SCALE
            result.gradients.append(gradient.detach().cpu())
            p.grad = gradient.detach().to(p.dtype)

    def generate() -> None:
        assert entry.generate is not None
        with mode.region(device), torch.no_grad():
            result.tokens = entry.generate(model, batch)

    def forward_long() -> None:
        with mode.region(device), torch.no_grad():
            outputs = entry.forward(model, long_batch)
        result.long_outputs = [t.detach().cpu().clone() for t in floating_tensors(outputs)]

    def step() -> None:
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()

    def train() -> None:
        trained = state["built after"].to(device).train()
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
        with mode.region(device):
            outputs = entry.forward(trained, batch)
        backward(outputs, seed)
        for parameter in trained.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense() / LOSS_SCALE
        optimizer.step()

    with warnings.catch_warnings(), mode.process(device):
        warnings.simplefilter("ignore")
        stage("build", build)
        stage("forward", forward)
        if entry.generate is not None:
            stage("generate", generate)
        if long_batch is not None:
            stage("long", forward_long)
        stage("backward", differentiate, "forward")
        stage("step", step, "backward")
        stage("train", train, "build")
    result.seconds = time.perf_counter() - start
    return result


def _flat(tensors: list[Tensor]) -> Tensor:
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return torch.cat([part.detach().double().reshape(-1) for part in parts] or [torch.zeros(0)])


@dataclass(frozen=True)
class Distance:
    """How far tensors are from those of fp32."""

    #: Norm of the difference over the norm; None where the shapes differ or nothing is comparable.
    relative: float | None
    #: Numbers that are NaN or infinite where fp32's are finite.
    not_finite: int


def distance(actual: list[Tensor], expected: list[Tensor]) -> Distance:
    """Returns how far `actual` is from `expected`; masks and infinities of fp32 are left out."""
    pairs = [
        (a, e)
        for a, e in zip(actual, expected, strict=False)
        if a.shape == e.shape and a.is_complex() == e.is_complex()
    ]
    if len(pairs) != len(expected) or len(actual) != len(expected):
        return Distance(None, int(sum((~t.isfinite()).sum() for t in actual)))
    a, e = (_flat(list(side)) for side in zip(*pairs, strict=True)) if pairs else (_flat([]),) * 2
    compared = e.isfinite() & (e.abs() < _LARGEST)
    a, e = a[compared], e[compared]
    lost = int((~a.isfinite()).sum())
    norm = e.norm().item()
    if lost or not norm:
        return Distance(None, lost)
    return Distance((a - e).norm().item() / norm, 0)


def different(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Returns the names whose tensors differ in anything: type, shape or a bit."""
    names = sorted({*actual, *expected})
    return [
        name
        for name in names
        if name not in actual
        or name not in expected
        or actual[name].dtype is not expected[name].dtype
        or not torch.equal(actual[name].nan_to_num(), expected[name].nan_to_num())
    ]


def measure(result: Run, reference: Run) -> dict[str, Any]:
    """Returns the line of the results file, as plain data, for a run beside fp32's."""
    line: dict[str, Any] = {"errors": result.errors, "seconds": round(result.seconds, 2)}
    for name in ("outputs", "gradients", "long_outputs"):
        expected: list[Tensor] = getattr(reference, name)
        actual: list[Tensor] = getattr(result, name)
        if not expected or not actual:
            continue
        found = distance(actual, expected)
        line[name] = found.relative
        line[f"{name}_not_finite"] = found.not_finite
    if "build" not in result.errors:
        line["built_differently"] = different(result.built, reference.built)
    if result.tokens is not None and reference.tokens is not None:
        line["tokens_equal"] = bool(
            result.tokens.shape == reference.tokens.shape
            and torch.equal(result.tokens, reference.tokens)
        )
    return line
