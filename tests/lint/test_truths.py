"""Which pairs of switches double, as counted by running them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.0", reason="the default variant changed in 5.0")

from tests.lint.truths import PAIRS, Recomputes, recomputes

# Two checkpoints around one layer double only where one of them is reentrant, or early stop is
# off: two switches that are both on are not yet a doubling.
DOUBLES = {
    "wrapper around model, reentrant",
    "wrapper, reentrant, around model, default",
    "wrapper, reentrant, around model, reentrant",
    "wrapper around model, default; early stop off",
}
OFF = {"none", "switched on, then off"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", PAIRS)
def test_how_often_a_pair_of_switches_recomputes_each_layer(pair: str) -> None:
    times = 2 if pair in DOUBLES else 0 if pair in OFF else 1
    assert recomputes(*PAIRS[pair]) == Recomputes(times, times)
