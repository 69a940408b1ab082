"""Models of transformers for images, depth, boxes, masks, sound and several of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .entry import Batch, integers, normal
from .hugging_face import BATCHES, Model

_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_ONE_STAGE = {**_RESNET, "out_features": ["stage4"]}
_SPEECH = {"conv_dim": [32, 32, 32], "conv_stride": [5, 4, 4], "conv_kernel": [10, 8, 4]}
_DETR = {"use_timm_backbone": False, "num_queries": 8, "auxiliary_loss": True}

#: Name -> (class, task, overrides).
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    # images
    "beit": ("BeitForImageClassification", "classes", {"use_relative_position_bias": True}),
    "bit": ("BitForImageClassification", "classes", {**_STAGES, "embedding_size": 16, "num_groups": 4}),
    "convnext": ("ConvNextForImageClassification", "classes", _STAGES),
    "convnextv2": ("ConvNextV2ForImageClassification", "classes", _STAGES),
    "cvt": ("CvtForImageClassification", "classes", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 1, 1]}),
    "data2vec-vision": ("Data2VecVisionForImageClassification", "classes", {}),
    "deit": ("DeiTForImageClassification", "classes", {}),
    "dinov2": ("Dinov2ForImageClassification", "classes", {}),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", "classes", {}),
    "dinov3_vit": ("DINOv3ViTModel", "image", {}),
    "donut-swin": ("DonutSwinForImageClassification", "classes", _SWIN),
    "focalnet": ("FocalNetForImageClassification", "classes", {"embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4}),
    "ijepa": ("IJepaForImageClassification", "classes", {}),
    "levit": ("LevitForImageClassification", "classes", {"image_size": 64, "patch_size": 16, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "down_ops": [["Subsample", 8, 4, 4, 2, 2], ["Subsample", 8, 6, 4, 2, 2]]}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "classes", {"depth_multiplier": 0.25, "image_size": 64}),
    "mobilevit": ("MobileViTForImageClassification", "classes", {"image_size": 64, "hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64], "patch_size": 2}),
    "poolformer": ("PoolFormerForImageClassification", "classes", _STAGES),
    "pvt": ("PvtForImageClassification", "classes", {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4], "patch_sizes": [4, 2, 2, 2]}),
    "pvt_v2": ("PvtV2ForImageClassification", "classes", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]}),
    "regnet": ("RegNetForImageClassification", "classes", {**_STAGES, "embedding_size": 16, "groups_width": 16}),
    "resnet": ("ResNetForImageClassification", "classes", {**_STAGES, "embedding_size": 16, "layer_type": "basic"}),
    "segformer": ("SegformerForSemanticSegmentation", "image", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32}),
    "swiftformer": ("SwiftFormerForImageClassification", "classes", {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 48, 64], "image_size": 64}),
    "swin": ("SwinForImageClassification", "classes", _SWIN),
    "swinv2": ("Swinv2ForImageClassification", "classes", _SWIN),
    "vit": ("ViTForImageClassification", "classes", {}),
    "vit_mae": ("ViTMAEForPreTraining", "image", {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 64}),
    "vit_msn": ("ViTMSNForImageClassification", "classes", {}),
    # depth, boxes, masks
    "dpt": ("DPTForDepthEstimation", "image", {"image_size": 64, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 32, 32], "is_hybrid": False}),
    "glpn": ("GLPNForDepthEstimation", "image", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32}),
    "detr": ("DetrForObjectDetection", "boxes", {**_DETR, "backbone_config": _ONE_STAGE}),
    "conditional_detr": ("ConditionalDetrForObjectDetection", "boxes", {**_DETR, "backbone_config": _ONE_STAGE}),
    "table-transformer": ("TableTransformerForObjectDetection", "boxes", {**_DETR, "backbone_config": _ONE_STAGE}),
    "deformable_detr": ("DeformableDetrForObjectDetection", "boxes", {**_DETR, "backbone_config": _RESNET, "num_feature_levels": 4}),
    "yolos": ("YolosForObjectDetection", "boxes", {"image_size": [64, 64], "num_detection_tokens": 8}),
    "maskformer": ("MaskFormerForInstanceSegmentation", "masks", {"backbone_config": {**_SWIN, "model_type": "swin", "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, "fpn_feature_size": 32, "mask_feature_size": 32, "decoder_config": {"model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}}),
    # sound
    "data2vec-audio": ("Data2VecAudioForCTC", "ctc", _SPEECH),
    "hubert": ("HubertForCTC", "ctc", _SPEECH),
    "sew": ("SEWForCTC", "ctc", {**_SPEECH, "squeeze_factor": 2}),
    "sew-d": ("SEWDForCTC", "ctc", {**_SPEECH, "squeeze_factor": 2}),
    "unispeech": ("UniSpeechForCTC", "ctc", _SPEECH),
    "unispeech-sat": ("UniSpeechSatForCTC", "ctc", _SPEECH),
    "wav2vec2": ("Wav2Vec2ForCTC", "ctc", _SPEECH),
    "wav2vec2-conformer": ("Wav2Vec2ConformerForSequenceClassification", "sound classes", _SPEECH),
    "wavlm": ("WavLMForCTC", "ctc", _SPEECH),
    "audio-spectrogram-transformer": ("ASTForAudioClassification", "tiles", {"max_length": 64, "frequency_stride": 8, "time_stride": 8}),
    "parakeet_ctc": ("ParakeetForCTC", "spectrum", {}),
    "lasr_ctc": ("LasrForCTC", "spectrum", {}),
    "whisper": ("WhisperForConditionalGeneration", "transcripts", {"max_source_positions": 50}),
    "speech_to_text": ("Speech2TextForConditionalGeneration", "spectra", {"input_feat_per_channel": 16, "conv_channels": 32}),
    "moonshine": ("MoonshineForConditionalGeneration", "waves", {"pad_token_id": 0}),
    "encodec": ("EncodecModel", "wave", {"num_filters": 8, "hidden_size": 32, "codebook_size": 32, "codebook_dim": 32, "upsampling_ratios": [4, 2]}),
    "dac": ("DacModel", "wave", {"encoder_hidden_size": 16, "decoder_hidden_size": 64, "downsampling_ratios": [2, 4], "upsampling_ratios": [4, 2], "codebook_size": 32}),
    # several at once
    "clip": ("CLIPModel", "pairs", {}),
    "siglip": ("SiglipModel", "pairs", {}),
    "chinese_clip": ("ChineseCLIPModel", "pairs", {}),
    "align": ("AlignModel", "pairs", {"vision_config": {"image_size": 64, "width_coefficient": 0.3, "depth_coefficient": 0.1, "hidden_dim": 768}}),
    "altclip": ("AltCLIPModel", "pairs", {}),
    "vilt": ("ViltForMaskedLM", "pairs", {}),
    "blip": ("BlipForConditionalGeneration", "captions", {}),
    "git": ("GitForCausalLM", "pairs", {}),
    "groupvit": ("GroupViTModel", "pairs", {"vision_config": {"depths": [1, 1], "num_group_tokens": [8, 0], "num_output_groups": [8, 4]}}),
    "clipseg": ("CLIPSegForImageSegmentation", "pairs", {"extract_layers": [0, 1], "reduce_dim": 16}),
    "llava": ("LlavaForConditionalGeneration", "seen", {}),
    "gemma3": ("Gemma3ForConditionalGeneration", "seen", {"mm_tokens_per_image": 16}),
    "paligemma": ("PaliGemmaForConditionalGeneration", "seen", {"vision_config": {"projection_dim": 64}}),
    # series, decisions
    "patchtst": ("PatchTSTForPrediction", "series", {"context_length": 32, "prediction_length": 8, "num_input_channels": 2, "patch_length": 4, "patch_stride": 4}),
    "patchtsmixer": ("PatchTSMixerForPrediction", "series", {"context_length": 32, "prediction_length": 8, "num_input_channels": 2, "patch_length": 4, "patch_stride": 4}),
    "autoformer": ("AutoformerForPrediction", "lagged series", {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2]}),
    "informer": ("InformerForPrediction", "lagged series", {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2]}),
    "time_series_transformer": ("TimeSeriesTransformerForPrediction", "lagged series", {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2]}),
    "decision_transformer": ("DecisionTransformerModel", "decisions", {"state_dim": 6, "act_dim": 3}),
}  # fmt: skip

_FAMILIES = {
    "ctc": "sound", "sound classes": "sound", "tiles": "sound", "spectrum": "sound",
    "transcripts": "sound", "spectra": "sound", "waves": "sound", "wave": "sound",
    "classes": "images", "image": "images", "boxes": "boxes and masks", "masks": "boxes and masks",
    "series": "series", "lagged series": "series", "decisions": "series",
}  # fmt: skip


def _ids(*shape: int) -> torch.Tensor:
    return integers(5, 80, shape)


def _image_size(model: nn.Module) -> int:
    config = model.config
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size
    return 32


def pairs(model: nn.Module, length: int) -> Batch:
    """Texts with images."""
    size = _image_size(model)
    ids = _ids(2, 12)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": normal(2, 3, size, size),
    }


def captions(model: nn.Module, length: int) -> Batch:
    """Images with texts to be learnt."""
    return {**pairs(model, length), "labels": _ids(2, 12)}


def seen(model: nn.Module, length: int) -> Batch:
    """Texts with images at some of their positions."""
    config = model.config
    vision = config.vision_config
    count = (
        getattr(config, "mm_tokens_per_image", 0) or (vision.image_size // vision.patch_size) ** 2
    )
    token = getattr(config, "image_token_id", None) or config.image_token_index
    ids = torch.cat([torch.full((2, count), token), _ids(2, 8)], 1)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": normal(2, 3, vision.image_size, vision.image_size),
        "labels": ids.clone(),
    }
    if config.model_type in {"gemma3", "paligemma"}:
        batch["token_type_ids"] = (ids == token).long()
    return batch


def series(model: nn.Module, length: int) -> Batch:
    """Time series."""
    config = model.config
    shape = (config.context_length, config.num_input_channels)
    return {
        "past_values": normal(2, *shape),
        "future_values": normal(2, config.prediction_length, config.num_input_channels),
    }


def lagged_series(model: nn.Module, length: int) -> Batch:
    """Time series with a history."""
    config = model.config
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features
    return {
        "past_values": normal(2, past),
        "past_time_features": normal(2, past, features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": normal(2, config.prediction_length),
        "future_time_features": normal(2, config.prediction_length, features),
    }


def decisions(model: nn.Module, length: int) -> Batch:
    """States, actions and returns."""
    return {
        "states": normal(2, 8, 6),
        "actions": normal(2, 8, 3),
        "rewards": normal(2, 8, 1),
        "returns_to_go": normal(2, 8, 1),
        "timesteps": torch.arange(8).repeat(2, 1),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    }


def _named(name: str, shape: Callable[[Any], tuple[int, ...]], **more: tuple[int, ...]) -> Any:
    def make(model: nn.Module, length: int) -> Batch:
        return {name: normal(*shape(model.config)), **{k: _ids(*v) for k, v in more.items()}}

    return make


BATCHES.update({
    "pairs": pairs, "captions": captions, "seen": seen, "series": series,
    "lagged series": lagged_series, "decisions": decisions,
    "tiles": _named("input_values", lambda c: (2, c.max_length, c.num_mel_bins)),
    "transcripts": _named("input_features", lambda c: (2, c.num_mel_bins, 2 * c.max_source_positions), labels=(2, 8)),
    "spectra": _named("input_features", lambda c: (2, 64, c.input_feat_per_channel), labels=(2, 8)),
    "waves": _named("input_values", lambda c: (2, 8000), labels=(2, 8)),
    "wave": _named("input_values", lambda c: (1, 1, 1600)),
})  # fmt: skip


def models() -> list[Model]:
    """Returns all of them."""
    return [
        Model(name, cls, task, overrides, family=_FAMILIES.get(task, "several modalities"))
        for name, (cls, task, overrides) in MODELS.items()
    ]
