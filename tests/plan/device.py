"""A device whose memory is simulated, by a mode of torch's that sees what operators make."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Device(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and that still live.

    Attributes:
        limit: More than so many bytes there are not.
    """

    def __init__(self, *tensors: Tensor, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.live: dict[int, tuple[Any, int]] = {}
        self.now = self.peak = 0
        for tensor in tensors:
            self._see(tensor)

    def most(self) -> int:
        """Most since this was asked last."""
        self._forget()
        most, self.peak = max(self.peak, self.now), self.now
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            self._see(tensor)
        if self.now > self.peak:
            self._forget()
            self.peak = max(self.peak, self.now)
            if self.limit is not None and self.now > self.limit:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return made

    def _see(self, tensor: object) -> None:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.now += storage.nbytes()

    def _forget(self) -> None:
        for place, (alive, size) in list(self.live.items()):
            if alive.expired():
                del self.live[place]
                self.now -= size
