"""A script of HMP's time."""

import torch
from habana_frameworks.torch.hpex import hmp

hmp.convert(opt_level="O1", bf16_file_path="", fp32_file_path="", isVerbose=False)
model = torch.nn.Linear(4, 4).to("hpu")
assert model(torch.ones(2, 4, device="hpu")).dtype is torch.bfloat16
