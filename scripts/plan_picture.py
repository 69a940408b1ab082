"""Draws the picture of docs/plan.md: the memory of a training step by kind, in each precision.

python scripts/plan_picture.py docs/images/plan_memory.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import hmpx
from hmpx.reports import size

LAYERS, BATCH, TOKENS = 32, 2, 2048
WIDTH, LABELS, ROW, TOP = 860, 120, 40, 64

#: Kind -> its colour.
COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#72b7b2",
    "optimizer state": "#9d9da0",
    "saved for the backward": "#f2a33a",
    "weight casts kept": "#d1495b",
}


def build() -> torch.nn.Module:
    """Returns a Llama of 8 billion parameters."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_hidden_layers=LAYERS,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
        )
    )


def inputs() -> dict[str, Any]:
    """Returns a batch of token ids."""
    ids = torch.randint(0, 1000, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def figures(memory: Any) -> dict[str, int]:
    """Returns kind -> bytes."""
    return dict(
        zip(
            COLOURS,
            (
                memory.parameter_bytes,
                memory.gradient_bytes,
                memory.optimizer_bytes,
                memory.saved_bytes,
                memory.weight_cast_bytes,
            ),
            strict=True,
        )
    )


def picture(plan: hmpx.Plan) -> str:
    """Returns the picture as SVG."""
    runs = {run.name: figures(run.memory) for run in plan.runs}
    most = max(sum(kinds.values()) for kinds in runs.values())
    height = TOP + ROW * len(runs)
    text = 'font-family="sans-serif" font-size="13" fill="#333"'
    parts = [f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>']
    title = f"Llama 8B, {BATCH} x {TOKENS} tokens, AdamW, on {plan.device_type}: bytes of tensors"
    parts.append(f'<text x="8" y="20" {text} font-weight="bold">{title}</text>')
    x = 8.0
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="45" {text}>{kind}</text>')
        x += 34 + 7.2 * len(kind)
    for row, (name, kinds) in enumerate(runs.items()):
        y, x = TOP + ROW * row, float(LABELS)
        parts.append(f'<text x="8" y="{y + 19}" {text}>{name}</text>')
        for kind, count in kinds.items():
            width = (WIDTH - LABELS - 80) * count / most
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="28" fill="{COLOURS[kind]}">'
                f"<title>{name}: {kind} {size(count)}</title></rect>"
            )
            x += width
        parts.append(
            f'<text x="{x + 6:.1f}" y="{y + 19}" {text}>{size(sum(kinds.values()))}</text>'
        )
    view = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    plan = hmpx.plan(build, inputs, device="hpu", keep_weight_casts=True)
    Path(sys.argv[1]).write_text(picture(plan), encoding="utf-8")
    print(plan)
