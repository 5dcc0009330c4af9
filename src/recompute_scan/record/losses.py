"""The losses of an unchanged script: the value of each scalar that goes through ``backward``.

``Tensor.backward`` calls ``torch.autograd.backward`` by that name, so one function is watched.
Values are copied on their device and read when the run is over, so that no step waits for them.
"""

from __future__ import annotations

from typing import Any

import torch

from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.patches import Patches

# Far more than any run that is measured has; a bound for loops that call backward all the time.
_MOST = 100_000


class LossWatch:
    """Keeps the losses of this process, from :meth:`install` to :meth:`remove`."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._copies: list[torch.Tensor] = []
        self._patches = Patches()

    def install(self) -> None:
        """Begin to watch; before the script is imported."""
        real = torch.autograd.backward

        def backward(call: Call, tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # A reentrant replay calls it too, inside the backward pass that it serves.
            if torch._C._current_graph_task_id() == -1:
                self._keep(tensors)
            return call(tensors, *args, **kwargs)

        self._patches.replace(torch.autograd, "backward", self._guard.around(real, backward))

    def remove(self) -> None:
        """Put torch's own function back."""
        self._patches.undo()

    def values(self) -> tuple[str, ...]:
        """The losses in order, as ``float.hex()`` gives them: all bits, infinities and NaN."""
        return tuple(float(copy.item()).hex() for copy in self._copies)

    def _keep(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ()):
            # Of a subclass (distributed, fake) a copy may do anything, and a copy made while a
            # CUDA graph is captured holds nothing yet.
            if type(tensor) is not torch.Tensor or tensor.numel() != 1 or tensor.is_meta:
                continue
            capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
            if not capturing and len(self._copies) < _MOST:
                self._copies.append(tensor.detach().clone())
