"""A model to plan with."""

import torch


def build_70b():
    return torch.nn.Linear(8, 8)


def inputs():
    return torch.randn(2, 8)
