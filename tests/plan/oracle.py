"""What arrangements of checkpoints really take, without recompute-scan.

    python -m tests.plan.oracle NAME STEPS ARRANGEMENT…

The case's own switch makes each arrangement (``all``, ``none`` or names of layers). What is saved
is counted by hooks on saved tensors and, in recomputes, by torch's own bookkeeping, each storage
once; of results that a policy keeps the policy tells, and they count until a recompute has taken
them, or as long as they live. Step
times are those of steps that take turns, each thrice in a row: the first of the three, which finds
the memory as another arrangement has left it, does not count. Processor time is told beside them.
"""

import json
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.plan.scripts import CASES, Switched, arrange, build


class Saved:
    """Distinct storages that are saved for backward, as they come and go."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self.weights = {_place(tensor) for tensor in tensors}
        self.users: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.again: dict[int, int] = {}
        self.kept: list[tuple[Any, int, int]] = []
        self.peak = 0

    def keep(self, result: Any) -> None:
        """A policy keeps it."""
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                alive: Any = StorageWeakRef(storage)
                self.kept.append((alive, _place(tensor), storage.nbytes()))
        self._look()

    def take(self, result: torch.Tensor) -> None:
        """A recompute takes what was kept."""
        self.kept = [one for one in self.kept if one[1] != _place(result)]

    def pack(self, tensor: torch.Tensor) -> Any:
        place = _place(tensor)
        box = [tensor]
        holder = _Holder(box)
        if torch._C._current_graph_task_id() == -1:
            self.again.clear()  # a forward pass: the last recompute has been used up
        if not self._is_weight(tensor, place):
            self.users[place] = self.users.get(place, 0) + 1
            self.sizes[place] = tensor.untyped_storage().nbytes()
            weakref.finalize(holder, self._drop, place)
            self._look()
        return holder

    def saved_again(self, tensor: torch.Tensor) -> None:
        """A recompute has made it again, and keeps it."""
        place = _place(tensor)
        if not self._is_weight(tensor, place):
            self.again[place] = tensor.untyped_storage().nbytes()
            self._look()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What is saved counts inside, in forward passes and in recomputes."""
        module: Any = torch.utils.checkpoint
        hook: Any = module._recomputation_hook
        saved = self

        class Counting(hook):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                inner: Any = vars(self)["pack_hook"]
                saved.again.clear()  # the recompute before this one has been used up

                def pack(tensor: torch.Tensor) -> Any:
                    saved.saved_again(tensor)
                    return inner(tensor)

                self.pack_hook = pack

        module._recomputation_hook = Counting
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda holder: holder.box[0]):
                yield
        finally:
            module._recomputation_hook = hook

    def _is_weight(self, tensor: torch.Tensor, place: int) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        return isinstance(owner, nn.Parameter) or place in self.weights or place == 0

    def _drop(self, place: int) -> None:
        self.users[place] -= 1

    def _look(self) -> None:
        self.kept = [one for one in self.kept if not one[0].expired()]
        held = {place: size for _, place, size in self.kept}
        held |= self.again
        held |= {place: self.sizes[place] for place, number in self.users.items() if number}
        self.peak = max(self.peak, sum(held.values()))


class _Holder:
    __slots__ = ("__weakref__", "box")

    def __init__(self, box: list[torch.Tensor]) -> None:
        self.box = box


def _place(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage().data_ptr())


def peak_of(model: Switched, step: Any) -> int:
    """Most that one step saves at once, bytes."""
    saved = Saved(model)
    model.tell = saved.keep
    torch_checkpoint: Any = torch.utils.checkpoint
    wrapper: Any = torch_checkpoint._VersionWrapper
    get_val, init = wrapper.get_val, wrapper.__init__

    def kept(self: Any, value: Any) -> None:
        saved.keep(value)
        init(self, value)

    def taken(self: Any, *args: Any) -> Any:
        if isinstance(self.val, torch.Tensor):
            saved.take(self.val)
        return get_val(self, *args)

    wrapper.__init__, wrapper.get_val = kept, taken
    try:
        with saved.counting():
            step()
    finally:
        wrapper.__init__, wrapper.get_val = init, get_val
        model.tell = lambda _: None
    return saved.peak


def main() -> None:
    name, steps, *arrangements = sys.argv[1:]
    case = CASES[name]
    if case.ranks > 1:
        dist.init_process_group("gloo")
    model, step = build(case)
    step()
    peaks = []
    for one in arrangements:
        arrange(model, one)
        peaks.append(peak_of(model, step))
    wall: list[list[float]] = [[] for _ in arrangements]
    busy: list[list[float]] = [[] for _ in arrangements]
    places = list(range(len(arrangements)))
    for turn in range(-(-int(steps) // 2)):
        for place in places if turn % 2 else reversed(places):
            arrange(model, arrangements[place])
            step()
            for _ in range(2):
                began, began_busy = time.perf_counter(), time.process_time()
                step()
                wall[place].append((time.perf_counter() - began) * 1e3)
                busy[place].append((time.process_time() - began_busy) * 1e3)
    if case.ranks == 1 or dist.get_rank() == 0:
        print(json.dumps({"peaks": peaks, "wall": wall, "busy": busy}))
    if case.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
