"""Models of timm and torchvision, on small images."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry, normal, uniform

#: timm's name -> arguments of `timm.create_model`.
TIMM: Mapping[str, Mapping[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "convnext_atto": {},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "edgenext_xx_small": {},
    "efficientnet_b0": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "fastvit_t8": {},
    "ghostnet_050": {},
    "inception_next_atto": {},
    "lambda_resnet26t": {"img_size": 64},
    "lcnet_035": {},
    "mambaout_femto": {},
    "mnasnet_small": {},
    "mobilenetv3_small_050": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "pvt_v2_b0": {},
    "regnetx_002": {},
    "regnety_002": {},
    "repvit_m0_9": {},
    "resnest14d": {},
    "resnet18": {},
    "rexnet_100": {},
    "sequencer2d_s": {
        "img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (32, 32, 32, 32),
        "hidden_sizes": (8, 8, 8, 8),
    },
    "starnet_s1": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 32,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 64, "window_size": 4, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 32,
    },
    "tinynet_e": {},
    "vit_relpos_small_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4},
    "xcit_nano_12_p16_224": {"depth": 2},
}  # fmt: skip

#: torchvision's name -> (its package, arguments).
_NO_WEIGHTS = {"weights": None, "weights_backbone": None}
_SMALL = {**_NO_WEIGHTS, "num_classes": 4}
_RESIZED = {**_SMALL, "min_size": 96, "max_size": 96}
_FEW_BOXES = {
    **_RESIZED, "rpn_pre_nms_top_n_train": 100, "rpn_post_nms_top_n_train": 30,
    "rpn_pre_nms_top_n_test": 100, "rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5,
    "box_batch_size_per_image": 16,
}  # fmt: skip
_FEW_CANDIDATES = {**_RESIZED, "topk_candidates": 20, "detections_per_img": 5}
DETECTION: Mapping[str, Mapping[str, Any]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": _FEW_BOXES,
    "maskrcnn_resnet50_fpn": _FEW_BOXES,
    "keypointrcnn_resnet50_fpn": {**_FEW_BOXES, "num_classes": 2, "num_keypoints": 5},
    "retinanet_resnet50_fpn": _FEW_CANDIDATES,
    "fcos_resnet50_fpn": _FEW_CANDIDATES,
    "ssdlite320_mobilenet_v3_large": {**_SMALL, "topk_candidates": 20, "detections_per_img": 5},
}
SEGMENTATION: Mapping[str, Mapping[str, Any]] = {
    "deeplabv3_mobilenet_v3_large": _SMALL,
    "fcn_resnet50": _SMALL,
    "lraspp_mobilenet_v3_large": _SMALL,
}


def _timm(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10, **arguments)
    return model


def _torchvision(package: str, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(getattr(torchvision.models, package), name)(**arguments)
    return model


def _images(model: nn.Module, size: int) -> Batch:
    return {"x": normal(4, 3, size, size)}


def _detected(model: nn.Module, arguments: Mapping[str, Any]) -> Batch:
    box = torch.tensor([[10.0, 12.0, 60.0, 70.0], [30.0, 5.0, 90.0, 44.0]])
    target: dict[str, Tensor] = {"boxes": box, "labels": torch.tensor([1, 1])}
    target["masks"] = torch.zeros(2, 96, 96, dtype=torch.uint8)
    target["masks"][:, 15:40, 35:55] = 1
    target["keypoints"] = torch.tensor([[[40.0, 30.0, 1.0]] * 5] * 2)
    images = uniform(2, 3, 96, 96)
    return {"images": list(images), "targets": [dict(target), dict(target)]}


def _train_detection(model: nn.Module) -> None:
    """Detection models compute losses in training mode only; their norms stay as they are."""
    model.train()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.Dropout)):
            module.eval()


def _detect(model: nn.Module, batch: Batch) -> Any:
    torch.manual_seed(0)  # which boxes are sampled for the loss
    return model(batch["images"], batch["targets"])


def _detections(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the boxes found: what a detection model generates."""
    model.eval()
    found = model(batch["images"])
    _train_detection(model)
    return torch.cat([each["boxes"].float() for each in found])


def entries() -> list[Entry]:
    """Returns all of them."""
    return [
        *(
            Entry(
                name=name,
                library="timm",
                family="timm",
                build=functools.partial(_timm, name, arguments),
                batch=functools.partial(_images, size=arguments.get("img_size", 64)),
                forward=lambda model, batch: model(batch["x"]),
            )
            for name, arguments in TIMM.items()
        ),
        *(
            Entry(
                name=name,
                library="torchvision",
                family="detection",
                build=functools.partial(_torchvision, "detection", name, arguments),
                batch=functools.partial(_detected, arguments=arguments),
                forward=_detect,
                generate=_detections,
                compared_mode=_train_detection,
            )
            for name, arguments in DETECTION.items()
        ),
        *(
            Entry(
                name=name,
                library="torchvision",
                family="segmentation",
                build=functools.partial(_torchvision, "segmentation", name, arguments),
                batch=functools.partial(_images, size=64),
                forward=lambda model, batch: model(batch["x"]),
            )
            for name, arguments in SEGMENTATION.items()
        ),
    ]
