"""Losses, gradients and memory, measured together with step times.

``Tensor.backward`` calls ``torch.autograd.backward`` by that name, so one function is watched.
Values are copied on their device and read when the run is over, so that no step waits for them.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace

from recompute_scan.fidelity.tensors import MOST, fingerprint, plain_parts, sums_of, unseen
from recompute_scan.files import content
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.launch import rank_facts
from recompute_scan.record.modules import plain_name, real_class_name, root_modules
from recompute_scan.record.steps import in_backward
from recompute_scan.result.fidelity import Sampled, write_sampled
from recompute_scan.result.run_record import Measurements

_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # proc(5): "Writing 5 resets the peak resident set size"


def _sampled() -> Iterator[Sampled]:
    """The samples; of several with one name, as in models of one class, each has its number."""
    met: Counter[tuple[str, bool]] = Counter()
    for one in _named():
        met[one.name, one.is_buffer] += 1
        number = met[one.name, one.is_buffer]
        yield one if number == 1 else replace(one, name=f"{one.name} ({number})")


def _named() -> Iterator[Sampled]:
    roots = root_modules()
    uses = Counter(
        plain_name(name) for root in roots for name, _ in root.named_parameters(recurse=True)
    )
    for root in roots:
        kind = real_class_name(root)
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                known = plain_name(name)
                yield _one(f"{kind}.{known}" if uses[known] > 1 else known, parameter.grad)
        for name, buffer in root.named_buffers():
            if not buffer.is_complex():
                yield _one(plain_name(name), buffer, is_buffer=True)


def _one(name: str, tensor: torch.Tensor | None, *, is_buffer: bool = False) -> Sampled:
    seen = fingerprint(tensor) if tensor is not None else None
    parts = plain_parts(tensor) if tensor is not None else None
    if seen is None or not parts:
        return Sampled(name, is_buffer)
    values = tuple(sums_of(parts[0], fewest=MOST).values.tolist())
    return Sampled(name, is_buffer, seen.bits, values, seen.rounding())


def kernel_bytes(file: str, field: str) -> int | None:
    """A field in kB of a file of ``/proc``, in bytes; ``None`` where there is no such file."""
    with suppress(OSError):
        found = re.search(rf"\n{field}:\s+(\d+) kB".encode(), b"\n" + content(Path("/proc", file)))
        return int(found[1]) * 1024 if found else None
    return None


# Any number that no script is likely to choose for itself.
_SEED = 1_919_247_219
# Far more than any run that is measured has; a bound for loops that call backward all the time.
_MOST_LOSSES = 100_000


class Gauges:
    """Losses, the first step's gradients and peak memory, and the same seeds in every run."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._patches = Patches()
        self._seed = _SEED + rank_facts().rank
        self._losses: list[torch.Tensor] = []
        self._gradients: tuple[Sampled, ...] | None = None
        self._cuda = False
        self._peaks: tuple[int | None, ...] = (None, None, None)

    def install(self) -> None:
        """Seed Python, NumPy and torch, and begin to watch; before the script is imported."""
        random.seed(self._seed)
        numpy = sys.modules.get("numpy")  # torch brings it, where it is there
        if numpy is not None:
            numpy.random.seed(self._seed)
        torch.manual_seed(self._seed)
        self._patches.wrap(self._guard, torch.autograd, "backward", self._backward)

    def remove(self) -> None:
        self._patches.undo()

    def begin_timing(self, device: Literal["cpu", "cuda"]) -> None:
        """Forget the peaks so far, torch's own too."""
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):  # no Linux, or not allowed: the peak of the whole run then
            _CLEAR.write_text(_FORGET_PEAK)

    def end_timing(self) -> None:
        allocated = reserved = None
        if self._cuda:
            allocated = torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
        self._peaks = allocated, reserved, kernel_bytes("self/status", "VmHWM")

    def look_at_gradients(self) -> None:
        """A step has ended; only the first one's gradients are kept."""
        if self._gradients is None:
            self._gradients = ()
            with self._guard.part("Gradients could not be kept"):
                self._gradients = unseen(lambda: tuple(_sampled()))

    def write_gradients(self, folder: Path, rank: int) -> None:
        """Leave them in the run's folder."""
        if self._gradients:
            write_sampled(folder, rank, self._gradients)

    def measurements(self, calls: int, functions: tuple[str, ...]) -> Measurements:
        """The measurements, next to what was bypassed; waits for the GPU."""
        allocated, reserved, resident = self._peaks
        return Measurements(
            # All bits, infinities and NaN.
            losses=tuple(float(copy.item()).hex() for copy in self._losses),
            seeded=torch.initial_seed() != self._seed,
            bypassed_calls=calls,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_rss_bytes=resident,
            bypassed_functions=functions,
        )

    def _backward(self, call: Call, tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A reentrant recompute calls it too, inside the backward pass that it serves.
        if not in_backward():
            self._keep(tensors)
        return call(tensors, *args, **kwargs)

    def _keep(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ()):
            # Of a subclass (distributed, fake) a copy may do anything, and a copy made while a
            # CUDA graph is captured holds nothing yet.
            if type(tensor) is not torch.Tensor or tensor.numel() != 1 or tensor.is_meta:
                continue
            capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
            if not capturing and len(self._losses) < _MOST_LOSSES:
                self._losses.append(tensor.detach().clone())


try:
    import resource
except ImportError:  # no Unix
    resource = None  # type: ignore[assignment]

# Only Linux counts this for a thread.
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
# A page that is got anew is a minor fault, and takes the system's time. From this share of a step
# on it is worth a word.
_WORTH_TELLING = 0.03
_FEW_PAGES = 100
# Of glibc: what is free at the heap's end stays with the process (mallopt(3)).
_KEEPING = "MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=33554432"


def thread_usage() -> Any:
    """The system's account of this thread (getrusage(2)); ``None`` where it keeps none."""
    return None if _THREAD is None else resource.getrusage(_THREAD)


class Heap:
    """Memory that this thread's steps had to get from the system, by arrangement."""

    def __init__(self) -> None:
        self._began = 0, 0.0
        self._steps: dict[int, list[tuple[int, float, float]]] = {}

    def begin(self) -> None:
        self._began = _usage()

    def end(self, arm: int, ms: float) -> None:
        """It has ended, and had the processor for so long."""
        pages, system_ms = (now - then for now, then in zip(_usage(), self._began, strict=True))
        self._steps.setdefault(arm, []).append((int(pages), system_ms, ms))

    def remarks(self) -> tuple[str, ...]:
        """A sentence where it is a large part of some arrangement's steps."""
        worst, most = 0.0, 0.0
        for steps in self._steps.values():
            pages, system_ms, ms = (sum(each) for each in zip(*steps, strict=True))
            if pages > _FEW_PAGES * len(steps) and ms and system_ms / ms > worst:
                worst, most = system_ms / ms, pages / len(steps)
        if worst < _WORTH_TELLING:
            return ()
        return (
            f"Up to {worst:.0%} of a step here is system time, much of it because glibc returns "
            f"memory to the system and requests it again ({most:,.0f} pages per step). This "
            f"varies from run to run, and GPU memory is not affected. With {_KEEPING} in the "
            "environment, glibc keeps it.",
        )


def _usage() -> tuple[int, float]:
    """Pages that this thread got anew, and the system's time for it, ms."""
    used = thread_usage()
    return (0, 0.0) if used is None else (used.ru_minflt, 1e3 * used.ru_stime)
