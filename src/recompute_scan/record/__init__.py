"""Recording: run the user's script unchanged and keep the traces. The only part that needs torch.

Importing it without torch raises :class:`~recompute_scan.errors.MissingExtra`.
"""

from __future__ import annotations

from recompute_scan.errors import MissingExtra

try:
    import torch  # noqa: F401
    import wrapt  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "wrapt"):
        raise
    raise MissingExtra(error.name, "torch", "`recompute-scan run`") from None
