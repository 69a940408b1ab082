"""Calls torch by its name."""

import torch

function = torch.nn.functional
