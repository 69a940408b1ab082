"""Small networks for small images, graphs and sounds: plain fp32 modules of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Convolutions with batch norm: a stem and two residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (32, 64, 128))
        self.convs = nn.ModuleList(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False) for width in (32, 64)
        )
        self.skips = nn.ModuleList(nn.Conv2d(width, 2 * width, 1, stride=2) for width in (32, 64))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 1, height, width]
        x = F.relu(self.norms[0](self.stem(x)))
        for conv, norm, skip in zip(self.convs, self.norms[1:], self.skips, strict=True):
            x = F.relu(norm(conv(x)) + skip(x))
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    """Torch's own encoder layers on patches of 2x2 pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(2)
            )
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 1, 8, 8]
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(x).mean(1)))


class GNN(nn.Module):
    """Three graph convolutions: each node adds up its neighbours, edge by edge."""

    def __init__(self, features: Tensor, edges: Tensor, classes: int, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("features", features)  # [nodes, features]
        self.register_buffer("edges", edges)  # from, to: [2, edges]
        degrees = torch.zeros(len(features), device=edges.device).index_add(
            0, edges[1], torch.ones(edges.shape[1], device=edges.device)
        )
        self.register_buffer("scale", 1 / degrees.clamp_min(1).unsqueeze(1))
        self.first = nn.Linear(features.shape[1], width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.others = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor) -> Tensor:  # [batch]
        x = self.first(self.features)
        for own, other, norm in zip(self.own, self.others, self.norms, strict=True):
            y = F.relu(norm(x))
            messages = other(y).index_select(0, self.edges[0])
            sums = messages.new_zeros(x.shape).index_add(0, self.edges[1], messages)
            x = x + own(y) + self.scale * sums
        return self.head(F.relu(x.index_select(0, nodes)))


class LSTM(nn.Module):
    """Two recurrent layers over frames of sound."""

    def __init__(self, frame: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(frame, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # [batch, frames, frame]
        return self.head(self.lstm(F.gelu(self.first(x)))[0].mean(1))


class UNet(nn.Module):
    """Convolutions at full and at half size, with the time added to the channels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 4 * width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in range(2))
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 1, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, w * width) for w in (1, 2, 2, 1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:  # [batch, 1, height, width], [batch]
        angles = times[:, None] * torch.logspace(0, 2, 8, device=x.device)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        scale, shift = time.chunk(2, 1)
        x = wide = self.first(x)
        x = self.down(F.silu(self.norms[0](x))) + shift
        for conv, norm in zip(self.middle, self.norms[1:3], strict=True):
            x = x + conv(F.silu(norm(x) * (1 + scale)))
        x = self.up(torch.cat([F.interpolate(x, scale_factor=2.0), wide], 1))
        return self.last(F.silu(self.norms[3](x)))
