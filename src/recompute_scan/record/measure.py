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
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from recompute_scan.fidelity.tensors import MOST, fingerprint, plain_parts, sums_of, unseen
from recompute_scan.files import content
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.launch import rank_facts
from recompute_scan.record.modules import plain_name, real_class_name, root_modules
from recompute_scan.result.fidelity import Sampled, write_sampled
from recompute_scan.result.run_record import Measurements

_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # proc(5): "Writing 5 resets the peak resident set size"


class GradientWatch:
    """Looks once, at the end of the first step, while its gradients are there."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._seen: tuple[Sampled, ...] | None = None

    def look(self) -> None:
        """A step has ended; only the first one is looked at."""
        if self._seen is None:
            self._seen = ()
            with self._guard.part("Gradients could not be kept"):
                self._seen = unseen(lambda: tuple(_sampled()))

    def write(self, folder: Path, rank: int) -> None:
        """Leave what was seen in the run's folder."""
        if self._seen:
            write_sampled(folder, rank, self._seen)


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
        for name, buffer in _buffers(root):
            yield _one(plain_name(name), buffer, is_buffer=True)


def _buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in root.named_buffers():
        if not buffer.is_complex():
            yield name, buffer


def _one(name: str, tensor: torch.Tensor | None, *, is_buffer: bool = False) -> Sampled:
    seen = fingerprint(tensor) if tensor is not None else None
    parts = plain_parts(tensor) if tensor is not None else None
    if seen is None or not parts:
        return Sampled(name, is_buffer)
    values = tuple(sums_of(parts[0], fewest=MOST).values.tolist())
    return Sampled(name, is_buffer, seen.bits, values, seen.rounding())


class Peaks(Struct, frozen=True):
    """Bytes: what torch allocated and reserved on the GPU, and what the process had resident."""

    allocated: int | None = None
    reserved: int | None = None
    rss: int | None = None


class PeakMemory:
    """Peaks from :meth:`begin` to :meth:`end`. Resets torch's own peak counters."""

    def __init__(self) -> None:
        self._cuda = False
        self.peaks = Peaks()

    def begin(self, device: Literal["cpu", "cuda"]) -> None:
        """Forget the peaks so far."""
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):  # no Linux, or not allowed: the peak of the whole run then
            _CLEAR.write_text(_FORGET_PEAK)

    def end(self) -> None:
        """Read the peaks."""
        allocated = reserved = None
        if self._cuda:
            allocated = torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
        self.peaks = Peaks(allocated, reserved, kernel_bytes("self/status", "VmHWM"))


def kernel_bytes(file: str, field: str) -> int | None:
    """A field in kB of a file of ``/proc``, in bytes; ``None`` where there is no such file."""
    with suppress(OSError):
        found = re.search(rf"\n{field}:\s+(\d+) kB".encode(), b"\n" + content(Path("/proc", file)))
        return int(found[1]) * 1024 if found else None
    return None


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
            # A reentrant recompute calls it too, inside the backward pass that it serves.
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


# Any number that no script is likely to choose for itself.
_SEED = 1_919_247_219


class Gauges:
    """Losses, memory, and the same seeds at the start of every run.

    Attributes:
        memory: Its ``begin`` and ``end`` are called around the timed steps.
        gradients: Its ``look`` is called when the first step has ended.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self.memory = PeakMemory()
        self._losses = LossWatch(guard)
        self.gradients = GradientWatch(guard or Guard())
        self._seed = _SEED + rank_facts().rank

    def install(self) -> None:
        """Seed Python, NumPy and torch, and begin to watch; before the script is imported."""
        random.seed(self._seed)
        numpy = sys.modules.get("numpy")  # torch brings it, where it is there
        if numpy is not None:
            numpy.random.seed(self._seed)
        torch.manual_seed(self._seed)
        self._losses.install()

    def remove(self) -> None:
        """Stop watching."""
        self._losses.remove()

    def measurements(
        self, bypassed_calls: int, bypassed_functions: tuple[str, ...] = ()
    ) -> Measurements:
        """The measurements; waits for the GPU."""
        peaks = self.memory.peaks
        return Measurements(
            losses=self._losses.values(),
            seeded=torch.initial_seed() != self._seed,
            bypassed_calls=bypassed_calls,
            peak_allocated_bytes=peaks.allocated,
            peak_reserved_bytes=peaks.reserved,
            peak_rss_bytes=peaks.rss,
            bypassed_functions=bypassed_functions,
        )


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
        """A step begins."""
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
