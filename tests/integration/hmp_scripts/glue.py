"""Fine-tuning: a configuration that becomes op lists, a trainer that asks for each part by name."""

import argparse
import json
import tempfile

import torch
from torch import nn


class GaudiConfig:
    use_fused_adam = use_fused_clip_norm = True
    hmp_bf16_ops = ["add", "addmm", "bmm", "div", "dropout", "gelu", "iadd", "linear", "layer_norm"]
    hmp_bf16_ops += ["matmul", "mm", "rsub", "softmax", "truediv"]
    hmp_fp32_ops = ["embedding", "nll_loss", "log_softmax"]

    def write_bf16_fp32_ops_to_text_files(self, bf16, fp32):
        for name, ops in ((bf16, self.hmp_bf16_ops), (fp32, self.hmp_fp32_ops)):
            with open(name, "w") as file:
                file.write("\n".join(ops))


class Trainer:
    def __init__(self, model, args):
        self.args, self.config = args, GaudiConfig()
        self.device = torch.device(args.device)
        self.model = model.to(self.device)
        if args.hmp or args.hmpx:
            with tempfile.NamedTemporaryFile() as bf16, tempfile.NamedTemporaryFile() as fp32:
                self.config.write_bf16_fp32_ops_to_text_files(bf16.name, fp32.name)
                self.convert(bf16.name, fp32.name)
        if args.device == "hpu":
            try:
                from habana_frameworks.torch.hpu import random as hpu_random
            except ImportError as error:
                error.msg = f"Could not import habana_frameworks.torch.hpu.random. {error.msg}."
                raise error
            hpu_random.manual_seed_all(11)
            self.states = hpu_random.get_rng_state_all()
            hpu_random.set_rng_state_all(self.states)
        else:
            torch.manual_seed(11)

    def convert(self, bf16, fp32):
        if self.args.hmpx:
            import hmpx

            hmpx.convert(bf16, fp32, lists="hmp", legalize="never", device_types={self.device.type})
            return
        try:
            from habana_frameworks.torch.hpex import hmp
        except ImportError as error:
            error.msg = f"Could not import habana_frameworks.torch.hpex. {error.msg}."
            raise error
        hmp.convert(opt_level="O1", bf16_file_path=bf16, fp32_file_path=fp32, isVerbose=False)

    def train(self, data):
        if self.args.device == "hpu":
            import habana_frameworks.torch.core as htcore
            from habana_frameworks.torch.hpex.normalization import FusedClipNorm
            from habana_frameworks.torch.hpex.optimizers import FusedAdamW
            from habana_frameworks.torch.hpu import wrap_in_hpu_graph

            optimizer = FusedAdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
            clip = FusedClipNorm(self.model.parameters(), 0.5).clip_norm
            mark_step, wrap = htcore.mark_step, wrap_in_hpu_graph
        else:
            optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
            )
            clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)
            mark_step, wrap = (lambda: None), (lambda model: model)
        losses = []
        for ids, labels in data:
            loss = self.model(ids.to(self.device), labels.to(self.device))
            loss.backward()
            mark_step()
            clip(self.model.parameters())
            optimizer.step()
            self.model.zero_grad()
            mark_step()
            losses.append(loss.detach().item().hex())
        model = wrap(self.model.eval())
        with torch.no_grad():
            losses.append(
                model(data[0][0].to(self.device), data[0][1].to(self.device)).item().hex()
            )
        if self.args.device == "hpu":
            stats = torch.hpu.memory_stats()
            assert stats["InUse"] / stats["Limit"] < 1
        return losses


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = dict(d_model=8, nhead=2, dim_feedforward=16, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer), 1, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 3)

    def forward(self, ids, labels):
        x = self.encoder(self.embedding(ids))
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="hpu")
    parser.add_argument("--hmp", action="store_true")
    parser.add_argument("--hmpx", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(2)
    batches = [(torch.randint(20, (4, 6)), torch.randint(3, (4,))) for _ in range(4)]
    print(json.dumps(Trainer(Classifier(), arguments).train(batches)))
