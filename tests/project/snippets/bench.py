import torch

from tests.project.snippets.files.train import build_model

#: A run takes 0.2 s as documented.
SMALLER = {
    "hmpx.bench(make_step)": "hmpx.bench(make_step, runs=2, run_s=0.01)",
    "hmpx.bench(lambda: model, x)": "hmpx.bench(lambda: model, x, runs=2)",
}

data = [(torch.randn(2, 8), torch.tensor([0, 3]))]


def make_step():
    """Returns a step."""
    model = build_model()
    x, y = data[0]
    return lambda: torch.nn.functional.cross_entropy(model(x), y)
