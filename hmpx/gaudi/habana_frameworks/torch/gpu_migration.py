"""``habana_frameworks.torch.gpu_migration``: importing it sends ``"cuda"`` where ``"hpu"`` goes.

Where there is a CUDA device, nothing changes. Elsewhere devices, ``.cuda()`` and the backend ``nccl``
are rewritten; `torch.cuda` itself still reports that there is no such device.
"""

from __future__ import annotations

from hmpx.gaudi import devices  # not relative: under its imported name, the package is Habana's

devices.follow_cuda(is_on=True)
