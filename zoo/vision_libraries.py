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

#: Detection models of torchvision, on a backbone of two convolutions.
DETECTION = ("FasterRCNN", "MaskRCNN", "KeypointRCNN", "RetinaNet", "FCOS", "SSD")
#: Segmentation models of torchvision, on the same backbone.
SEGMENTATION = ("DeepLabV3", "FCN", "LRASPP")


def _timm(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10, **arguments)
    return model


_CHANNELS = 32
_RESIZED = {"min_size": 64, "max_size": 64}
_FEW_BOXES = {
    **_RESIZED, "rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20,
    "rpn_pre_nms_top_n_test": 50, "rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5,
    "box_batch_size_per_image": 16,
}  # fmt: skip
_FEW_CANDIDATES = {"topk_candidates": 20, "detections_per_img": 5}


class Backbone(nn.Sequential):
    """Two convolutions: [n, 3, h, w] -> [n, 32, h / 8, w / 8]."""

    out_channels: int | list[int] = _CHANNELS

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 4, stride=4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, _CHANNELS, 3, stride=2, padding=1),
        )


def _detector(name: str) -> nn.Module:
    from torchvision.models import detection
    from torchvision.models.detection import keypoint_rcnn, mask_rcnn

    anchors = detection.anchor_utils.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    one_anchor = detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))
    backbone = Backbone()
    if name == "SSD":
        backbone.out_channels = [_CHANNELS]
    makers = {
        "FasterRCNN": lambda: detection.FasterRCNN(
            backbone, 4, rpn_anchor_generator=anchors, **_FEW_BOXES
        ),
        "MaskRCNN": lambda: detection.MaskRCNN(
            backbone,
            None,
            box_predictor=detection.faster_rcnn.FastRCNNPredictor(1024, 4),
            rpn_anchor_generator=anchors,
            mask_head=mask_rcnn.MaskRCNNHeads(_CHANNELS, (_CHANNELS,), 1),
            mask_predictor=mask_rcnn.MaskRCNNPredictor(_CHANNELS, _CHANNELS, 4),
            **_FEW_BOXES,
        ),
        "KeypointRCNN": lambda: detection.KeypointRCNN(
            backbone,
            None,
            box_predictor=detection.faster_rcnn.FastRCNNPredictor(1024, 2),
            rpn_anchor_generator=anchors,
            keypoint_head=keypoint_rcnn.KeypointRCNNHeads(_CHANNELS, (_CHANNELS,)),
            keypoint_predictor=keypoint_rcnn.KeypointRCNNPredictor(_CHANNELS, 5),
            **_FEW_BOXES,
        ),
        "RetinaNet": lambda: detection.RetinaNet(
            backbone, 4, anchor_generator=anchors, **_RESIZED, **_FEW_CANDIDATES
        ),
        "FCOS": lambda: detection.FCOS(
            backbone, 4, anchor_generator=one_anchor, **_RESIZED, **_FEW_CANDIDATES
        ),
        "SSD": lambda: detection.ssd.SSD(
            backbone,
            detection.anchor_utils.DefaultBoxGenerator([[2]], scales=[0.2, 0.4]),
            (64, 64),
            4,
            **_FEW_CANDIDATES,
        ),
    }
    model: nn.Module = makers[name]()
    return model


class Levels(nn.Module):
    """The backbone's outputs by the names under which segmentation heads look for them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns features of two sizes."""
        low = self.backbone[0](x)
        high = self.backbone[3](self.backbone[2](self.backbone[1](low)))
        return {"low": low, "high": high, "out": high}


def _segmenter(name: str) -> nn.Module:
    from torchvision.models import segmentation
    from torchvision.models.segmentation import deeplabv3, fcn

    makers = {
        "DeepLabV3": lambda: segmentation.DeepLabV3(Levels(), deeplabv3.DeepLabHead(_CHANNELS, 4)),
        "FCN": lambda: segmentation.FCN(Levels(), fcn.FCNHead(_CHANNELS, 4)),
        "LRASPP": lambda: segmentation.LRASPP(Levels(), 16, _CHANNELS, 4),
    }
    model: nn.Module = makers[name]()
    return model


def _images(model: nn.Module, size: int) -> Batch:
    return {"x": normal(4, 3, size, size)}


def _detected(model: nn.Module) -> Batch:
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
                build=functools.partial(_detector, name),
                batch=_detected,
                forward=_detect,
                generate=_detections,
                compared_mode=_train_detection,
            )
            for name in DETECTION
        ),
        *(
            Entry(
                name=name,
                library="torchvision",
                family="segmentation",
                build=functools.partial(_segmenter, name),
                batch=functools.partial(_images, size=64),
                forward=lambda model, batch: model(batch["x"]),
            )
            for name in SEGMENTATION
        ),
    ]
