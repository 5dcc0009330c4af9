"""A rehearsal: the arrangements take turns from step to step, the same on every rank.

The first step shows the script's checkpoints. Then comes a step of each
arrangement in which saved tensors are looked at, and behind the warm-up the steps that are timed,
in turn and back again, so that a machine that gets slower slows no arrangement more than another.
Of the steps of a turn the first does not count: it finds the memory as the arrangement before has
left it, and one that holds more first has to get it from the system.

On a CPU a step takes what its thread had the processor for, which other work on the machine does
not lengthen, unless most steps waited for something: input, another rank, other threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import thread_time

import torch
from torch import nn

from recompute_scan.record.arrange import (
    Arranging,
    Chosen,
    can_be_selective,
    candidates,
    heavy_operators,
)
from recompute_scan.record.launch import number_in
from recompute_scan.record.measure import Heap, kernel_bytes, thread_usage
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.saved_tensors import SavedTensors
from recompute_scan.record.torch_versions import compiled_something
from recompute_scan.result.run_record import (
    ArmMeasured,
    ArmWanted,
    Candidate,
    ModuleRun,
    Rehearsal,
    Storage,
    Way,
    usual_ms,
    write_rehearsal,
)

# The share of the host's free memory that offloading may take, on all ranks together: pinned memory
# is lost to everything else, and one tensor can have several copies.
_HOST_SHARE = 0.25
# Steps of an arm in a row.
_IN_TURN = 3
_TIMED: tuple[Way, ...] = ("recompute", "selective", "parts")


def _waits() -> int:
    """How often this thread has waited for something."""
    used = thread_usage()
    return 0 if used is None else int(used.ru_nvcsw)


def warmup_steps(arms: int) -> int:
    """Steps before any is timed: the script's own, one of each arm, one to settle."""
    return arms + 2


def steps_needed(counted: int, arms: int) -> int:
    """Timed steps for that many of each arm that count, or one more."""
    return arms * _IN_TURN * -(-counted // (_IN_TURN - 1))


def arm_of(step: int, arms: int) -> int:
    """Which arm a timed step has, counted from 0: of three 0, 1, 2, 2, 1, 0, thrice each."""
    turn, place = divmod(step // _IN_TURN, arms)
    return arms - 1 - place if turn % 2 else place


def counts(step: int) -> bool:
    """Whether a timed step finds the memory as its own arrangement leaves it."""
    return step % _IN_TURN > 0


class Rehearsing:
    """Switches the arrangement at step boundaries."""

    def __init__(self, arranging: Arranging, recorder: Recorder, arms: Sequence[ArmWanted]) -> None:
        self._arranging = arranging
        self._recorder = recorder
        self._arms = arms
        self._chosen: tuple[Chosen, ...] | None = None
        self._remarks: tuple[str, ...] = ()
        self._looked = 0
        self._saved: dict[int, int] = {}
        self._allocated: dict[int, int] = {}
        self._storages: tuple[Storage, ...] = ()
        self._levels: tuple[int, ...] = ()
        self._fullest: tuple[int, ...] = ()
        self._runs: tuple[ModuleRun, ...] = ()
        self._arm = 0
        self._began = 0.0, 0
        self._busy: list[float] = []
        self._waits: list[int] = []
        self._heap = Heap()
        # Where it does not, the steps of that arm offload nothing, so that ranks stay alike.
        self._fits_host = True

    def settle(self) -> None:
        """A step has ended: let the GPU end it too, and read what it took."""
        if self._recorder.timed is not None:
            began, waits = self._began
            self._busy.append(1e3 * (thread_time() - began))
            if counts(self._recorder.timed):
                self._heap.end(self._arm, self._busy[-1])
            self._waits.append(_waits() - waits)
        self._end_look()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            if self._recorder.timed is not None:
                most = max(self._allocated.get(self._arm, 0), torch.cuda.max_memory_allocated())
                self._allocated[self._arm] = most
            torch.cuda.reset_peak_memory_stats()

    def next(self) -> None:
        arranging = self._arranging
        if self._chosen is None:
            chosen, self._remarks = candidates(list(arranging.covered.values()))
            # In compiled code each part would be a separate graph.
            whole = compiled_something()
            self._chosen = tuple(one for one in chosen if one.part_of < 0 or not whole)
            arranging.take_over(self._chosen)
            if not can_be_selective():
                self._arms = [arm for arm in self._arms if arm.way != "selective"]
            if not any(one.part_of >= 0 for one in self._chosen):
                self._arms = [arm for arm in self._arms if arm.way != "parts"]
        timed = self._recorder.timed
        if timed is not None:
            self._arm = arm_of(timed, len(self._arms))
        elif self._looked < len(self._arms):
            self._arm = self._looked
            self._begin_look()
        self._arrange(self._arms[self._arm])
        way = self._arms[self._arm].way
        wanted = timed is not None and counts(timed) and way in _TIMED
        arranging.time_recomputes(way if wanted else None)
        self._heap.begin()
        self._began = thread_time(), _waits()

    def write(self, folder: Path, rank: int, *, failed: bool) -> None:
        """Leave what was measured in the run's folder, or in which arrangement it failed."""
        chosen, device = self._chosen or (), self._recorder.device
        steps: dict[int, list[float]] = {}
        for step, ms in enumerate(self._step_times()):
            if counts(step):
                steps.setdefault(arm_of(step, len(self._arms)), []).append(ms)
        again, selective, parts = (self._arranging.recompute_times(way) for way in _TIMED)
        today = [place for place, arm in enumerate(self._arms) if arm.way == "today"]
        rehearsal = Rehearsal(
            rank=rank,
            device=device,
            candidates=tuple(
                Candidate(
                    one.name,
                    one.class_name,
                    one.checkpointed,
                    _usual(again if one.part_of < 0 else parts, place),
                    _usual(selective, place),
                    weight_bytes(one.module),
                    one.part_of,
                )
                for place, one in enumerate(chosen)
            ),
            runs=self._runs,
            storages=self._storages,
            arms=tuple(
                ArmMeasured(
                    arm.way,
                    tuple(steps.get(place, ())),
                    self._saved.get(place),
                    self._allocated.get(place),
                )
                for place, arm in enumerate(self._arms)
                if arm.way != "offload" or self._fits_host
            ),
            free_bytes=free_bytes(device, sum(self._allocated.get(one, 0) for one in today)),
            remarks=(*self._remarks, *(self._heap.remarks() if device == "cpu" else ())),
            operators=tuple(self._arranging.met),
            levels=self._levels,
            fullest=self._fullest,
            failed=self._arms[self._arm].way if failed else None,
        )
        write_rehearsal(folder, rehearsal)

    def _step_times(self) -> Sequence[float]:
        taken = self._recorder.kept.timed_ms
        alone = self._recorder.device == "cpu" and thread_usage() is not None
        # Only what gives the processor up by itself waits.
        return self._busy[: len(taken)] if alone and not median(self._waits or [1]) else taken

    def _arrange(self, arm: ArmWanted) -> None:
        chosen = self._chosen or ()
        parts = frozenset(place for place, one in enumerate(chosen) if one.part_of >= 0)
        whole = frozenset(range(len(chosen))) - parts

        def named(names: Sequence[str]) -> frozenset[int]:
            return frozenset(place for place, one in enumerate(chosen) if one.name in names)

        def where(condition: bool) -> frozenset[int]:
            return whole if condition else frozenset()

        if arm.operators:
            self._arranging.heavy = heavy_operators(arm.operators)
        way = arm.way
        self._arranging.active = way != "today"
        recomputed = parts if way == "parts" else where(way in _TIMED)
        self._arranging.recomputed = recomputed | named(arm.recomputed)
        self._arranging.selective = where(way == "selective") | named(arm.selective)
        offloads = way == "offload" and self._fits_host
        self._arranging.offloaded = where(offloads) | named(arm.offloaded)

    def _copied_bytes(self) -> int:
        """About how much the host has to hold where everything is offloaded, bytes."""
        saved = (
            storage.size
            for storage in self._storages
            if any(hold.kind == "saved" and hold.run >= 0 for hold in storage.holds)
        )
        whole = (one.module for one in self._chosen or () if one.part_of < 0)
        return sum(saved) + sum(map(weight_bytes, whole))

    def _begin_look(self) -> None:
        through = self._arms[self._arm].way == "recompute"
        tells = through and self._recorder.device == "cuda"
        saved = SavedTensors(through=through, most_since=most_since if tells else None)
        self._arranging.look(saved)
        saved.begin()

    def _end_look(self) -> None:
        saved = self._arranging.saved
        if saved is None:
            return
        saved.finish()
        self._saved[self._arm] = saved.peak
        if saved.through:
            self._storages = saved.storages()
            self._levels, self._fullest = tuple(saved.allocated), tuple(saved.fullest)
            ranks = max(1, number_in("LOCAL_WORLD_SIZE", 1))
            most = _HOST_SHARE * (free_bytes("cpu", 0) or 0) / ranks
            self._fits_host = self._copied_bytes() <= most
            self._runs = saved.module_runs(self._arranging.runs)
        self._arranging.look(None)
        self._looked += 1


def most_since() -> int:
    """Most that torch had allocated on the GPU since it was asked last, bytes."""
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def _usual(steps: Sequence[Mapping[int, float]], place: int) -> float:
    return usual_ms([step.get(place, 0.0) for step in steps])


def weight_bytes(module: nn.Module) -> int:
    """Bytes of its parameters; of sharded ones those here."""
    weights = (getattr(weight, "_local_tensor", weight) for weight in module.parameters())
    return sum(weight.numel() * weight.element_size() for weight in weights)


def free_bytes(device: str, today: int) -> int | None:
    """Bytes that the GPU has free next to today's arrangement, or the host after the last step.

    On a GPU torch keeps what the arrangement that took most has got from the driver, which any
    other can have: all that is free and all that torch has, less what today's takes.
    ``today`` is most that torch allocated in a step of it.
    """
    if device == "cuda":
        there = int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()
        return max(0, there - today)
    return kernel_bytes("meminfo", "MemAvailable")
