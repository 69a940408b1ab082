"""Trains one linear layer as the documentation of Habana Mixed Precision does, on any device.

    python examples/hmp_linear.py

What `hmp.convert` did on Gaudi, `hmpx.convert` does on the device that is there: the list
``lists/hmpx/bf16.txt`` holds ``linear``, so its input, weight and bias are cast to bfloat16, and
the weight itself stays float32. The optimizer's step is not cast.
"""

from __future__ import annotations

import torch

import hmpx

N, D_IN, D_OUT, STEPS = 64, 1024, 512, 10


def main() -> None:
    """Prints the loss of each step, and which dtypes the layer saw and kept."""
    torch.manual_seed(0)
    has_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")

    session = hmpx.convert(bf16_file_path="", fp32_file_path="", isVerbose=False)
    print(session)

    x = torch.randn(N, D_IN, device=device)
    y = torch.randn(N, D_OUT, device=device)
    model = torch.nn.Linear(D_IN, D_OUT, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, STEPS + 1):
        y_predicted = model(x)
        loss = torch.nn.functional.mse_loss(y_predicted, y)
        optimizer.zero_grad()
        loss.backward()
        with hmpx.disable_casts():
            optimizer.step()
        print(f"step {step:2}  loss {loss.item():.4f}")

    print(f"output {y_predicted.dtype}, weight {model.weight.dtype}, on {device}")
    print(f"linear: {session.policy['linear'].reason}")
    session.revert()
    print(f"after revert: output {model(x).dtype}")


if __name__ == "__main__":
    main()
