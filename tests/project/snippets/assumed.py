"""What documents take for granted: a model, data, a loss, an optimizer."""

import torch

import hmpx

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 4))
x = torch.randn(2, 8)
batches = data = [(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(2)]
batch = data[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def forward_step(model, batch):
    """Returns the output."""
    return model(batch[0])


def loss_fn(output, batch):
    """Returns a loss."""
    return torch.nn.functional.cross_entropy(output, batch[1])


def train_step(batch):
    """Takes one step."""
    optimizer.zero_grad()
    loss_fn(forward_step(model, batch), batch).backward()
    optimizer.step()


def train():
    """Takes some steps."""
    for each in data:
        train_step(each)


def step():
    """Takes one step."""
    train_step(batch)


assert not hmpx.is_converted()
