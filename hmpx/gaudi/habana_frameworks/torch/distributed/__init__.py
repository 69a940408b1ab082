"""``habana_frameworks.torch.distributed``."""
