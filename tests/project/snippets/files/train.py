"""A training script that knows nothing of hmpx; `hmpx run` and `hmpx plan` are shown with it."""

import torch


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 4))


def make_batch():
    return torch.randn(2, 8)


def forward_step(model, batch):
    return model(batch)


def loss_fn(output, batch):
    return output.square().mean()


inputs = make_batch

if __name__ == "__main__":
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        batch = make_batch()
        loss = loss_fn(forward_step(model, batch), batch)
        loss.backward()
        optimizer.step()
