"""A batch to compare with."""

import torch


def batch():
    return torch.randn(2, 8)
