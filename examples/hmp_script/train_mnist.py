"""Trains a small CNN on digits, written for Gaudi with HMP: nothing in here knows of hmpx.

    hmpx run --habana-shim examples/hmp_script/train_mnist.py
    hmpx run --habana-shim examples/hmp_script/train_mnist.py --hmp-verbose --steps 1

The shim stands in for ``habana_frameworks``: ``torch.device("hpu")`` is the GPU or CPU that is
there, and ``hmp.convert`` is hmpx's. The two op lists beside this file are those that HMP's own
MNIST example used. The digits are drawn by `draw_digits`, so that there is nothing to download.
"""

import argparse
from pathlib import Path

import habana_frameworks.torch.core as htcore
import torch
import torch.nn.functional as F
from habana_frameworks.torch.hpex import hmp
from torch import nn

HERE = Path(__file__).parent

# The digits 0 to 9, three pixels wide and five high, row by row.
GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)


class Net(nn.Module):
    """Two convolutions and two linear layers: [batch, 1, 28, 28] -> log-probabilities [batch, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc1 = nn.Linear(400, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def draw_digits(count, generator):
    """Returns noisy 28x28 images of digits near the centre, and the digits."""
    glyphs = torch.tensor([[int(pixel) for pixel in glyph] for glyph in GLYPHS]).float()
    glyphs = glyphs.reshape(10, 5, 3).repeat_interleave(4, 1).repeat_interleave(4, 2)  # 20x12
    targets = torch.randint(10, (count,), generator=generator)
    tops = torch.randint(2, 7, (count,), generator=generator).tolist()
    lefts = torch.randint(6, 11, (count,), generator=generator).tolist()
    images = [
        F.pad(glyphs[target], (left, 16 - left, top, 8 - top))
        for target, top, left in zip(targets, tops, lefts, strict=True)
    ]
    noise = torch.randn(count, 1, 28, 28, generator=generator)
    return torch.stack(images).unsqueeze(1) + 0.3 * noise, targets


def train(args, model, device, optimizer, generator):
    """Trains for ``args.steps`` batches."""
    model.train()
    for step in range(1, args.steps + 1):
        data, target = draw_digits(args.batch_size, generator)
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        htcore.mark_step()
        with hmp.disable_casts():
            optimizer.step()
        htcore.mark_step()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")


def test(model, device, generator):
    """Prints the accuracy on fresh digits."""
    model.eval()
    data, target = draw_digits(500, generator)
    with torch.no_grad():
        predicted = model(data.to(device)).argmax(1).cpu()
    htcore.mark_step()
    print(f"test accuracy {(predicted == target).float().mean():.1%}")


def main():
    """Converts as the options say, then trains and tests."""
    parser = argparse.ArgumentParser(description="MNIST on HPU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hmp-bf16", default=str(HERE / "mnist_bf16.txt"))
    parser.add_argument("--hmp-fp32", default=str(HERE / "mnist_fp32.txt"))
    parser.add_argument("--hmp-opt-level", default="O1")
    parser.add_argument("--hmp-verbose", action="store_true")
    args = parser.parse_args()

    hmp.convert(
        opt_level=args.hmp_opt_level,
        bf16_file_path=args.hmp_bf16,
        fp32_file_path=args.hmp_fp32,
        isVerbose=args.hmp_verbose,
    )

    device = torch.device("hpu")
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(args, model, device, optimizer, generator)
    test(model, device, generator)


if __name__ == "__main__":
    main()
