"""Comparing a step says what the gradients say, and changes none of them."""

from __future__ import annotations

import pytest
import torch

from tests.effort import some
from tests.fidelity.cases import CASES, Case
from tests.fidelity.compare import compare, gradients, wrong
from tests.fidelity.models import MODELS
from tests.fidelity.truth import build, measure, step

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = [*CASES, *MODELS]


@pytest.mark.parametrize("case", some(ALL, 2), ids=lambda case: case.name)
def test_what_is_said_is_what_the_gradients_say(case: Case) -> None:
    truth = measure(case)
    assert truth.wrong == case.wrong, "its author was mistaken"
    found, model, untrained = compare(case)
    said = wrong(found, untrained)
    assert bool(said) == truth.wrong, (truth, said)
    assert any(case.operator in one and case.module in one for one in said) or not case.wrong, said

    alone, x = build(case, on=True)
    step(case, alone, x)
    compared, without = gradients(model), gradients(alone)
    for name, gradient in without.items():
        other = compared[name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert torch.equal(gradient, other), name
    assert all("forward" not in vars(part) for part in model.modules())


def test_there_are_enough_of_either_kind() -> None:
    assert sum(case.wrong for case in ALL) >= 20
    assert sum(not case.wrong for case in ALL) >= 20
