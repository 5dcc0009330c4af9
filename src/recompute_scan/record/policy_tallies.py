"""What the watch of policies counts, and how it reads an answer, a result and a stored entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct, field
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from recompute_scan.annotations import RegionAnnotation
from recompute_scan.record.policy_entries import EntriesOfPolicy


class OperatorTally(Struct):
    met: int = 0
    decided: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    kept_bytes: int = 0
    result_bytes: int = 0
    held_bytes: int = 0
    served: int = 0
    recomputed: int = 0


class PolicyTally(Struct, eq=False):
    """One policy at one checkpoint."""

    policy: EntriesOfPolicy
    annotation: RegionAnnotation | None
    operators: dict[Any, OperatorTally] = field(default_factory=dict)
    regions: int = 0
    recomputes: int = 0
    raised: int = 0

    def of(self, operator: Any) -> OperatorTally:
        return self.operators.setdefault(operator, OperatorTally())


class WatchedCall(Struct, eq=False, weakref=True):
    """One call of a checkpoint: its forward's mode, and its recompute's."""

    policy: EntriesOfPolicy
    group: PolicyTally | None = None
    again: bool = False
    decision: str | None = None
    asked: bool = False
    born: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    dropped: list[tuple[OperatorTally, int, StorageWeakRef]] = field(default_factory=list)

    def forget(self) -> None:
        """The next operator is called."""
        self.decision = None


def decision_of(answer: Any) -> str:
    if isinstance(answer, bool):  # as torch reads it
        return "MUST_SAVE" if answer else "PREFER_RECOMPUTE"
    name = getattr(answer, "name", None)
    return name if isinstance(name, str) else type(answer).__name__


def keeps(decision: str) -> bool:
    return decision.endswith(("_SAVE", "_CPU_OFFLOAD"))


def storages_of(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors, each once; of a wrapper the tensors inside it."""
    seen: set[int] = set()
    queue = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    while queue:
        tensor = queue.pop()
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, _ = flatten()
            queue.extend(getattr(tensor, name) for name in names)
            continue
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def will_serve(mode: Any, func: Any, rest: Any) -> bool | None:
    """Whether a kept result is there for this call, by the storage of the mode."""
    key_of = getattr(torch_checkpoint, "_sac_storage_key", None)
    key = key_of(func, rest[0] if rest else ()) if key_of is not None else func
    entries = mode.storage.get(key)
    if entries is None:
        return None
    if isinstance(entries, dict):
        counter = getattr(mode, "func_counter", None)
        entry = entries.get(counter[key]) if counter is not None else None
        recompute = getattr(torch_checkpoint, "_RECOMPUTE", None)
        return None if entry is None else entry is not recompute
    return bool(entries)  # up to 2.12 a list of what was kept, in order
