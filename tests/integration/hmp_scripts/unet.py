"""Segmentation: transposed convolutions, a precision plugin at level O2, a trainer, averaged weights."""

import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

try:
    from habana_frameworks.torch.utils.library_loader import is_habana_available

    _HPU_AVAILABLE = is_habana_available()
except ImportError:
    _HPU_AVAILABLE = False
if _HPU_AVAILABLE:
    import habana_frameworks.torch.core as htcore
    import habana_frameworks.torch.utils.debug as htdebug
    from habana_frameworks.torch.hpex import hmp


class HPUPrecision:
    def __init__(
        self,
        precision: str | int,
        opt_level: str = "O2",
        bf16_file_path: str | None = None,
        fp32_file_path: str | None = None,
        verbose: bool = False,
    ) -> None:
        if precision in ("16", "bf16"):
            hmp.convert(
                opt_level=opt_level,
                bf16_file_path=bf16_file_path,
                fp32_file_path=fp32_file_path,
                isVerbose=verbose,
            )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.InstanceNorm2d(4, affine=True))
        self.act = nn.LeakyReLU(0.01, inplace=True)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.out = nn.Conv2d(5, 2, 1)

    def forward(self, x):
        return self.out(torch.cat((self.up(self.act(self.down(x))), x), dim=1))


def dice(logits, target):
    p = torch.softmax(logits, dim=1)[:, 1]
    intersection = torch.sum(p * target)
    return 1 - (2.0 * intersection + 1e-5) / (p.sum() + target.sum() + 1e-5)


class Trainer:
    def __init__(self, hparams):
        self.args, self.optimizer, self.train_losses = hparams.args, None, []

    def fit(self, model, data, average):
        model.train()
        for epoch in range(2):
            for batch in data:
                self.optimizer.zero_grad(set_to_none=True)
                image, target = (t.to(self.args.torch_device) for t in batch)
                logits = model(image)
                loss = dice(logits, target) + nn.functional.cross_entropy(logits, target.long())
                loss.backward()
                nn.utils.clip_grad.clip_grad_norm_(model.parameters(), 12)
                self.mark_step()
                self.optimizer.step()
                self.mark_step()
                if average is not None:
                    average.update(model)
                self.train_losses.append(loss.detach())
        return torch.mean(torch.stack(self.train_losses), dim=0)

    def mark_step(self):
        if self.args.run_lazy_mode and self.args.device == "hpu":
            htcore.mark_step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="hpu")
    parser.add_argument("--run_lazy_mode", action="store_true")
    parser.add_argument("--hmp", dest="is_hmp", action="store_true")
    parser.add_argument("--hmpx", action="store_true")
    args = parser.parse_args()
    args.torch_device = torch.device(args.device)
    if args.is_hmp:
        HPUPrecision("bf16")
    if args.hmpx:
        import hmpx

        hmpx.convert(opt_level="O2", legalize="never", device_types={args.torch_device.type})
    torch.manual_seed(5)
    if args.device == "hpu":
        htdebug._mem_log("start")
        os.environ.setdefault("ID", "0")
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    model = UNet().to(args.torch_device)
    data = [(torch.rand(2, 1, 8, 8), (torch.rand(2, 8, 8) > 0.5).float()) for _ in range(3)]
    average = None
    if args.device == "hpu":
        from habana_frameworks.torch.hpex.movingavrg import FusedEMA
        from habana_frameworks.torch.hpex.optimizers import FusedAdamW

        average = FusedEMA(model)
        optimizer = FusedAdamW(model.parameters(), lr=0.01, eps=1e-08, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-08, weight_decay=1e-4)
    trainer = Trainer(SimpleNamespace(args=args))
    trainer.optimizer = optimizer
    mean = trainer.fit(model, data, average)
    for loss in trainer.train_losses:
        print("loss", loss.item().hex())
    print(f"mean {mean.item().hex()}")
    if args.device == "hpu":
        throughput = torch.tensor(1.5, dtype=torch.float64).to(torch.device("hpu"))
        dist.all_reduce(throughput, op=dist.ReduceOp.SUM)
        assert throughput.item() == 1.5
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
