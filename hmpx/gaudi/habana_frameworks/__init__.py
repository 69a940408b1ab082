"""What stands in for the package ``habana_frameworks``: one module here for each module there.

``habana_frameworks.torch.hpex.optimizers`` is `hmpx.gaudi.habana_frameworks.torch.hpex.optimizers`, and so on. What
torch can do is torch's; what only a Gaudi can do is there, too, and raises an error when it is used
(`.absent`). `hmpx.gaudi.shim` puts these modules in place.
"""

from __future__ import annotations

from typing import Any

from .absent import unknown

#: `hmpx.tensors.devices` looks for it: the stand-in does not mean that there is a Gaudi.
__hmpx_shim__ = True


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
