"""Models of transformers, by the library's own names, each with a batch that suits its task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry, integers, normal
from .shrinking import shrink

#: Token ids below stand for something, those above stand for images and the like.
_FIRST, _LAST = 5, 80
LONGEST = 1500
_NEW_TOKENS = 4


@dataclass(frozen=True)
class Model:
    """A class of transformers and what its small configuration needs."""

    name: str
    class_name: str
    #: A key of `BATCHES`.
    task: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    #: Set on the configuration once it is made.
    attributes: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = True
    is_long: bool = True


def text(config: Any) -> Any:
    """Returns the part of a configuration that is about text."""
    return config.get_text_config()


def _tokens(length: int, rows: int = 2) -> Tensor:
    return integers(_FIRST, _LAST, (rows, length))


def language(model: nn.Module, length: int) -> Batch:
    """Token ids, and the same as labels."""
    ids = _tokens(length, 2 if length < 100 else 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def sequences(model: nn.Module, length: int) -> Batch:
    """Token ids, and shorter labels."""
    rows = 2 if length < 100 else 1
    ids = _tokens(length, rows)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": _tokens(12, rows),
    }


def _size(config: Any) -> int:
    for part in (config, getattr(config, "backbone_config", None)):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size
    return 64


def image(model: nn.Module, length: int) -> Batch:
    """Images."""
    size = _size(model.config)
    return {"pixel_values": normal(4, getattr(model.config, "num_channels", 3), size, size)}


def labelled_image(model: nn.Module, length: int) -> Batch:
    """Images with classes."""
    return {**image(model, length), "labels": integers(0, model.config.num_labels, (4,))}


def boxes(model: nn.Module, length: int) -> Batch:
    """Images with boxes."""
    box = torch.tensor([[0.5, 0.5, 0.4, 0.3], [0.3, 0.6, 0.2, 0.2]])
    labels = [{"class_labels": torch.tensor([1, 0]), "boxes": box} for _ in range(4)]
    return {**image(model, length), "labels": labels}


def masks(model: nn.Module, length: int) -> Batch:
    """Images with masks."""
    images = image(model, length)
    size = images["pixel_values"].shape[-1]
    mask = (normal(2, size, size) > 0).float()
    return {
        **images,
        "mask_labels": [mask, mask.flip(0)] * 2,
        "class_labels": [torch.tensor([0, 1]), torch.tensor([1, 0])] * 2,
    }


def sound(model: nn.Module, length: int) -> Batch:
    """Waves with labels."""
    return {"input_values": normal(2, 8000), "labels": integers(1, 20, (2, 4))}


def labelled_sound(model: nn.Module, length: int) -> Batch:
    """Waves with classes."""
    return {"input_values": normal(2, 8000), "labels": integers(0, 2, (2,))}


def spectrum(model: nn.Module, length: int) -> Batch:
    """Spectra with labels."""
    bins = getattr(model.config, "num_mel_bins", 0) or getattr(
        getattr(model.config, "encoder_config", None), "num_mel_bins", 16
    )
    return {
        "input_features": normal(2, 64, bins),
        "attention_mask": torch.ones(2, 64, dtype=torch.long),
        "labels": integers(1, 20, (2, 4)),
    }


#: Task -> the function that makes a batch for a model, of so many positions where it has them.
BATCHES: dict[str, Callable[[nn.Module, int], Batch]] = {
    "causal": language, "masked": language, "seq2seq": sequences, "image": image,
    "classes": labelled_image, "boxes": boxes, "masks": masks, "ctc": sound,
    "sound classes": labelled_sound, "spectrum": spectrum,
}  # fmt: skip
_LONG = {"causal", "masked", "seq2seq"}
_GENERATING = {"causal", "seq2seq"}


def positions(model: nn.Module) -> int:
    """Returns how many positions a model is asked to look at: 1,500 or as many as it has."""
    config = text(model.config)
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_encoder_position_embeddings",
    )
    known = [n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0]
    length = min([LONGEST, *known])
    return length - 4 if length < LONGEST else length


def generate(model: nn.Module, batch: Batch) -> Tensor:
    """Returns a few tokens, chosen greedily."""
    names = ("input_ids", "attention_mask", "pixel_values", "input_features")
    inputs = {name: batch[name] for name in names if name in batch}
    return model.generate(  # type: ignore[operator, no-any-return]
        **inputs,
        max_new_tokens=_NEW_TOKENS,
        min_new_tokens=_NEW_TOKENS,
        do_sample=False,
        num_beams=1,
    )


def build(model: Model) -> nn.Module:
    """Returns the model with a small configuration."""
    import transformers  # lazily: other parts of the zoo work without it

    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, model.class_name)
    config = shrink(cls.config_class, model.overrides)
    for name, value in model.attributes.items():
        setattr(config, name, value)
    built: nn.Module = cls(config)
    return built


def entry(model: Model) -> Entry:
    """Returns what the sweep needs to know of the model."""
    make = BATCHES[model.task]
    is_long = model.is_long and model.task in _LONG
    generates = model.generates and model.task in _GENERATING
    return Entry(
        name=model.name,
        library="transformers",
        family=model.family or model.task,
        build=functools.partial(build, model),
        batch=lambda built: make(built, 24),
        long_batch=(lambda built: make(built, positions(built))) if is_long else None,
        generate=generate if generates else None,
    )


def models(
    task: str,
    names: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]],
    **options: Any,
) -> list[Model]:
    """Returns a model for each name, with its overrides if it has any."""
    return [
        Model(name, class_name, task, overrides.get(name, {}), **options)
        for name, class_name in names.items()
    ]
