"""The stand-in for the package ``habana_frameworks``: one module here for each module there.

``habana_frameworks.torch.hpex.optimizers`` is `hmpx.gaudi.habana_frameworks.torch.hpex.optimizers`,
and so on. Whatever torch can do is done by torch. Whatever only a Gaudi can do is present as well, and
raises an error when it is used (see ``absent``). `hmpx.gaudi.shim` installs these modules.
"""

from __future__ import annotations

from typing import Any

from .absent import unknown

#: `hmpx.tensors.devices` looks for this name: the stand-in does not mean that there is a Gaudi.
__hmpx_shim__ = True


def __getattr__(name: str) -> Any:
    raise unknown(__name__, name)
