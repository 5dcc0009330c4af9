"""Comparing a step says what the gradients say, and changes none of them."""

from __future__ import annotations

import pytest
import torch

from tests.effort import some
from tests.fidelity.cases import CASES, Case
from tests.fidelity.compare import compare, gradients, wrong
from tests.fidelity.hard_cases import HARD
from tests.fidelity.models import MODELS
from tests.fidelity.odd_cases import ODD, UNSEEN
from tests.fidelity.truth import build, measure, step

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = [*CASES, *MODELS]
_UNSEEN = pytest.mark.xfail(strict=True, raises=AssertionError)
ALL = [
    *(pytest.param(case, id=case.name) for case in (*some(PLAIN, 2), *HARD, *ODD)),
    *(pytest.param(case, id=case.name, marks=_UNSEEN) for case in UNSEEN),
]


@pytest.mark.parametrize("case", ALL)
def test_what_is_said_is_what_the_gradients_say(case: Case) -> None:
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
        if gradient is not None and other is not None:
            assert torch.equal(gradient, other), name
    assert all("forward" not in vars(part) for part in model.modules())

    said = wrong(found, untrained)
    assert bool(said) == truth.wrong, (truth, said)
    assert any(case.operator in one and case.module in one for one in said) or not case.wrong, said


def test_there_are_enough_of_either_kind() -> None:
    assert sum(case.wrong for case in PLAIN) >= 20
    assert sum(not case.wrong for case in PLAIN) >= 20
