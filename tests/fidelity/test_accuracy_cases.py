"""No recorded case is said to change its gradients but those that do."""

import pytest

from tests.cases.case import Case
from tests.cases.groups import GROUPS
from tests.fidelity.accuracy_cases import look_at

pytestmark = pytest.mark.filterwarnings("ignore")
# Right ones of each kind, and all that are wrong: statistics, a counter, an input kept in half.
SAMPLE = {
    "n_in_r",
    "selective_matmuls",
    "conv_n",
    "no_grad_part_r",
    "half_kept",
    "fsdp2_wrapper_n",
}
CASES = [case for group in GROUPS.values() for case in group]
# Functions that keep their input in half precision or in 8 bits; there is no truth of the last two.
LOSSY = {case.name for case in CASES if case.name.startswith(("int8", "half_kept"))}
LOSSY |= {"own_n_own", "own_r_own", "r_own_own", "own_own_n", "buffered_round_int8"}
LOSSY |= {"pairs_own", "own_own_accumulated"}
# What has been rounded once is rounded again to the same.
MISSED = {"int8_twice", "half_kept_twice"}
WRONG = {"conv_n", "conv_r", "conv_r_in_n", "no_grad_part_n", "no_grad_part_r"} | LOSSY


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in SAMPLE else pytest.mark.slow)
        for case in CASES
    ],
)
def test_what_is_said_is_what_the_gradients_say(case: Case) -> None:
    found = look_at(case)
    wrong = found.wrong or (case.name in LOSSY and found.source == "none")
    assert bool(found.said) == (wrong and case.name not in MISSED), found
    assert wrong == (case.name in WRONG), found
