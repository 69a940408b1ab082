"""Digits: a small convolutional net, lists in files, lazy mode, a checkpoint that training goes on from."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 3, 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc(x), dim=1)


def mark_step(args):
    if args.use_lazy_mode and args.device == "hpu":
        import habana_frameworks.torch.core as htcore

        htcore.mark_step()


def permute_params(model, to_filters_last):
    import habana_frameworks.torch.core as htcore

    if htcore.is_enabled_weight_permute_pass() is True:
        return
    order = (2, 3, 1, 0) if to_filters_last else (3, 2, 0, 1)
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.permute(order)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="hpu")
    parser.add_argument("--use_lazy_mode", action="store_true")
    parser.add_argument("--hmp", dest="is_hmp", action="store_true")
    parser.add_argument("--hmpx", action="store_true")
    parser.add_argument("--hmp-bf16", default="")
    parser.add_argument("--hmp-fp32", default="")
    parser.add_argument("--hmp-opt-level", default="O1")
    parser.add_argument("--hmp-verbose", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    if args.use_lazy_mode:
        os.environ["PT_HPU_LAZY_MODE"] = "1"
    if args.device == "hpu":
        from habana_frameworks.torch.utils.library_loader import load_habana_module

        load_habana_module()
        current_device, set_device = torch.cuda.current_device, torch.cuda.set_device
        torch.cuda.current_device = lambda: None
        torch.cuda.set_device = lambda x: None
        torch.cuda.current_device, torch.cuda.set_device = current_device, set_device
    device = torch.device(args.device)
    if args.hmpx:
        import hmpx as hmp

        hmp.convert(
            args.hmp_bf16, args.hmp_fp32, lists="hmp", legalize="never", device_types={device.type}
        )
    elif args.is_hmp:
        from habana_frameworks.torch.hpex import hmp

        hmp.convert(
            opt_level=args.hmp_opt_level,
            bf16_file_path=args.hmp_bf16,
            fp32_file_path=args.hmp_fp32,
            isVerbose=args.hmp_verbose,
        )
    data = [(torch.rand(6, 1, 12, 12), torch.randint(10, (6,))) for _ in range(4)]
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    if args.device == "hpu":
        permute_params(model, True)
    for epoch in range(2):
        model.train()
        for x, target in data:
            x, target = x.to(device), target.to(device)
            x = x.contiguous(memory_format=torch.channels_last)
            mark_step(args)
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), target)
            loss.backward()
            mark_step(args)
            optimizer.step()
            mark_step(args)
            print("loss", loss.item().hex())
        scheduler.step()
        if args.device == "hpu":
            permute_params(model, False)
        name = f"mnist_{os.getpid()}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, name)
        checkpoint = torch.load(name, map_location="cpu")
        os.remove(name)
        model = Net().to(device)
        model.load_state_dict(checkpoint["model"])
        optimizer = torch.optim.Adadelta(model.parameters(), lr=0.7)
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
        model.eval()
        with torch.no_grad():
            print(
                "test", F.nll_loss(model(data[0][0].to(device)), data[0][1].to(device)).item().hex()
            )


if __name__ == "__main__":
    main()
