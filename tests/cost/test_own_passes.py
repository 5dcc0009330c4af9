"""What goes with a function's backward pass: the nesting of ranges and the repaired step tell."""

from collections import Counter

import pytest

from recompute_scan.cost.removal import Context
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import load
from recompute_scan.trace.calls import Calls
from tests.cases.recorded import recorded

BLOCKS, STEPS = 4, 3
ENGINE = "autograd::engine::evaluate_function: "
ADDS = ENGINE + "torch::autograd::AccumulateGrad"


def facts_of(name: str) -> RecomputeFacts:
    return study(load(recorded(name)[0]))


def gone(facts: RecomputeFacts) -> list[int]:
    around = Context(facts, int(facts.calls.start.min()), int(facts.calls.end.max()))
    rows: list[int] = around.own_passes.rows.tolist()
    return rows


def nodes_in(calls: Calls, node: int) -> list[int]:
    """Engine ranges directly under a node, and not under another."""
    return [row for row in range(node, node + int(calls.size[node]) + 1)
            if calls.parent[row] == node and calls.called(row).startswith(ENGINE)]  # fmt: skip


def test_the_first_of_two_passes_goes_but_for_what_the_second_leaves_out() -> None:
    facts = facts_of("two_gradients_in_r")
    calls, found = facts.calls, gone(facts)
    nodes = [row for row in range(len(calls)) if calls.called(row) == "TwoGradsBackward"]
    assert len(nodes) == BLOCKS * STEPS
    left = Counter[str]()
    for node in nodes:
        passes = nodes_in(calls, node)
        # The second begins where the first node comes back.
        again = [row for row in passes if calls.sequence[row] == calls.sequence[passes[0]]]
        assert len(again) == 2
        first, second = ([row for row in passes if (row < again[1]) == early] for early in (1, 0))
        names = [Counter(calls.called(row) for row in one) for one in (first, second)]
        assert not names[0] - names[1]
        for row in first:
            if row not in found:
                inside = range(row + 1, row + 1 + int(calls.size[row]))
                kept = [one for one in inside if calls.parent[one] == row and one not in found]
                left.update(calls.called(one) for one in kept)
        assert not {*second} & {*found}
    # The gradient of the residual: nobody asks for that of the input the second time.
    assert left == {"aten::add_": BLOCKS * STEPS}


@pytest.mark.parametrize("name", ["in_two_in_r", "hooked_block_in_r"])
def test_the_copy_of_a_gradient_that_a_function_holds(name: str) -> None:
    facts = facts_of(name)
    calls, found = facts.calls, gone(facts)
    function = ENGINE + "HeldBlockBackward" if name.startswith("in_two") else ENGINE + "HookedBlock"
    engines = [row for row in range(len(calls)) if calls.called(row).startswith(ENGINE)]
    behind = [
        row
        for row in engines
        if calls.called(row) == ADDS
        and any(
            calls.called(one).startswith(function) and one + calls.size[one] + 1 == row
            for one in engines
        )
    ]
    copies = [row for add in behind for row in range(add, add + int(calls.size[add]) + 1)
              if calls.called(row) == "aten::copy_"]  # fmt: skip
    assert len(copies) == BLOCKS * STEPS
    assert {*copies} <= {*found}
    assert all(any(add < row <= add + calls.size[add] for add in behind) for row in found)


@pytest.mark.parametrize("name", ["r_in_n", "n_in_r", "int8_twice", "by_hand_in_r", "vjp_in_r"])
def test_nothing_goes_where_functions_go_through_their_block_once(name: str) -> None:
    assert gone(facts_of(name)) == []


def test_what_runs_again_in_a_pass_goes_or_stays_for_itself() -> None:
    facts = facts_of("two_gradients_twice")
    calls, found = facts.calls, gone(facts)
    # The outer function's node evaluates the inner one's twice, which runs the block again.
    twice = [row for row in range(len(calls)) if calls.called(row) == ENGINE + "TwoGradsBackward"]
    nested = [
        row for row in twice if any(row in range(one + 1, one + calls.size[one]) for one in twice)
    ]
    assert len(nested) == 2 * BLOCKS * STEPS
    assert not {*found} & {*nested}
    recomputed = facts.alignment.again
    assert not any(row <= one <= row + calls.size[row] for row in found for one in recomputed)
