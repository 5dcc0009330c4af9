"""Memory snapshots to what the result says of them: who held the peak, by line and by kind.

The kinds rest on torch's own frames alone: files of ``torch/`` and C++ names of its engine. What
they do not tell (weights or their copies, gradients or workspace) is left together.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from recompute_scan.analysis.without_trace import bare_result
from recompute_scan.errors import InputError
from recompute_scan.result import Result
from recompute_scan.result.document import HeldBy, HeldKind, MemorySnapshot
from recompute_scan.trace.limits import Limits
from recompute_scan.trace.snapshots.history import (
    DeviceHistory,
    Stack,
    StackFrame,
    read_snapshot,
)
from recompute_scan.units import size

_TORCH = re.compile(r"(?:^|.*/)torch/.{0,400}\.py$")
_PYTHON = re.compile(r".*\.py$|<.*>$|.*ipykernel.*")
_MOST_LINES = 30


def snapshots_at(paths: list[Path], limits: Limits) -> tuple[MemorySnapshot, ...]:
    """What the snapshots show, one entry a device.

    Raises:
        InputError: See :func:`recompute_scan.trace.snapshots.history.read_snapshot`.
    """
    return tuple(
        _shown(path.name, device)
        for path in paths
        for device in read_snapshot(path, limits)
        if device.peak or device.reserved
    )


def snapshots_among(paths: list[Path], limits: Limits) -> tuple[MemorySnapshot, ...]:
    """What those of the files that are snapshots show; a pickle may be anything else."""
    found: list[MemorySnapshot] = []
    for path in paths:
        with suppress(InputError):
            found.extend(snapshots_at([path], limits))
    return tuple(found)


def result_of_snapshots(snapshots: tuple[MemorySnapshot, ...]) -> Result:
    """The result of snapshots alone: memory, and no word on recomputes."""
    why = "A memory snapshot has allocations and no operators."
    said = f"No verdict on checkpointing: {why}"
    if snapshots:
        most = max(snapshots, key=lambda one: one.peak_bytes)
        said = (
            f"GPU {most.device}: {size(most.peak_bytes)} in use at the peak ({most.file}). What "
            "runs again is not in a snapshot."
        )
    bare = bare_result(why, said)
    return replace(bare, snapshots=snapshots)


def _shown(file: str, device: DeviceHistory) -> MemorySnapshot:
    sizes: Counter[tuple[HeldKind, str]] = Counter()
    blocks: Counter[tuple[HeldKind, str]] = Counter()
    kinds: Counter[str] = Counter()
    known: dict[int, tuple[HeldKind, str]] = {}
    for block in device.blocks:
        who = known.get(id(block.stack))
        if who is None:
            who = known[id(block.stack)] = kind_of_stack(block.stack), _site(block.stack)
        sizes[who] += block.size
        blocks[who] += 1
        kinds[who[0]] += block.size
    return MemorySnapshot(
        file=file,
        device=device.device,
        peak_bytes=device.peak,
        end_bytes=device.in_use,
        reserved_bytes=device.reserved,
        events=device.events,
        out_of_memory=device.out_of_memory,
        by_kind=dict(kinds.most_common()),
        held=tuple(
            HeldBy(kind, site, size, blocks[kind, site])
            for (kind, site), size in sizes.most_common(_MOST_LINES)
        ),
    )


def kind_of_stack(stack: Stack) -> HeldKind:
    """What memory with this stack was asked for, as far as torch's own frames tell."""
    checkpointed = module = python = False
    for frame in stack:
        python |= bool(_PYTHON.match(frame.file))
        if frame.file.endswith("torch/utils/checkpoint.py"):
            if "_CachingTorchDispatchMode" in frame.name or frame.name == "__torch_dispatch__":
                return "kept"
            if frame.name in ("unpack_hook", "recompute_fn", "backward"):
                return "recompute"
            checkpointed = True
        elif "torch/optim/" in frame.file and frame.name != "zero_grad":
            return "optimizer"
        elif frame.name.startswith("torch::autograd::Engine::evaluate_function"):
            return "backward"
        elif frame.file.endswith("torch/nn/modules/module.py"):
            module |= frame.name in ("_call_impl", "_wrapped_call_impl")
    if checkpointed:
        return "checkpoint"
    if module:
        return "forward"
    return "other" if python else "unknown"


def _site(stack: Stack) -> str:
    """The innermost line of Python outside torch; empty where there is none."""
    inner = next((f for f in stack if _PYTHON.match(f.file) and not _TORCH.match(f.file)), None)
    return _place(inner) if inner is not None else ""


def _place(frame: StackFrame) -> str:
    return f"{frame.file}:{frame.line}"
