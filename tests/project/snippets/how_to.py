from collections import OrderedDict

import torch

model = torch.nn.Sequential(
    OrderedDict(
        stem=torch.nn.Linear(8, 8),
        act=torch.nn.GELU(),
        body=torch.nn.Linear(8, 8),
        head=torch.nn.Linear(8, 4),
    )
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

#: The tests are called as well.
SMALLER = {
    'Path("expected.yaml").read_text()': 'Path("expected.yaml").read_text()\n\ntest_decisions()',
    "assert worst.effect < 0.01": "assert worst.effect < 0.01\n\ntest_precision()",
}
