import torch

tensor = torch.ones(3, dtype=torch.bfloat16)
