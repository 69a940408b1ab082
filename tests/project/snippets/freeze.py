import torch

tensor = torch.ones(3, dtype=torch.bfloat16)

KEEPS = True  # the model goes on being used
