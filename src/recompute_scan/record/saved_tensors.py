"""Storages that a step saves for its backward pass: by which modules, and from when until when.

Hooks on saved tensors see what operators save and when the graph lets go of it. Weights are no
part of it. Non-reentrant checkpoints have hooks too, for tensors that operators inside them save
and for those that a recompute makes again, and both pass them on to ours. So a step that recomputes
everything shows what one that keeps everything would hold, without holding it. The results
that a selective checkpoint keeps are in wrappers of torch's, which are followed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from recompute_scan.record.isolation import Patches
from recompute_scan.record.modules import root_modules
from recompute_scan.record.steps import in_backward
from recompute_scan.record.torch_versions import is_compiling
from recompute_scan.result.run_record import Hold, ModuleRun, Storage

_OPEN = -1
# Around each result that a selective checkpoint keeps, from torch 2.4 on.
_KEPT = "_VersionWrapper"


class _OpenCall(Struct):
    """A hold that is there, or was; ``counted`` where it keeps the storage in this step too."""

    storage: int
    run: int
    kind: Any
    begin: int
    end: int = _OPEN
    in_backward: bool = False
    counted: bool = False


class _Handle:
    """Held by the graph in place of a tensor, or of a checkpoint's placeholder; its end shows
    that the graph has released it.
    """

    __slots__ = ("ended", "held")

    def __init__(self, held: Any, ended: Callable[[], None] | None) -> None:
        self.held = held
        self.ended = ended

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended()


class SavedTensors:
    """The saved tensors of one step, between :meth:`begin` and :meth:`finish`.

    A storage is known by the address of its record in torch, which a weak reference keeps from
    being used again.

    Attributes:
        peak: Most that was saved at once, bytes.
        current_run: The run of a candidate that goes on in this thread, by its place; -1 outside.
        through: Checkpoints of ours are looked through.
        entering: One begins.
        now: The number of the last event.
        allocated: Most that was allocated on the device before each event, behind the one before
            it, bytes; empty where it is not measured.
        fullest: Before which events it was most between two runs, or recomputes, and before which
            it would have been with all that was seen.
    """

    def __init__(
        self, *, through: bool = False, most_since: Callable[[], int] | None = None
    ) -> None:
        self.through = through
        self._most_since = most_since
        self.allocated: list[int] = []
        self.fullest: list[int] = []
        self._kept: list[int] = []
        self._gone: dict[int, int] = {}
        self._since = 0
        self.entering = False
        self._live: dict[int, _OpenCall] = {}
        self._hooks: Any = None
        self._patches = Patches()
        self._lock = threading.RLock()
        self.now = 0
        self._holds: list[_OpenCall] = []
        self._sizes: list[int] = []
        self._saves: list[int] = []
        self._known: dict[int, int] = {}
        self._weak: list[StorageWeakRef] = []
        self._seen: Counter[int] = Counter()
        self._weights: Counter[int] = Counter()
        self._total = 0
        self._again: dict[int, int] = {}
        self.peak = 0
        self.current_run = -1

    def begin(self) -> None:
        """A step begins, in this thread."""
        for root in root_modules():
            self.see_weights(root, 1)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        self._patches.replace(torch_checkpoint, "_checkpoint_hook", self._through())
        self._patches.replace(torch_checkpoint, "_recomputation_hook", self._again_in())
        if hasattr(torch_checkpoint, _KEPT):
            self._patches.replace(torch_checkpoint, _KEPT, self._following())

    def finish(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
            self._patches.undo()
            self._passes(picks=True)
            self._most_since = None  # what goes later is of no moment

    def see_weights(self, module: nn.Module, count: int) -> None:
        """The present weights of the module do not count as saved; -1 undoes 1.

        Sharded ones are plain attributes while they are gathered.
        """
        with torch._C.DisableTorchFunction():
            for part in module.modules():
                held = (part._parameters, part._buffers, vars(part))
                for value in chain.from_iterable(one.values() for one in held):
                    storage = _storage_of(value) if isinstance(value, torch.Tensor) else None
                    if storage is not None:
                        self._weights[storage._cdata] += count

    @contextmanager
    def running(self, run: int, inputs: Iterable[torch.Tensor]) -> Iterator[None]:
        """A run of a candidate, with inputs that a checkpoint would keep. Until it ends its callers
        have them.
        """
        before = self.current_run
        with self._lock, torch._C.DisableTorchFunction():
            self._passes(picks=before < 0)
            numbers = [number for number in map(self._number, inputs) if number is not None]
            held = [_OpenCall(number, run, "input", self.now) for number in numbers]
            given = [_OpenCall(number, -1, "local", self.now) for number in numbers]
            self._holds += [*held, *(given if self._most_since is not None else ())]
        self.current_run = run
        try:
            yield
        finally:
            self.current_run = before
            self._passes()
            for one in given:
                one.end = self.now

    def keep_results(self, results: Any) -> None:
        """An operator of the current run made these; a selective checkpoint would keep them."""
        with self._lock, torch._C.DisableTorchFunction():
            self._passes()
            for tensor in tree_flatten(results)[0]:
                number = self._number(tensor) if isinstance(tensor, torch.Tensor) else None
                if number is not None:
                    self._holds.append(_OpenCall(number, self.current_run, "heavy", self.now))

    def storages(self) -> tuple[Storage, ...]:
        """All that was held, and by what. Storages that were not released are held to the end."""
        holds: list[list[Hold]] = [[] for _ in self._sizes]
        for one in self._holds:
            end = one.end if one.end != _OPEN else self.now + 1
            holds[one.storage].append(Hold(one.run, one.kind, one.begin, end))
        return tuple(
            Storage(size, tuple(held)) for size, held in zip(self._sizes, holds, strict=True)
        )

    def module_runs(
        self, runs: Sequence[tuple[int, int, int]], fixed: Collection[int] = ()
    ) -> tuple[ModuleRun, ...]:
        """These runs with the begins of their backward passes; fixed modules have none.

        A backward pass begins when it first lets go of something that the run had saved, or its
        parts. Of what is never trained it lets go of nothing: then it is -1.
        """
        began: dict[int, int] = {}
        for one in self._holds:
            if one.kind == "saved" and one.in_backward:
                began[one.run] = min(one.end, began.get(one.run, one.end))
        parts = [(around, began[run]) for run, (*_, around) in enumerate(runs) if run in began]
        for around, first in parts:
            began[around] = min(first, began.get(around, first))
        return tuple(
            ModuleRun(place, begin, -1 if place in fixed else began.get(run, -1), around)
            for run, (place, begin, around) in enumerate(runs)
        )

    def _passes(self, *, picks: bool = False) -> None:
        """An event: what the device had allocated until now, and what of it lives unheld. Behind
        some events a part of the step begins that has its fullest moment apart.
        """
        with self._lock:
            self.now += 1
            if self._most_since is not None:
                self.allocated.append(self._most_since())
                self._kept.append(self.allocated[-1] + sum(self._gone.values()))
            for number, hold in list(self._live.items()):
                gone = self._weak[number].expired()
                if gone or self._saves[number]:
                    hold.end = self.now
                    self._live.pop(number, None)  # a handle may end meanwhile
                if gone and self._seen[number]:
                    self._gone[number] = self._sizes[number]
            if picks:
                if times := range(self._since, len(self.allocated)):
                    most = {
                        max(times, key=each.__getitem__) for each in (self.allocated, self._kept)
                    }
                    self.fullest += [1 + place for place in sorted(most)]
                self._since = self.now

    def _through(self) -> Any:
        """Torch's hooks inside a checkpoint, which pass what they see on where one is entered."""
        saved = self
        original: Any = torch_checkpoint._checkpoint_hook

        class Through(original):
            pack_hook: Any
            unpack_hook: Any

            def __init__(self, frame: Any) -> None:
                super().__init__(frame)
                if saved.entering:
                    saved.entering = False
                    pack, unpack = self.pack_hook, self.unpack_hook
                    self.pack_hook = lambda tensor: saved._handle(tensor, pack(tensor), False)
                    self.unpack_hook = lambda handle: unpack(handle.held)

        return Through

    def _again_in(self) -> Any:
        """Torch's hooks inside a recompute; its beginning and end are events."""
        saved = self
        original: Any = torch_checkpoint._recomputation_hook

        class Again(original):
            pack_hook: Any

            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                pack = self.pack_hook

                def passing(tensor: torch.Tensor) -> Any:
                    saved._made_again(tensor)
                    return pack(tensor)

                self.pack_hook = passing
                saved._passes(picks=True)

            def __exit__(self, *args: Any) -> Any:
                saved._again.clear()
                saved._passes()
                saved._since = saved.now
                return super().__exit__(*args)

        return Again

    def _made_again(self, tensor: torch.Tensor) -> None:
        with self._lock, torch._C.DisableTorchFunction():
            storage = _storage_of(tensor)
            if storage is None or self._is_weight(tensor, storage):
                return
            number = self._known.get(storage._cdata)
            if number is None or not self._saves[number]:
                self._again[storage._cdata] = storage.nbytes()
                self._see_peak()

    def _see_peak(self) -> None:
        self.peak = max(self.peak, self._total + sum(self._again.values()))

    def _pack(self, tensor: torch.Tensor) -> Any:
        return tensor if is_compiling() else self._handle(tensor, tensor, True)

    def _handle(self, tensor: torch.Tensor, held: Any, counted: bool) -> _Handle:
        hold = self._hold(tensor, "saved", counted)
        return _Handle(held, None if hold is None else lambda: self._let_go(hold))

    def _hold(self, tensor: torch.Tensor, kind: Any, counted: bool = True) -> _OpenCall | None:
        with self._lock, torch._C.DisableTorchFunction():
            self._passes()
            number = self._number(tensor)
            if number is None:
                return None
            hold = _OpenCall(number, self.current_run, kind, self.now, counted=counted)
            self._seen[number] += not counted
            if counted:
                self._saves[number] += 1
                if self._saves[number] == 1:
                    self._total += self._sizes[number]
                    self._see_peak()
            if not self.entering:  # else an input, which is known
                self._holds.append(hold)
            return hold

    def _following(self) -> Any:
        """Torch's wrapper around a result that is kept; the hold lasts as long as it lives."""
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

    def _let_go(self, hold: _OpenCall) -> None:
        with self._lock:
            self._passes()
            hold.end, hold.in_backward = self.now, in_backward()
            if hold.counted:
                self._saves[hold.storage] -= 1
                if self._saves[hold.storage] == 0:
                    self._total -= self._sizes[hold.storage]
                return
            self._seen[hold.storage] -= 1
            if self._seen[hold.storage] == 0:
                self._gone.pop(hold.storage, None)

    def _number(self, tensor: torch.Tensor) -> int | None:
        """The storage's number; ``None`` for weights, and for what has no storage."""
        storage = _storage_of(tensor)
        if storage is None or self._is_weight(tensor, storage):
            return None
        number = self._known.get(storage._cdata)
        if number is None:
            number = self._known[storage._cdata] = len(self._sizes)
            self._weak.append(StorageWeakRef(storage))
            self._sizes.append(int(storage.nbytes()))
            self._saves.append(0)
            if self._most_since is not None and not in_backward():
                self._live[number] = _OpenCall(number, -1, "local", self.now)
                self._holds.append(self._live[number])
        return number

    def _is_weight(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        return isinstance(base, nn.Parameter) or self._weights[storage._cdata] > 0


def _unpack(handle: Any) -> Any:
    return handle.held if isinstance(handle, _Handle) else handle


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """``None`` for a tensor without one, such as a sparse one, and where it is empty."""
    try:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        return storage if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None
