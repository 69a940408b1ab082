"""Language: attention, LAMB with a warm-up, accumulated gradients, evaluation with casts disabled."""

import argparse
import json
import math
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        return x.view(*x.shape[:-1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = self.dropout(F.softmax(scores + mask, dim=-1))
        context = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().flatten(-2)
        return self.LayerNorm(self.dense(context) + x)


class Bert(nn.Module):
    def __init__(self, vocabulary=24, width=16):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position_embeddings = nn.Embedding(8, width)
        self.layers = nn.ModuleList([Attention(width, 2) for _ in range(2)])
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids, mask):
        mask = (1.0 - mask[:, None, None].to(torch.float32)) * -10000.0
        x = self.word_embeddings(ids) + self.position_embeddings.weight
        for layer in self.layers:
            x = layer(x, mask)
        return self.decoder(x) + self.bias


def setup_training(args):
    device = torch.device(args.device)
    if args.device == "hpu":
        if args.hmp:
            from habana_frameworks.torch.hpex import hmp

            hmp.convert(
                opt_level=args.hmp_opt_level,
                bf16_file_path=args.hmp_bf16,
                fp32_file_path=args.hmp_fp32,
                isVerbose=args.hmp_verbose,
            )
        from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu

        args.world_size, args.rank, args.local_rank = initialize_distributed_hpu()
        if args.local_rank != -1:
            torch.distributed.init_process_group("hccl", rank=args.rank, world_size=args.world_size)
    elif args.hmpx:
        import hmpx as hmp

        hmp.convert(
            args.hmp_bf16, args.hmp_fp32, lists="hmp", legalize="never", device_types={device.type}
        )
    return device


def prepare_optimizer(args, model):
    named = [*model.named_parameters()]
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    groups = [
        {
            "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    if not args.use_fused_lamb:
        return torch.optim.AdamW(groups, lr=0.01)
    if args.device == "hpu":
        from habana_frameworks.torch.hpex.optimizers import FusedLamb
    else:
        from hmpx.integrations.optimizers import FusedLamb
    return FusedLamb(groups, lr=0.01, dtype=torch.bfloat16, max_grad_norm=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="hpu")
    parser.add_argument("--use_fused_lamb", action="store_true")
    parser.add_argument("--use_lazy_mode", default="True", type=lambda x: x.lower() == "true")
    parser.add_argument("--gradient_accumulation_steps", default=2, type=int)
    parser.add_argument("--hmp", action="store_true")
    parser.add_argument("--hmpx", action="store_true")
    parser.add_argument("--hmp-bf16", default="")
    parser.add_argument("--hmp-fp32", default="")
    parser.add_argument("--hmp-opt-level", default="O1")
    parser.add_argument("--hmp-verbose", action="store_true")
    args = parser.parse_args()
    if args.use_lazy_mode:
        os.environ["PT_HPU_LAZY_MODE"] = "1"
    torch.manual_seed(7)
    device = setup_training(args)
    model = Bert()
    model.to(device)
    model.decoder.weight = model.word_embeddings.weight
    optimizer = prepare_optimizer(args, model)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    mark_step = lambda: None
    if args.device == "hpu":
        import habana_frameworks.torch.core as htcore

        mark_step = htcore.mark_step
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    losses = []
    for step in range(8):
        ids = torch.randint(1, 24, (3, 8))
        labels = torch.where(torch.rand(3, 8) < 0.3, ids, -1)
        labels[:, 0] = ids[:, 0]
        ids, labels = ids.to(device), labels.to(device)
        logits = model(ids, torch.ones_like(ids))
        loss = criterion(logits.view(-1, 24), labels.view(-1))
        loss = loss / args.gradient_accumulation_steps
        loss.backward()
        mark_step()
        losses.append(loss.item().hex())
        if (step + 1) % args.gradient_accumulation_steps == 0:
            if args.device == "hpu":
                from habana_frameworks.torch.hpex.normalization import FusedClipNorm

                FusedClipNorm(model.parameters(), 1.0).clip_norm(model.parameters())
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mark_step()
    model.eval()
    with torch.no_grad():
        loss = criterion(model(ids, torch.ones_like(ids)).view(-1, 24), labels.view(-1))
        total = 0
        if args.hmp or args.hmpx:
            if args.hmp:
                from habana_frameworks.torch.hpex import hmp
            else:
                import hmpx as hmp
            with hmp.disable_casts():
                total += loss.to(torch.float32) * 3
        else:
            total += loss * 3
    print(json.dumps({"losses": losses, "evaluation": total.item().hex()}))


if __name__ == "__main__":
    main()
