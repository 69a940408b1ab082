import torch

tensor = torch.ones(3, dtype=torch.bfloat16)

KEEPS = True  # the model goes on being used

#: Exports are of the model before it is frozen.
plain_model = torch.nn.Linear(8, 4)
SMALLER = {"torch.onnx.export(model,": "torch.onnx.export(plain_model,"}
