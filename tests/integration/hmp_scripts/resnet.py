"""Images: residual blocks with batch norm, fused SGD or LARS, loaders, meters, process groups."""

import argparse
import os
import random
from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self, device):
        t = torch.tensor([self.count, self.total], dtype=torch.float32).to(device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(t)
        t = t.tolist()
        self.count, self.total = int(t[0]), t[1]


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target[None])
        return [
            correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / len(target)) for k in topk
        ]


def init_distributed_mode(args):
    if args.device != "hpu":
        return
    os.environ["ID"] = "0"
    import habana_frameworks.torch.core.hccl  # noqa: F401

    store = dist.HashStore()
    dist.init_process_group("hccl", store=store, rank=0, world_size=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="hpu")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--hmp", dest="is_hmp", action="store_true")
    parser.add_argument("--hmpx", action="store_true")
    parser.add_argument("--hmp-bf16", default="")
    parser.add_argument("--hmp-fp32", default="")
    parser.add_argument("--hmp-opt-level", default="O1")
    parser.add_argument("--hmp-verbose", action="store_true")
    args = parser.parse_args()
    if args.is_hmp:
        from habana_frameworks.torch.hpex import hmp

        hmp.convert(
            opt_level=args.hmp_opt_level,
            bf16_file_path=args.hmp_bf16,
            fp32_file_path=args.hmp_fp32,
            isVerbose=args.hmp_verbose,
        )
    init_distributed_mode(args)
    random.seed(3)
    torch.manual_seed(3)
    device = torch.device(args.device)
    if args.hmpx:
        import hmpx as hmp

        hmp.convert(
            args.hmp_bf16, args.hmp_fp32, lists="hmp", legalize="never", device_types={device.type}
        )
    torch.backends.cudnn.benchmark = True
    images = TensorDataset(torch.rand(12, 4, 8, 8), torch.randint(5, (12,)))
    loader = DataLoader(images, batch_size=4, num_workers=0, shuffle=True)
    model = nn.Sequential(
        Block(4), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    if args.optimizer == "lars":
        from habana_frameworks.torch.hpex.optimizers import FusedLars, FusedResourceApplyMomentum

        optimizer = FusedResourceApplyMomentum(
            model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3
        )
        skip_list = ["bias", "bn"]
        skip_mask = [not any(v in n for v in skip_list) for n, _ in model.named_parameters()]
        optimizer = FusedLars(optimizer, skip_mask, eps=0.0)
    else:
        sgd = torch.optim.SGD
        if args.device == "hpu":
            from habana_frameworks.torch.hpex.optimizers import FusedSGD as sgd
        optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    without_ddp = model
    if args.device == "hpu":
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=100, gradient_as_bucket_view=True
        )
        without_ddp = model.module
    meters = defaultdict(SmoothedValue)
    for _ in range(2):
        model.train()
        for image, target in loader:
            image, target = (
                image.to(device, non_blocking=True),
                target.to(device, non_blocking=True),
            )
            image = image.contiguous(memory_format=torch.channels_last)
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if args.device == "hpu":
                import habana_frameworks.torch.core as htcore

                htcore.mark_step()
            optimizer.step()
            acc1, _ = accuracy(output.detach().to("cpu"), target.to("cpu"), topk=(1, 5))
            meters["acc1"].update(acc1.item(), n=len(image))
            print("loss", loss.item().hex())
        scheduler.step()
    for meter in meters.values():
        meter.synchronize_between_processes(device)
    print("accuracy", meters["acc1"].total.hex())
    print("mean", without_ddp[0].bn1.running_mean.sum().item().hex())
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
