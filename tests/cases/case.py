"""A case, and how to record it: plain ``torch.profiler`` on one side, the oracle on the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as given
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from .export import export
from .model import Oracle
from .truth import LayerTruth, Runs, Truth, Verdict

STEPS = 3
WARMUP = 2

TrainingStep = Callable[[], None]
Build = Callable[[Oracle, torch.device], TrainingStep]


@dataclass(frozen=True)
class Case:
    """One training loop whose trace is worth having.

    Attributes:
        name: Stem of the trace's file name.
        about: What it shows, in one sentence.
        verdict: What the design's words call it; ``None`` where they leave it open.
        build: Makes the model; returns the function that trains one step.
        micro_batches: Forward passes with a backward of their own, per step.
        backwards_per_forward: Backward passes that consume one forward pass.
        by_design: Entries per forward and backward that a function makes for reasons of its own,
            in every part: no switch was left on.
        scheduled: Recorded with a schedule, so that ``ProfilerStep`` ranges mark the steps.
    """

    name: str
    about: str
    verdict: Verdict | None
    build: Build
    micro_batches: int = 1
    backwards_per_forward: int = 1
    by_design: int | tuple[int, int] = 0
    scheduled: bool = True

    @classmethod
    def of(cls, verdict: Verdict, name: str, about: str, build: Build, **more: Any) -> Case:
        """The verdict first, for the lists of cases below it."""
        return cls(name, about, verdict, build, **more)


none, full, partial, doubled = (
    given(Case.of, verdict) for verdict in ("none", "full", "partial", "doubled")
)


def record(
    case: Case,
    trace: Path,
    device: str = "cpu",
    *,
    steps: int = STEPS,
    shapes: bool = True,
) -> Truth:
    """The truth of the case; its trace is written to ``trace`` (gzipped if it ends in ``.gz``).

    Raises:
        AssertionError: The recorded steps were not all alike.
    """
    torch.manual_seed(0)
    oracle = Oracle()
    step = case.build(oracle, torch.device(device))
    counted: list[tuple[Counter[tuple[str, str, str]], Counter[str]]] = []

    def counted_step() -> None:
        oracle.reset()
        step()
        counted.append((oracle.entries.copy(), oracle.kept.copy()))

    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    if case.scheduled:
        plan = schedule(wait=WARMUP - 1, warmup=1, active=steps, repeat=1)
        with profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=lambda recorded: export(recorded, trace),
            record_shapes=shapes,
        ) as profiler:
            for _ in range(WARMUP + steps):
                counted_step()
                profiler.step()
    else:
        for _ in range(WARMUP):
            step()
        with profile(activities=activities, record_shapes=shapes) as profiler:
            for _ in range(steps):
                counted_step()
        export(profiler, trace)

    entries, kept = counted[-1]
    assert all(other == (entries, kept) for other in counted[-steps:]), "the steps differ"
    return Truth(
        name=case.name,
        verdict=case.verdict,
        steps=steps,
        micro_batches=case.micro_batches,
        backwards_per_forward=case.backwards_per_forward,
        layers=tuple(
            LayerTruth(name, _runs(entries, name, "attention"), _runs(entries, name, "mlp"))
            for name in dict.fromkeys(layer for layer, _, _ in entries)
        ),
        kept=dict(kept),
        by_design=case.by_design,
    )


def _runs(entries: Counter[tuple[str, str, str]], layer: str, part: str) -> Runs:
    return Runs(
        forward=entries[layer, part, "forward"],
        recomputes=entries[layer, part, "recomputes"],
        evaluation=entries[layer, part, "evaluation"],
    )
