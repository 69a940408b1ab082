import torch

from hmpx import formats

earlier = [torch.randn(1000) for _ in range(2)]
x = earlier[0]
