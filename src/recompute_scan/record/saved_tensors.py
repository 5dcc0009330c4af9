"""What a step saves for its backward pass: every storage, by whom, and from when until when.

Hooks on saved tensors see what operators save and when the graph lets go of it. Weights are no
part of it. What a recompute of the non-reentrant kind makes again goes into hooks of its own, and
is seen by passing it on to them (:meth:`SavedTensors.recomputing`). What a selective checkpoint
keeps is in wrappers of torch's, whose lives are followed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from recompute_scan.record.isolation import Patches
from recompute_scan.record.modules import root_modules
from recompute_scan.record.steps import in_backward
from recompute_scan.record.torch_versions import is_compiling
from recompute_scan.result.run_record import Hold, Storage

_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_OPEN = -1
# Around each result that a selective checkpoint keeps, from torch 2.4 on.
_KEPT = "_VersionWrapper"


class _OpenCall(Struct):
    """A hold that is there, or was."""

    storage: int
    run: int
    kind: Any
    begin: int
    end: int = _OPEN
    in_backward: bool = False


class _Handle:
    """What the graph holds in place of a tensor; its end is the graph's word that it let go."""

    __slots__ = ("ended", "tensor")

    def __init__(self, tensor: torch.Tensor, ended: Callable[[], None] | None) -> None:
        self.tensor = tensor
        self.ended = ended

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended()


class _OnHost(Struct, frozen=True):
    """A tensor of a GPU that waits in the host's memory."""

    device: torch.device
    copy: torch.Tensor


class SavedTensors:
    """The saved tensors of one step, between :meth:`begin` and :meth:`finish`.

    A storage is known by the address of its record in torch, which a weak reference keeps from
    being used again.

    Attributes:
        peak: Most that was saved at once, bytes.
        current_run: The run of a candidate that goes on in this thread, by its place; -1 outside.
    """

    def __init__(self, *, to_host: bool = False) -> None:
        self._to_host = to_host
        self._hooks: Any = None
        self._patches = Patches()
        self._lock = threading.RLock()
        self._time = 0
        self._holds: list[_OpenCall] = []
        self._sizes: list[int] = []
        self._saves: list[int] = []
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}
        self._weights: Counter[int] = Counter()
        self._total = 0
        self._again: dict[int, int] = {}
        self.peak = 0
        self.current_run = -1

    @property
    def now(self) -> int:
        """The number of the last event."""
        return self._time

    def begin(self) -> None:
        """A step begins, in this thread."""
        for root in root_modules():
            self.see_weights(root, 1)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        if hasattr(torch_checkpoint, _KEPT):
            self._patches.replace(torch_checkpoint, _KEPT, self._following())

    def finish(self) -> None:
        """It has ended."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
            self._patches.undo()

    def see_weights(self, module: nn.Module, count: int) -> None:
        """What the module has for weights now is none of what is saved; -1 undoes 1.

        Sharded ones are plain attributes while they are gathered.
        """
        with torch._C.DisableTorchFunction():
            for part in module.modules():
                for held in (part._parameters, part._buffers, vars(part)):
                    for value in held.values():
                        if isinstance(value, torch.Tensor):
                            storage = _storage_of(value)
                            if storage is not None:
                                self._weights[storage._cdata] += count

    def keep_inputs(self, run: int, tensors: Sequence[torch.Tensor]) -> None:
        """A run of a candidate begins with these; a checkpoint would keep them."""
        with self._lock, torch._C.DisableTorchFunction():
            self._time += 1
            for tensor in tensors:
                number = self._number(tensor)
                if number is not None:
                    self._holds.append(_OpenCall(number, run, "input", self._time))

    def keep_results(self, results: Any) -> None:
        """An operator of the current run made these; a selective checkpoint would keep them."""
        with self._lock, torch._C.DisableTorchFunction():
            self._time += 1
            for tensor in tree_leaves(results):
                number = self._number(tensor) if isinstance(tensor, torch.Tensor) else None
                if number is not None:
                    self._holds.append(_OpenCall(number, self.current_run, "heavy", self._time))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside a recompute: what goes to hooks that are not ours is counted on its way."""
        top = _top_hooks(False) if _top_hooks is not None else None
        if self._hooks is None or top is None or top[0] == self._pack:
            yield
            return
        pack, unpack = top

        def ours(tensor: torch.Tensor) -> Any:
            self._made_again(tensor)
            return pack(tensor)

        try:
            with torch.autograd.graph.saved_tensors_hooks(ours, unpack):
                yield
        finally:
            self._again.clear()

    def storages(self) -> tuple[Storage, ...]:
        """All that was held, and by what. What nothing let go of is held to the end."""
        holds: list[list[Hold]] = [[] for _ in self._sizes]
        for one in self._holds:
            end = one.end if one.end != _OPEN else self._time + 1
            holds[one.storage].append(Hold(one.run, one.kind, one.begin, end))
        return tuple(
            Storage(size, tuple(held)) for size, held in zip(self._sizes, holds, strict=True)
        )

    def backward_began(self, run: int, parts: Collection[int] = ()) -> int:
        """When the backward pass first let go of something that the run had saved, or its parts.

        Of what is never trained it lets go of nothing: then -1.
        """
        ends = [
            one.end
            for one in self._holds
            if (one.run == run or one.run in parts) and one.kind == "saved" and one.in_backward
        ]
        return min(ends, default=-1)

    def _made_again(self, tensor: torch.Tensor) -> None:
        with self._lock, torch._C.DisableTorchFunction():
            storage = _storage_of(tensor)
            if storage is None or self._is_weight(tensor, storage):
                return
            number, _ = self._known.get(storage._cdata, (None, None))
            if number is None or not self._saves[number]:
                self._again[storage._cdata] = storage.nbytes()
                self.peak = max(self.peak, self._total + sum(self._again.values()))

    def _pack(self, tensor: torch.Tensor) -> Any:
        if is_compiling():
            return tensor
        hold = self._hold(tensor, "saved")
        if hold is None:
            return _Handle(tensor, None)
        return _Handle(self._put_away(tensor), lambda: self._let_go(hold))

    def _hold(self, tensor: torch.Tensor, kind: Any) -> _OpenCall | None:
        with self._lock, torch._C.DisableTorchFunction():
            self._time += 1
            number = self._number(tensor)
            if number is None:
                return None
            self._saves[number] += 1
            if self._saves[number] == 1:
                self._total += self._sizes[number]
                self.peak = max(self.peak, self._total + sum(self._again.values()))
            hold = _OpenCall(number, self.current_run, kind, self._time)
            self._holds.append(hold)
            return hold

    def _following(self) -> Any:
        """Torch's wrapper around a result that is kept, whose life is that of a hold."""
        saved = self
        original: Any = getattr(torch_checkpoint, _KEPT)

        class Followed(original):
            def __init__(self, value: Any) -> None:
                super().__init__(value)
                is_tensor = isinstance(value, torch.Tensor)
                self.hold = saved._hold(value, "heavy") if is_tensor else None

            def __del__(self) -> None:
                if self.hold is not None:
                    saved._let_go(self.hold)

        return Followed

    def _put_away(self, tensor: torch.Tensor) -> Any:
        if self._to_host and tensor.is_cuda:
            return _OnHost(tensor.device, tensor.to("cpu"))
        return tensor

    def _unpack(self, handle: Any) -> Any:
        if not isinstance(handle, _Handle):
            return handle
        held = handle.tensor
        return held.copy.to(held.device) if isinstance(held, _OnHost) else held

    def _let_go(self, hold: _OpenCall) -> None:
        with self._lock:
            self._time += 1
            hold.end, hold.in_backward = self._time, in_backward()
            self._saves[hold.storage] -= 1
            if self._saves[hold.storage] == 0:
                self._total -= self._sizes[hold.storage]

    def _number(self, tensor: torch.Tensor) -> int | None:
        """The storage's number; ``None`` for weights, and for what has no storage."""
        storage = _storage_of(tensor)
        if storage is None or self._is_weight(tensor, storage):
            return None
        known = self._known.get(storage._cdata)
        if known is None:
            known = len(self._sizes), StorageWeakRef(storage)
            self._known[storage._cdata] = known
            self._sizes.append(int(storage.nbytes()))
            self._saves.append(0)
        return known[0]

    def _is_weight(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        return isinstance(base, nn.Parameter) or self._weights[storage._cdata] > 0


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """``None`` for a tensor without one, such as a sparse one, and where it is empty."""
    try:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        return storage if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None
