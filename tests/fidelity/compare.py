"""A case's step, compared in this process as ``recompute-scan run`` compares one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.result.fidelity import Fidelity
from tests.fidelity.cases import Case
from tests.fidelity.truth import build, step


def compare(case: Case) -> tuple[Fidelity, nn.Module, tuple[str, ...]]:
    """What comparing the case's step shows, its model, and modules seen without a gradient."""
    model, x = build(case, on=True)
    probe = Probe(Path.cwd())
    probe.install()
    try:
        probe.begin()
        probe.comparison.compare()
        step(case, model, x)
        probe.look_at_gradients()
        found = probe.comparison.compared()
    finally:
        probe.remove()
    assert probe.warnings == []
    return found, model, probe.untrained.names


def wrong(found: Fidelity, untrained: tuple[str, ...] = ()) -> list[str]:
    """What is said to be wrong, one text each."""
    said = [f"RS104 {name}" for name in (*untrained, *found.untrained)]
    for region in found.regions:
        said += [
            f"{one.kind} {one.operation.name} {one.operation.module}"
            for one in region.differences
            if one.kind != "atomics"
        ]
        said += [f"buffer {state.name}" for state in region.states if state.is_buffer]
        said += [
            f"lost {one.name} {one.operation.name} {one.operation.module}" for one in region.lost
        ]
    return said


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of a model's parameters, by name."""
    return {name: one.grad for name, one in model.named_parameters()}
