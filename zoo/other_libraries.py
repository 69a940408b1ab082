"""Graph convolutions of PyG, x-transformers, adapters of peft, and losses of torchmetrics and kornia."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry, integers, normal

#: Name of the convolution -> arguments after the numbers of channels.
CONVOLUTIONS: Mapping[str, Mapping[str, Any]] = {
    "GCNConv": {}, "SAGEConv": {}, "GATConv": {"heads": 2, "concat": False},
    "GATv2Conv": {"heads": 2, "concat": False}, "TransformerConv": {"heads": 2, "concat": False},
    "GraphConv": {}, "ChebConv": {"K": 3}, "TAGConv": {}, "ARMAConv": {}, "SGConv": {"K": 2},
    "LEConv": {}, "ClusterGCNConv": {}, "GENConv": {}, "MFConv": {}, "SuperGATConv": {"heads": 2, "concat": False},
    "FiLMConv": {}, "ResGatedGraphConv": {}, "GeneralConv": {},
}  # fmt: skip
_CHANNELS = 32


class Graphs(nn.Module):
    """Two convolutions, pooled over each of two graphs."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        import torch_geometric.nn as geometric

        make = functools.partial(getattr(geometric, name), **arguments)
        self.first = make(_CHANNELS, _CHANNELS)
        self.norm = geometric.GraphNorm(_CHANNELS)
        self.second = make(_CHANNELS, _CHANNELS)
        self.head = nn.Linear(_CHANNELS, 8)
        self._pool = geometric.global_mean_pool

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> dict[str, Tensor]:
        """Returns numbers of the nodes and of the graphs."""
        x = self.norm(self.first(x, edges), graph).relu()
        nodes = self.second(x, edges)
        return {"nodes": nodes, "graphs": self.head(self._pool(nodes, graph))}


def _graph(model: nn.Module) -> Batch:
    return {
        "x": normal(40, _CHANNELS),
        "edges": integers(0, 40, (2, 160)),
        "graph": torch.arange(40) // 20,
    }


#: Name -> arguments of the x-transformers decoder.
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "rotary": {"rotary_pos_emb": True, "ff_glu": True},
    "alibi": {"alibi_pos_bias": True, "use_rmsnorm": True},
    "t5 bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True, "attn_qk_norm": True},
    "memories": {"attn_num_mem_kv": 4, "attn_qk_norm": True},
}


def _decoder(arguments: Mapping[str, Any]) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **arguments)
    model: nn.Module = TransformerWrapper(num_tokens=99, max_seq_len=2048, attn_layers=layers)
    return model


def _ids(model: nn.Module, *shape: int) -> Batch:
    return {"x": integers(0, 99, shape)}


def _adapted(variant: str) -> nn.Module:
    import peft

    from .hugging_face import Model, build

    base = build(Model("llama", "LlamaForCausalLM", "causal"))
    targets = ["q_proj", "v_proj", "down_proj"]
    configs: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False),
        "DoRA": lambda: peft.LoraConfig(
            r=4, target_modules=targets, use_dora=True, init_lora_weights=False
        ),
        "IA3": lambda: peft.IA3Config(
            target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        "OFT": lambda: peft.OFTConfig(
            r=0, oft_block_size=8, target_modules=targets, init_weights=False
        ),
    }
    model: nn.Module = peft.get_peft_model(base, configs[variant]())
    return model


def _text(model: nn.Module, length: int) -> Batch:
    from .hugging_face import language

    return language(model, length)


def _continue(model: nn.Module, batch: Batch) -> Tensor:
    from .hugging_face import generate

    return generate(model, batch)


class Losses(nn.Module):
    """A small network judged by kornia's and torchmetrics' image losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns losses and transformed images."""
        import kornia
        import torchmetrics.functional.image as metrics

        y = self.net(x)
        target = x.sigmoid()
        angle = torch.tensor([20.0, -35.0])
        return {
            "ssim": kornia.losses.ssim_loss(y, target, 5),
            "blur": kornia.filters.gaussian_blur2d(y, (5, 5), (1.5, 1.5)),
            "rotated": kornia.geometry.transform.rotate(y, angle),
            "sobel": kornia.filters.sobel(y),
            "hsv": kornia.color.rgb_to_hsv(y),
            "psnr": metrics.peak_signal_noise_ratio(y, target, data_range=1.0),
            "metric ssim": metrics.structural_similarity_index_measure(y, target, data_range=1.0),
        }


def entries() -> list[Entry]:
    """Returns all of them."""
    graphs = [
        Entry(name, "torch_geometric", "graphs", functools.partial(Graphs, name, arguments), _graph)
        for name, arguments in CONVOLUTIONS.items()
    ]
    decoders = [
        Entry(
            f"decoder, {name}",
            "x_transformers",
            "x-transformers",
            functools.partial(_decoder, arguments),
            lambda model: _ids(model, 2, 24),
            long_batch=lambda model: _ids(model, 1, 1500),
        )
        for name, arguments in DECODERS.items()
    ]
    adapters = [
        Entry(
            f"llama with {name}",
            "peft",
            "adapters",
            functools.partial(_adapted, name),
            lambda model: _text(model, 24),
            long_batch=lambda model: _text(model, 1500),
            generate=_continue,
        )
        for name in ("LoRA", "DoRA", "IA3", "OFT")
    ]
    images = Entry(
        "image losses", "kornia", "losses", Losses, lambda model: {"x": normal(2, 3, 32, 32)}
    )
    return [*graphs, *decoders, *adapters, images]
