"""Models of diffusers: networks that remove noise, autoencoders, and loops over schedulers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry, integers, normal

_BLOCKS = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
_STEPS = torch.tensor([10, 901])


def _latents(model: nn.Module) -> Batch:
    return {"sample": normal(2, 4, 16, 16), "timestep": _STEPS}


def _conditioned(model: nn.Module) -> Batch:
    return {**_latents(model), "encoder_hidden_states": normal(2, 8, 32)}


def _classes(model: nn.Module) -> Batch:
    return {
        "hidden_states": normal(2, 4, 16, 16),
        "timestep": _STEPS,
        "class_labels": integers(0, 10, (2,)),
    }


def _pixart(model: nn.Module) -> Batch:
    return {
        "hidden_states": normal(2, 4, 16, 16),
        "timestep": _STEPS,
        "encoder_hidden_states": normal(2, 8, 32),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _sd3(model: nn.Module) -> Batch:
    return {
        "hidden_states": normal(2, 4, 16, 16),
        "timestep": _STEPS,
        "encoder_hidden_states": normal(2, 8, 32),
        "pooled_projections": normal(2, 64),
    }


def _flux(model: nn.Module) -> Batch:
    ids = torch.zeros(64, 3)
    ids[:, 1] = torch.arange(64) // 8
    ids[:, 2] = torch.arange(64) % 8
    return {
        "hidden_states": normal(2, 64, 16),
        "timestep": torch.tensor([0.01, 0.9]),
        "encoder_hidden_states": normal(2, 8, 32),
        "pooled_projections": normal(2, 32),
        "img_ids": ids,
        "txt_ids": torch.zeros(8, 3),
    }


def _picture(model: nn.Module) -> Batch:
    return {"sample": normal(2, 3, 32, 32)}


_ATTENTION = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
#: Name -> (class, arguments, batch).
NETWORKS: Mapping[str, tuple[str, Mapping[str, Any], Callable[[nn.Module], Batch]]] = {
    "UNet2DModel": (
        "UNet2DModel",
        {**_BLOCKS, "in_channels": 4, "out_channels": 4, "sample_size": 16, "attention_head_dim": 8,
         "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        _latents,
    ),
    "UNet2DConditionModel": (
        "UNet2DConditionModel",
        {**_BLOCKS, "sample_size": 16, "cross_attention_dim": 32, "attention_head_dim": 8,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        _conditioned,
    ),
    "DiTTransformer2DModel": (
        "DiTTransformer2DModel",
        {**_ATTENTION, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 1000, "norm_num_groups": 4},
        _classes,
    ),
    "PixArtTransformer2DModel": (
        "PixArtTransformer2DModel",
        {**_ATTENTION, "sample_size": 16, "in_channels": 4, "out_channels": 8, "cross_attention_dim": 64, "caption_channels": 32, "use_additional_conditions": False, "norm_num_groups": 4},
        _pixart,
    ),
    "SD3Transformer2DModel": (
        "SD3Transformer2DModel",
        {**_ATTENTION, "sample_size": 16, "in_channels": 4, "out_channels": 4, "patch_size": 2, "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 64, "pos_embed_max_size": 16},
        _sd3,
    ),
    "FluxTransformer2DModel": (
        "FluxTransformer2DModel",
        {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 1, "in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)},
        _flux,
    ),
    "AutoencoderKL": (
        "AutoencoderKL",
        {**_BLOCKS, "latent_channels": 4, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        _picture,
    ),
    "VQModel": (
        "VQModel",
        {**_BLOCKS, "latent_channels": 3, "num_vq_embeddings": 32, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        _picture,
    ),
}  # fmt: skip

SCHEDULERS = (
    "DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler",
    "HeunDiscreteScheduler", "LMSDiscreteScheduler", "FlowMatchEulerDiscreteScheduler",
)  # fmt: skip


def _network(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**arguments)
    return model


class Sampling(nn.Module):
    """A network with a scheduler around it, which takes noise to a sample in a few steps."""

    def __init__(self, scheduler: str) -> None:
        super().__init__()
        import diffusers

        name, arguments, _ = NETWORKS["UNet2DModel"]
        self.network = _network(name, arguments)
        self._make_scheduler = getattr(diffusers, scheduler)

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        """Returns the sample, and the noisy one that training would start from."""
        scheduler = self._make_scheduler()
        noisy = sample
        if hasattr(scheduler, "add_noise"):
            noisy = scheduler.add_noise(sample, sample.flip(0), timestep.long())
        scheduler.set_timesteps(4)
        generator = torch.Generator().manual_seed(3)
        current = sample * getattr(scheduler, "init_noise_sigma", 1.0)
        for step in scheduler.timesteps:
            given = current
            if hasattr(scheduler, "scale_model_input"):
                given = scheduler.scale_model_input(current, step)
            noise = self.network(given, step).sample
            try:
                current = scheduler.step(noise, step, current, generator=generator).prev_sample
            except TypeError:  # a scheduler without randomness takes no generator
                current = scheduler.step(noise, step, current).prev_sample
        return {"sample": current, "noisy": noisy}


def entries() -> list[Entry]:
    """Returns all of them."""
    networks = [
        Entry(name, "diffusers", "diffusion", functools.partial(_network, cls, arguments), batch)
        for name, (cls, arguments, batch) in NETWORKS.items()
    ]
    loops = [
        Entry(name, "diffusers", "schedulers", functools.partial(Sampling, name), _noise_of(name))
        for name in SCHEDULERS
    ]
    return [*networks, *loops]


def _noise_of(scheduler: str) -> Callable[[nn.Module], Batch]:
    def batch(model: nn.Module) -> Batch:
        steps = torch.tensor([1000.0, 991.0] if "FlowMatch" in scheduler else [10, 901])
        return {"sample": normal(2, 4, 16, 16), "timestep": steps}

    return batch
