"""Where torch's two kinds of checkpoint can be caught.

``torch.utils.checkpoint.checkpoint`` itself stays what it is: ``torch.compile`` knows it by
identity and others have imported it by name. What it looks up when called is replaced instead:
attributes of ``CheckpointFunction`` for the reentrant variant and the generator that
:mod:`recompute_scan.record.compat` names for the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch.utils.checkpoint as torch_checkpoint

from recompute_scan.record.compat import generator_name
from recompute_scan.record.patches import Patches
from recompute_scan.record.switches import COMPOSABLE_MODULE

Variant = Literal["reentrant", "non-reentrant"]


def reentrant_function() -> Any:
    """Torch's autograd function of the reentrant variant; ``None`` where there is none."""
    return getattr(torch_checkpoint, "CheckpointFunction", None)


def generator_function() -> Any:
    """Torch's generator of the non-reentrant variant; ``None`` where there is none.

    It yields once, and the checkpointed function runs while it waits there.
    """
    name = generator_name()
    return None if name is None else getattr(torch_checkpoint, name)


def replace_generator(replacement: Callable[..., Any], patches: Patches) -> None:
    """Put another function in the place of :func:`generator_function`, wherever it is named."""
    name, original = generator_name(), generator_function()
    if name is None:
        return
    # The composable checkpoint imports the generator by name.
    for module in (torch_checkpoint, sys.modules.get(COMPOSABLE_MODULE)):
        if module is not None and getattr(module, name, None) is original:
            patches.replace(module, name, replacement)

    def restore() -> None:
        # Imported while the replacement was there, it has that by name.
        late = sys.modules.get(COMPOSABLE_MODULE)
        if late is not None and getattr(late, name, None) is replacement:
            setattr(late, name, original)

    patches.add(restore)
