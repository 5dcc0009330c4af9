"""A case's step, compared in this process as ``recompute-scan run`` compares one."""

from pathlib import Path

import torch
from torch import nn

from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.result.fidelity import Fidelity
from tests.fidelity.cases import Case
from tests.fidelity.truth import build, measure, step


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


def check(case: Case) -> Fidelity:
    """Comparing the case's step says what its gradients say, and changes none of them."""
    truth = measure(case)
    assert truth.wrong == case.wrong, "its author was mistaken"
    alone, x = build(case, on=True)
    step(case, alone, x)
    drawn = torch.get_rng_state()

    found, model, untrained = compare(case)
    assert torch.equal(drawn, torch.get_rng_state())
    compared = gradients(model)
    for name, gradient in gradients(alone).items():
        other = compared[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or (other is not None and torch.equal(gradient, other)), name
    assert all("forward" not in vars(part) for part in model.modules())
    assert not torch._C._len_torch_dispatch_stack()

    said = wrong(found, untrained)
    assert bool(said) == truth.wrong, (truth, said)
    assert any(case.operator in one and case.module in one for one in said) or not case.wrong, said
    return found
