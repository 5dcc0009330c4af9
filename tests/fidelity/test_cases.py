"""Comparing a step says what the gradients say, and changes none of them."""

import pytest

from tests.effort import some
from tests.fidelity.cases import CASES, Case
from tests.fidelity.compare import check
from tests.fidelity.hard_cases import HARD
from tests.fidelity.models import MODELS
from tests.fidelity.odd_cases import ODD, UNSEEN

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = [*CASES, *MODELS]
_UNSEEN = pytest.mark.xfail(strict=True, raises=AssertionError)
ALL = [
    *(pytest.param(case, id=case.name) for case in (*some(PLAIN, 2), *HARD, *ODD)),
    *(pytest.param(case, id=case.name, marks=_UNSEEN) for case in UNSEEN),
]


@pytest.mark.parametrize("case", ALL)
def test_what_is_said_is_what_the_gradients_say(case: Case) -> None:
    found = check(case)
    if case in MODELS:  # none of them keeps anything outside of its buffers
        assert all(state.is_buffer for region in found.regions for state in region.states)


def test_there_are_enough_of_either_kind() -> None:
    assert sum(case.wrong for case in PLAIN) >= 20
    assert sum(not case.wrong for case in PLAIN) >= 20
