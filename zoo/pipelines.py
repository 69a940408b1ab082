"""Whether arithmetic outside of models stays fp32, bit for bit, under plain `hmpx.convert()`.

    python zoo/pipelines.py                          # all groups
    python zoo/pipelines.py torch diffusers          # these groups only

A case computes something on fp32 tensors: data preparation, augmentation, metrics, schedulers of
diffusion models, geometry, graph utilities. Each runs in plain torch, converted, and in a
``torch.autocast`` region, and everything that it gives is compared with plain torch bit by bit,
dtypes included. Where hmpx differs, the ops that it ran in low precision are named. Rewrites the
groups' parts of docs/evidence/peers.md. Groups whose package is missing are left out. Cases of a package's
docstrings run its examples as they stand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import io
import logging
import math
import os
import pkgutil
import random
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from peers import DOCUMENT, put
from peers_plugin import TimedOutError, time_limit

import hmpx

SECONDS: Final = 30


@dataclass(frozen=True)
class Case:
    """A computation on fp32 tensors, and the group that it belongs to."""

    group: str
    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Difference:
    """How what a case gives differs from what it gives in plain torch.

    Attributes:
        error: Largest difference of numbers, relative to the largest value of their tensor.
        is_other_type: Whether some tensor has another dtype.
        said: What was raised, or which values can't be compared by numbers; ``""`` for neither.
    """

    error: float = 0.0
    is_other_type: bool = False
    said: str = ""

    def __bool__(self) -> bool:
        return self != Difference()

    def __str__(self) -> str:
        if self.said:
            return self.said[:90].replace("|", "\\|")
        number = f"{self.error:.1e}" if self.error else "equal"
        return f"{number}, other dtype" if self.is_other_type else number

    @property
    def raised(self) -> bool:
        """Whether an exception was raised that plain torch doesn't raise."""
        return self.said.startswith("raised")

    def is_worse_than(self, other: Difference) -> bool:
        """Whether it is a difference of a graver kind, or more than twice as large."""
        if self.raised or other.raised:
            return self.raised and not other.raised
        if self.said or other.said:
            return bool(self.said) and not other.said
        return self.error > 2 * other.error or (self.is_other_type and not other)


@dataclass(frozen=True)
class Verdict:
    """How a case fares.

    Attributes:
        name: The case's.
        hmpx: The difference that hmpx makes.
        autocast: That a region of torch.autocast makes.
        ops: The ops that hmpx ran in low precision, where it makes a difference.
    """

    name: str
    hmpx: Difference
    autocast: Difference
    ops: tuple[str, ...] = ()


# --- running and comparing ---------------------------------------------------------------------


@dataclass(frozen=True)
class Raised:
    """What a case raised instead of giving values."""

    kind: str
    said: str


def execute(case: Case) -> list[object] | Raised:
    """Returns all values that a case gives, seeded, or what it raised."""
    seed = zlib.crc32(case.name.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        with (
            time_limit(SECONDS),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            return list(leaves(case.run()))
    except (Exception, TimedOutError) as error:
        return Raised(type(error).__name__, " ".join(str(error).split())[:200])


def leaves(value: object, depth: int = 0) -> Iterator[object]:
    """Yields copies of the tensors, arrays and numbers in a value, and what else can be compared."""
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, np.ndarray | np.generic):
        yield np.array(value)
    elif isinstance(value, bool | int | float | complex | str | None):
        yield value
    elif depth > 6:
        yield type(value)
    elif isinstance(value, Mapping):
        for key in value:
            yield str(key)
            yield from leaves(value[key], depth + 1)
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from leaves(each, depth + 1)
    elif isinstance(value, torch.nn.Module):
        yield from leaves(value.state_dict(), depth + 1)
    elif dataclasses.is_dataclass(value) or type(value).__module__ not in {"builtins", "types"}:
        yield type(value).__qualname__
        yield from leaves(dict(getattr(value, "__dict__", {})), depth + 1)


def difference(expected: list[object] | Raised, actual: list[object] | Raised) -> Difference:
    """Returns how the values of a case differ from those in plain torch."""
    if isinstance(actual, Raised):
        return Difference(said=f"raised {actual.kind}: {actual.said}")
    if isinstance(expected, Raised) or len(expected) != len(actual):
        return Difference(said="other values")
    found = [_difference(a, b) for a, b in zip(expected, actual, strict=True)]
    return Difference(
        max((each.error for each in found), default=0.0),
        any(each.is_other_type for each in found),
        next((each.said for each in found if each.said), ""),
    )


def _difference(expected: object, actual: object) -> Difference:
    arrays = (torch.Tensor, np.ndarray, float, complex)
    if type(expected) is type(actual) and isinstance(expected, arrays):
        try:
            return _tensor_difference(torch.as_tensor(expected), torch.as_tensor(actual))
        except TypeError:  # an array of objects or texts
            expected, actual = np.asarray(expected).tolist(), np.asarray(actual).tolist()
    if type(expected) is type(actual) and expected == actual:
        return Difference()
    return Difference(said=f"{str(actual)[:30]} for {str(expected)[:30]}")


def _tensor_difference(expected: torch.Tensor, actual: torch.Tensor) -> Difference:
    if expected.layout is not actual.layout or expected.shape != actual.shape:
        return Difference(said="other shapes")
    if expected.layout is not torch.strided or expected.is_quantized or expected.is_nested:
        same = str(expected) == str(actual)
        return Difference() if same else Difference(said=f"other {expected.layout}")
    is_other_type = expected.dtype is not actual.dtype
    wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    a, b = expected.to(wide), actual.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Difference(is_other_type=is_other_type)
    if not bool((a[~same].isfinite() & b[~same].isfinite()).all()):
        return Difference(said="inf or NaN in other places")
    largest = a[a.isfinite()].abs().amax()
    return Difference(float((a - b)[~same].abs().amax() / largest.clamp_min(1e-30)), is_other_type)


def verdicts(cases: list[Case]) -> tuple[list[Verdict], list[str]]:
    """Returns a verdict for each case that plain torch runs the same way twice, and the other ones."""
    first = [execute(case) for case in cases]
    second = [execute(case) for case in cases]
    usable = [
        index
        for index, (a, b) in enumerate(zip(first, second, strict=True))
        if not isinstance(a, Raised) and not difference(a, b)
    ]
    with hmpx.convert(device_types={"cpu"}):
        converted = {index: execute(cases[index]) for index in usable}
    found = []
    for index in usable:
        with torch.autocast("cpu", torch.bfloat16):
            autocast = execute(cases[index])
        changed = difference(first[index], converted[index])
        ops = low_ops(cases[index]) if changed else ()
        autocast_changed = difference(first[index], autocast)
        found.append(Verdict(cases[index].name, changed, autocast_changed, ops))
    return found, [cases[i].name for i in range(len(cases)) if i not in set(usable)]


#: What an example may have imported.
_NO_VALUES: Final = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def low_ops(case: Case) -> tuple[str, ...]:
    """Returns the ops that hmpx runs in low precision in a case, by its log."""
    logger, lines = logging.getLogger("hmpx"), _Lines()
    propagates, level = logger.propagate, logger.level
    logger.addHandler(lines)
    logger.propagate = False
    try:
        with hmpx.convert(device_types={"cpu"}, verbose="once"):
            execute(case)
    finally:
        logger.removeHandler(lines)
        logger.propagate = propagates
        logger.setLevel(level)
    cast = [line.split() for line in lines.lines if " LOW " in line]
    return tuple(sorted({words[1].partition("(")[0] for words in cast}))


# --- cases -------------------------------------------------------------------------------------


def torch_cases() -> Iterator[Case]:
    """Data preparation and features, written with torch alone."""
    made = torch.Generator().manual_seed(0)
    image = torch.rand(3, 24, 32, generator=made)
    batch = torch.rand(4, 3, 24, 32, generator=made)
    table = torch.randn(50, 6, generator=made) * 1000 + 300
    wave = torch.randn(2, 4000, generator=made)
    labels = torch.arange(4) % 3
    grid = torch.rand(4, 24, 32, 2, generator=made) * 2 - 1
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    window = torch.hann_window(256)

    def spectrum() -> torch.Tensor:
        return torch.stft(wave, 256, 64, window=window, return_complex=True)

    def mel_weights() -> torch.Tensor:
        hertz = torch.linspace(0, 8000, 129)
        low, high = (2595 * math.log10(1 + f / 700) for f in (0.0, 8000.0))
        points = 700 * (10 ** (torch.linspace(low, high, 42) / 2595) - 1)
        slopes = points[None] - hertz[:, None]
        widths = points.diff()
        return torch.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]).clamp_min(0)

    def rope() -> object:
        inverse = 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64))
        angles = torch.arange(2048).float()[:, None] * inverse[None]
        return angles, angles.cos(), angles.sin(), torch.outer(torch.arange(2048.0), inverse)

    def ema() -> object:
        kept = torch.zeros(6)
        for row in table:
            kept.mul_(0.99).add_(row, alpha=0.01)
            kept = 0.99 * kept + 0.01 * row
        return kept

    def clipping() -> object:
        weight = torch.nn.Parameter(image.clone())
        (weight * weight).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([weight], 0.5)
        return norm, weight.grad

    def bands() -> torch.Tensor:
        return (spectrum().abs() ** 2).transpose(1, 2)

    cases: dict[str, Callable[[], object]] = {
        "normalise an image": lambda: (image - mean[:, None, None]) / std[:, None, None],
        "normalise in place": lambda: (
            image.clone().sub_(mean[:, None, None]).div_(std[:, None, None])
        ),
        "scale uint8": lambda: (image * 255).to(torch.uint8).float().mul(1 / 255),
        "a number times 1": lambda: torch.tensor(1234.5) * 1.0,
        "standardise a table": lambda: (table - table.mean(0)) / table.std(0),
        "min-max, logarithms, quantiles": lambda: (
            (table - table.amin(0)) / (table.amax(0) - table.amin(0)),
            table.abs().log1p(),
            table.log2(),
            table.quantile(0.25, dim=0),
            table.median(0),
        ),
        "outer products and powers": lambda: (torch.outer(table[:, 0], table[:, 1]), table**3),
        "cumulative sums, differences": lambda: (
            table.cumsum(0),
            table.cumprod(0),
            table.diff(dim=0),
        ),
        "covariance (torch.cov)": lambda: torch.cov(table.T),
        "covariance by @": lambda: (table - table.mean(0)).T @ (table - table.mean(0)) / 49,
        "correlation (torch.corrcoef)": lambda: torch.corrcoef(table.T),
        "histograms": lambda: (torch.histc(table, 20), torch.histogram(table, 20)),
        "weighted sampling": lambda: torch.multinomial(table.abs(), 3),
        "moving average by avg_pool1d": lambda: F.avg_pool1d(table.T[None], 5, 1),
        "moving average by conv1d": lambda: F.conv1d(table.T[:, None], torch.full((1, 1, 5), 0.2)),
        "distances (cdist)": lambda: torch.cdist(table, table),
        "cosine similarities": lambda: F.cosine_similarity(table[:, None], table[None], dim=-1),
        "unit vectors (F.normalize)": lambda: F.normalize(table, dim=-1),
        "grid_sample, affine_grid": lambda: (
            F.grid_sample(batch, grid, align_corners=False),
            F.affine_grid(torch.eye(2, 3).expand(4, 2, 3), [4, 3, 24, 32], align_corners=False),
        ),
        "padding, folds, patches": lambda: (
            F.pad(batch, (2, 2, 2, 2), "reflect"),
            F.unfold(batch, 4, stride=4),
            batch.unfold(2, 4, 4).unfold(3, 4, 4),
        ),
        "mixup": lambda: 0.3 * batch + 0.7 * batch.flip(0),
        "cutmix": lambda: torch.where(torch.rand(24, 32) > 0.5, batch, batch.flip(0)),
        "smoothed labels": lambda: F.one_hot(labels, 3).float() * 0.9 + 0.1 / 3,
        "luma by weights and sum": lambda: (
            image * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
        ).sum(0),
        "luma by tensordot": lambda: torch.tensordot(torch.tensor([0.299, 0.587, 0.114]), image, 1),
        "luma by einsum": lambda: torch.einsum(
            "c,chw->hw", torch.tensor([0.299, 0.587, 0.114]), image
        ),
        "gamma": lambda: (image.clamp(0, 1) ** (1 / 2.2)).mul(255).round(),
        "noise with F.dropout": lambda: F.dropout(image, 0.3),
        "clipping by relu": lambda: F.relu(image - 0.5),
        "rotary angles": rope,
        "sinusoidal positions": lambda: torch.sin(
            torch.arange(1000.0)[:, None]
            * torch.exp(torch.arange(0, 64, 2) * (-math.log(1e4) / 64))
        ),
        "moving average of weights": ema,
        "gradients of x*x, clipped": clipping,
        "stft, istft": lambda: (
            spectrum(),
            torch.istft(spectrum(), 256, 64, window=window),
        ),
        "spectrogram in decibels": lambda: (
            10 * torch.log10((spectrum().abs() ** 2).clamp_min(1e-10))
        ),
        "mel weights": mel_weights,
        "mel spectrogram by @": lambda: bands() @ mel_weights(),
        "mel spectrogram by product and sum": lambda: (bands()[..., None] * mel_weights()).sum(2),
        "preemphasis": lambda: torch.cat([wave[:, :1], wave[:, 1:] - 0.97 * wave[:, :-1]], dim=1),
        "fft filters": lambda: torch.fft.irfft(torch.fft.rfft(wave) * torch.linspace(1, 0, 2001)),
        "a loss's weights": lambda: F.cross_entropy(table[:4, :3] / 1000, labels, weight=mean),
        "a regression's losses": lambda: (
            F.mse_loss(table, table.flip(0)),
            F.huber_loss(table, table.flip(0)),
            F.smooth_l1_loss(table, table.flip(0)),
            F.gaussian_nll_loss(table, table.flip(0), table.abs() + 1),
        ),
        "advantages and returns": lambda: _returns(table[:, 0]),
        "QR, singular values, determinants": lambda: (
            torch.linalg.qr(table),
            torch.linalg.svdvals(table),
            torch.linalg.det(table[:6]),
        ),
        "initial weights": lambda: (
            torch.nn.Linear(16, 16),
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.LSTM(8, 8),
            torch.nn.init.orthogonal_(torch.empty(16, 16)),
            torch.nn.init.trunc_normal_(torch.empty(16, 16)),
        ),
        "distributions": lambda: (
            torch.distributions.Normal(table[:, 0], 2.0).log_prob(table[:, 1]),
            torch.distributions.Gamma(2.0, 3.0).sample((5,)),
            torch.distributions.Categorical(logits=table).entropy(),
        ),
    }
    for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
        for size in ((12, 16), (50, 41)):
            cases[f"interpolate {mode} to {size}"] = lambda mode=mode, size=size: F.interpolate(
                batch, size, mode=mode
            )
    for antialiased in ("bilinear", "bicubic"):
        cases[f"interpolate {antialiased}, antialiased"] = lambda mode=antialiased: F.interpolate(
            batch, (12, 16), mode=mode, antialias=True
        )
    for name, run in cases.items():
        yield Case("torch", name, run)


def _returns(rewards: torch.Tensor) -> object:
    returns = torch.zeros_like(rewards)
    running = torch.tensor(0.0)
    for step in reversed(range(len(rewards))):
        running = rewards[step] + 0.99 * running
        returns[step] = running
    return returns, (returns - returns.mean()) / (returns.std() + 1e-8)


def torchvision_cases() -> Iterator[Case]:
    """The functions of torchvision.transforms.v2 on float and byte images, and boxes."""
    functional = importlib.import_module("torchvision.transforms.v2.functional")
    v2 = importlib.import_module("torchvision.transforms.v2")
    ops = importlib.import_module("torchvision.ops")
    made = torch.Generator().manual_seed(0)
    floats = torch.rand(2, 3, 24, 32, generator=made)
    images = {"float": floats, "uint8": (floats * 255).to(torch.uint8)}
    corners = [[0, 0], [31, 0], [31, 23], [0, 23]]
    moved = [[2, 1], [29, 2], [30, 20], [1, 22]]
    rotation: dict[str, Any] = {"translate": [2, 3], "scale": 1.2, "shear": [5.0, 2.0]}
    functions: dict[str, Callable[[torch.Tensor], object]] = {
        "normalize": lambda x: functional.normalize(
            functional.to_dtype(x, torch.float32, scale=True), [0.4] * 3, [0.2] * 3
        ),
        "to_dtype": lambda x: functional.to_dtype(x, torch.float32, scale=True),
        "resize": lambda x: functional.resize(x, [16, 20]),
        "resize bicubic": lambda x: functional.resize(
            x, [40, 50], interpolation=v2.InterpolationMode.BICUBIC
        ),
        "resized_crop": lambda x: functional.resized_crop(x, 2, 3, 15, 15, [24, 24]),
        "pad": lambda x: functional.pad(x, [2, 3], padding_mode="reflect"),
        "affine": lambda x: functional.affine(x, 30.0, **rotation),
        "rotate": lambda x: functional.rotate(x, 33.0, interpolation=v2.InterpolationMode.BILINEAR),
        "perspective": lambda x: functional.perspective(x, corners, moved),
        "elastic": lambda x: functional.elastic(
            x, torch.linspace(-0.1, 0.1, 24 * 32 * 2).view(1, 24, 32, 2)
        ),
        "adjust_brightness": lambda x: functional.adjust_brightness(x, 1.3),
        "adjust_contrast": lambda x: functional.adjust_contrast(x, 0.7),
        "adjust_gamma": lambda x: functional.adjust_gamma(x, 0.8),
        "adjust_hue": lambda x: functional.adjust_hue(x, 0.2),
        "adjust_saturation": lambda x: functional.adjust_saturation(x, 1.6),
        "adjust_sharpness": lambda x: functional.adjust_sharpness(x, 1.7),
        "autocontrast": functional.autocontrast,
        "equalize": functional.equalize,
        "gaussian_blur": lambda x: functional.gaussian_blur(x, [5, 5]),
        "gaussian_noise": lambda x: functional.gaussian_noise(
            functional.to_dtype(x, torch.float32, scale=True)
        ),
        "invert": functional.invert,
        "posterize": lambda x: functional.posterize(x, 3),
        "solarize": lambda x: functional.solarize(x, 100 if x.dtype == torch.uint8 else 0.4),
        "to_grayscale": functional.to_grayscale,
        "ten_crop": lambda x: functional.ten_crop(x, [10, 10]),
        "erase": lambda x: functional.erase(x, 2, 3, 5, 5, torch.zeros(3, 1, 1, dtype=x.dtype)),
        "RandAugment": v2.RandAugment(5),
        "TrivialAugmentWide": v2.TrivialAugmentWide(),
        "AugMix": v2.AugMix(),
        "ColorJitter": v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "RandomPhotometricDistort": v2.RandomPhotometricDistort(p=1),
        "LinearTransformation": lambda x: v2.LinearTransformation(
            torch.eye(3 * 24 * 32), torch.zeros(3 * 24 * 32)
        )(functional.to_dtype(x, torch.float32, scale=True)),
        "MixUp": lambda x: v2.MixUp(num_classes=3)(
            functional.to_dtype(x, torch.float32), torch.tensor([0, 2])
        ),
        "CutMix": lambda x: v2.CutMix(num_classes=3)(x, torch.tensor([0, 2])),
    }
    for kind, image in images.items():
        for name, function in functions.items():
            yield Case("torchvision", f"{name}, {kind}", lambda f=function, x=image: f(x))
    boxes = torch.rand(8, 4, generator=made) * 50
    boxes[:, 2:] += boxes[:, :2] + 1
    scores = torch.rand(8, generator=made)
    for name, call in {
        "nms": lambda: ops.nms(boxes, scores, 0.3),
        "box_iou": lambda: ops.box_iou(boxes, boxes.flip(0)),
        "generalized_box_iou": lambda: ops.generalized_box_iou(boxes, boxes.flip(0)),
        "box_convert": lambda: ops.box_convert(boxes, "xyxy", "cxcywh"),
        "complete_box_iou_loss": lambda: ops.complete_box_iou_loss(boxes, boxes.flip(0)),
        "sigmoid_focal_loss": lambda: ops.sigmoid_focal_loss(scores, (scores > 0.5).float()),
    }.items():
        yield Case("torchvision", f"ops.{name}", call)


def diffusers_cases() -> Iterator[Case]:
    """Each scheduler of diffusers: its tables, ten steps with a stand-in for the model, its noise."""
    diffusers = importlib.import_module("diffusers")
    for name in dir(diffusers):
        if "Scheduler" not in name or name.endswith("Output"):
            continue
        try:
            scheduler = getattr(diffusers, name)
            is_one = inspect.isclass(scheduler) and hasattr(scheduler, "step")
        except ImportError:  # a stand-in that says which package is missing
            continue
        if is_one:
            yield Case("diffusers", name, lambda each=scheduler: _denoise(each))


def _denoise(scheduler_class: Any) -> object:
    scheduler = scheduler_class()
    if hasattr(scheduler, "set_timesteps"):
        scheduler.set_timesteps(10)
    if hasattr(scheduler, "set_sigmas"):
        scheduler.set_sigmas(10)
    timesteps = scheduler.timesteps
    sample = torch.randn(1, 4, 8, 8)
    noise = torch.randn(1, 4, 8, 8)
    found: list[object] = [
        timesteps,
        getattr(scheduler, "sigmas", None),
        _noised(scheduler, sample, noise),
    ]
    names = set(inspect.signature(scheduler.step).parameters)
    for index, timestep in enumerate(timesteps[:10]):
        after = timesteps[min(index + 1, len(timesteps) - 1)]
        values = sample
        if hasattr(scheduler, "scale_model_input"):
            values = scheduler.scale_model_input(sample, timestep)
        known = {
            "model_output": torch.sin(3 * values) + 0.1 * noise,
            "timestep": timestep,
            "sample": sample,
            "old_pred_original_sample": None,
            "timestep_back": timesteps[max(index - 1, 0)],
            "original_image": noise,
            "mask": (noise > 0).float(),
            "prev_timestep": after if "prev_timestep" in names else None,
        }
        given = {key: value for key, value in known.items() if key in names}
        if name_of(scheduler) == "DDPMWuerstchenScheduler":
            given["timestep"] = timestep[None]
        found.append(scheduler.step(**given))
        sample = found[-1].prev_sample if hasattr(found[-1], "prev_sample") else found[-1][0]
    return found


def name_of(value: object) -> str:
    """Returns the name of a value's class."""
    return type(value).__name__


def _noised(scheduler: Any, sample: torch.Tensor, noise: torch.Tensor) -> object:
    if not hasattr(scheduler, "add_noise"):
        return None
    if "noise" not in inspect.signature(scheduler.add_noise).parameters:
        return None
    try:
        return scheduler.add_noise(sample, noise, scheduler.timesteps[3:4])
    except NotImplementedError:  # for inference only
        return None


def graph_cases() -> Iterator[Case]:
    """Graph utilities of torch_geometric, and its convolutions, whose matrix products are low."""
    utils = importlib.import_module("torch_geometric.utils")
    nn = importlib.import_module("torch_geometric.nn")
    made = torch.Generator().manual_seed(0)
    edges = torch.randint(20, (2, 80), generator=made)
    weights = torch.rand(80, generator=made)
    nodes = torch.randn(20, 16, generator=made)
    batch = torch.arange(20) // 7
    values = nodes[edges[0]]
    functions: dict[str, Callable[[], object]] = {
        **{
            f"scatter {how}": lambda how=how: utils.scatter(values, edges[1], reduce=how)
            for how in ("sum", "mean", "max", "min", "mul")
        },
        "softmax": lambda: utils.softmax(weights, edges[1]),
        "degree": lambda: utils.degree(edges[0]),
        "coalesce": lambda: utils.coalesce(edges, weights),
        "get_laplacian": lambda: utils.get_laplacian(edges, weights, normalization="sym"),
        "to_undirected": lambda: utils.to_undirected(edges, weights),
        "add_remaining_self_loops": lambda: utils.add_remaining_self_loops(edges, weights),
        "to_dense_adj": lambda: utils.to_dense_adj(edges, edge_attr=weights),
        "to_dense_batch": lambda: utils.to_dense_batch(nodes, batch),
        "assortativity": lambda: utils.assortativity(edges),
        "homophily": lambda: utils.homophily(edges, batch),
        "normalized_cut": lambda: utils.normalized_cut(edges, weights),
        "segment": lambda: utils.segment(nodes, torch.tensor([0, 5, 20])),
        "get_ppr": lambda: utils.get_ppr(edges),
        "gcn_norm": lambda: nn.conv.gcn_conv.gcn_norm(edges, weights),
        "spmm": lambda: utils.spmm(
            torch.sparse_coo_tensor(edges, weights, (20, 20)).to_sparse_csr(), nodes
        ),
        "positional encodings": lambda: nn.PositionalEncoding(16)(torch.arange(20.0)),
        "knn by cdist": lambda: torch.cdist(nodes, nodes).topk(3, largest=False),
    }
    for name in (
        "SumAggregation",
        "MeanAggregation",
        "VarAggregation",
        "StdAggregation",
        "SoftmaxAggregation",
        "PowerMeanAggregation",
        "MedianAggregation",
    ):
        functions[name] = lambda name=name: getattr(nn.aggr, name)()(nodes.abs(), batch)
    for name in (
        "BatchNorm",
        "InstanceNorm",
        "LayerNorm",
        "GraphNorm",
        "PairNorm",
        "MeanSubtractionNorm",
    ):
        functions[name] = lambda name=name: _norm(getattr(nn.norm, name))(nodes)
    for name in sorted(nn.conv.__all__):
        functions[name] = lambda name=name: _convolved(getattr(nn.conv, name), nodes, edges)
    for name, run in functions.items():
        yield Case("torch_geometric", name, run)


def _norm(norm: Any) -> Any:
    return norm(16) if "in_channels" in inspect.signature(norm).parameters else norm()


def _convolved(convolution: Any, nodes: torch.Tensor, edges: torch.Tensor) -> object:
    """Returns output and gradient of a graph convolution that takes nodes and edges alone."""
    known = {
        "in_channels": 16,
        "out_channels": 8,
        "channels": 16,
        "K": 2,
        "num_layers": 2,
        "heads": 2,
    }
    known |= {"nn": torch.nn.Linear(16, 8), "dim": 1, "kernel_size": 2, "num_timesteps": 2}
    wanted = inspect.signature(convolution).parameters.values()
    given = {
        each.name: known[each.name]
        for each in wanted
        if each.name in known and each.default is each.empty
    }
    nodes = nodes.clone().requires_grad_()
    out = convolution(**given)(nodes, edges)
    out.float().square().mean().backward()
    return out, nodes.grad


class Example:
    """The examples of one docstring, run as they stand."""

    def __init__(self, test: doctest.DocTest) -> None:
        self._test = test

    def __call__(self) -> object:
        """Returns what the examples print and the variables that they leave."""
        values: list[object] = []
        names = dict(self._test.globs)
        show, sys.displayhook = sys.displayhook, values.append
        try:
            for index, example in enumerate(self._test.examples):
                if example.options.get(doctest.SKIP):
                    continue
                code = compile(example.source, f"<{self._test.name} {index}>", "single")
                try:
                    exec(code, names)  # the package's own docstring
                except Exception as error:
                    if example.exc_msg is None:
                        raise
                    values.append(type(error).__name__)
        finally:
            sys.displayhook = show
        left = {
            name: value
            for name, value in names.items()
            if name not in self._test.globs
            and not name.startswith("__")
            and not isinstance(value, _NO_VALUES)
        }
        return values, left


def docstring_cases(package: str, *prefixes: str) -> Iterator[Case]:
    """The examples in docstrings of a package's modules whose names begin with one of ``prefixes``."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    seen = set()
    for name in _modules(package, prefixes):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except Exception:  # of optional packages that aren't there, in each package's own way
            continue
        for test in finder.find(module, name):
            source = "".join(example.source for example in test.examples)
            if test.examples and "plot(" not in source and source not in seen:
                seen.add(source)
                yield Case(package, test.name, Example(test))


def _modules(package: str, prefixes: tuple[str, ...]) -> Iterator[str]:
    top = importlib.import_module(package)
    for found in pkgutil.walk_packages(top.__path__, f"{package}.", onerror=lambda name: None):
        if not prefixes or found.name.startswith(prefixes):
            yield found.name


KORNIA: Final = ("geometry", "color", "filters", "enhance", "losses", "metrics", "morphology")

GROUPS: Final[Mapping[str, Callable[[], Iterable[Case]]]] = {
    "torch": torch_cases,
    "torchvision": torchvision_cases,
    "diffusers": diffusers_cases,
    "torchmetrics": lambda: docstring_cases("torchmetrics"),
    "kornia": lambda: docstring_cases("kornia", *(f"kornia.{part}" for part in KORNIA)),
    "torch_geometric": graph_cases,
}


# --- writing -----------------------------------------------------------------------------------


HEADER: Final = (
    "| cases | bit-equal | bit-equal under autocast | raise | raise under autocast "
    "| worse than autocast | left out |\n|---|---|---|---|---|---|---|"
)


def section(group: str, found: list[Verdict], unusable: list[str]) -> str:
    """Returns what docs/evidence/peers.md says of one group: counts, what is worse, and what differs by op."""
    unequal = [each for each in found if each.hmpx]
    worse = [each for each in unequal if each.hmpx.is_worse_than(each.autocast)]
    counted = (
        len(found),
        len(found) - len(unequal),
        sum(not each.autocast for each in found),
        sum(each.hmpx.raised for each in found),
        sum(each.autocast.raised for each in found),
        len(worse),
        len(unusable),
    )
    about = next(iter((GROUPS[group].__doc__ or "Examples in docstrings.").splitlines()))
    lines = [f"### {group}", "", about, "", HEADER, f"| {' | '.join(map(str, counted))} |"]
    if worse:
        lines += ["", "| worse than autocast | low ops | hmpx | autocast |", "|---|---|---|---|"]
        lines += [
            f"| `{short(each.name)}` | {', '.join(each.ops)} | {each.hmpx} | {each.autocast} |"
            for each in worse
        ]
    by_ops: dict[tuple[str, ...], list[Verdict]] = {}
    for each in unequal:
        by_ops.setdefault(each.ops, []).append(each)
    if unequal:
        lines += ["", "| low ops | median error | autocast's | what differs |", "|---|---|---|---|"]
    for ops, verdicts_ in sorted(by_ops.items(), key=lambda pair: -len(pair[1])):
        names = ", ".join(dict.fromkeys(f"`{short(each.name)}`" for each in verdicts_))
        errors = [median(getattr(each, who).error for each in verdicts_) for who in _BOTH]
        lines.append(f"| {', '.join(ops)} | {errors[0]:.0e} | {errors[1]:.0e} | {names} |")
    return "\n".join(lines)


_BOTH: Final = ("hmpx", "autocast")


def short(name: str) -> str:
    """Returns the last two parts of a dotted name; and other names as they are."""
    return name if " " in name else ".".join(name.split(".")[-2:])


def main() -> None:
    """Runs the groups that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=", ".join(GROUPS))
    parser.add_argument("--write", type=Path, default=DOCUMENT, help="the document to write to")
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    for group in options.groups or GROUPS:
        if importlib.util.find_spec(group) is None:
            print(f"{group}: not installed")
            continue
        found, unusable = verdicts(list(GROUPS[group]()))
        content = section(group, found, unusable)
        print(content, f"left out: {', '.join(unusable)}", sep="\n")
        text = options.write.read_text("utf-8") if options.write.exists() else "# Peers\n"
        options.write.write_text(put(text, f"pipelines {group}", content), encoding="utf-8")


if __name__ == "__main__":
    main()
