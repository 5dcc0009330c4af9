"""Recomputes by the order of attention's kernels, held against layouts of known checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute_scan.recompute.kernel_order import Pass, passes_by_order, passes_by_thread
from tests.present import present
from tests.recompute.attention_traces import Group, backward_pass, each_layer, multiplicity

SPELLED = {"forward": "F", "recompute": "R", "backward": "B"}


def by_thread(layers: int, groups: list[Group], times: int = 1) -> list[str]:
    one = ["F"] * layers + [SPELLED[kind] for kind in backward_pass(layers, groups)]
    return one * times


def by_order(layers: int, groups: list[Group], times: int = 1) -> list[str]:
    return ["F" if event == "R" else event for event in by_thread(layers, groups, times)]


@pytest.mark.parametrize(
    ("layers", "groups", "highest", "whole"),
    [
        (4, [(0, 1), (2, 3)], 1, True),  # checkpoint_sequential, all segments
        (4, [(0, 1)], 1, False),  # the last segment is not checkpointed
        (4, [(0, 3)], 1, True),  # the whole model
        (4, [(0, 3), *each_layer(4)], 2, True),  # the whole model, and each layer
        (4, [(0, 1), (2, 3), *each_layer(4)], 2, True),
        (4, [(2, 2)], 1, False),
        (4, [*each_layer(4), (1, 1)], 2, True),
        (4, [(2, 2), (2, 2), (3, 3), (3, 3)], 2, False),
        (32, each_layer(16, 2), 2, False),
    ],
)
def test_other_groups_by_thread(
    layers: int, groups: list[Group], highest: int, whole: bool
) -> None:
    (found,) = present(passes_by_thread(by_thread(layers, groups)))
    truth = multiplicity(layers, groups)
    assert max(truth) == highest == found.highest
    assert found.again == sum(truth)
    if highest < 2:
        assert found.whole == whole


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[int, list[Group]]:
    """Layers, and groups of them that nest or are disjoint."""
    layers = draw(st.integers(2, 8))
    groups: list[Group] = []
    for _ in range(draw(st.integers(0, 5))):
        first = draw(st.integers(0, layers - 1))
        one = (first, draw(st.integers(first, layers - 1)))
        if not any(crosses(one, other) for other in groups):
            groups.append(one)
    return layers, groups


def crosses(one: Group, other: Group) -> bool:
    (a, b), (c, d) = sorted((one, other))
    return a < c <= b < d


@given(checkpoints(), st.integers(1, 3))
def test_by_thread_never_more_than_the_truth(plan: tuple[int, list[Group]], times: int) -> None:
    layers, groups = plan
    truth = multiplicity(layers, groups)
    found = present(passes_by_thread(by_thread(layers, groups, times)))
    assert len(found) == times
    for one in found:
        assert (one.layers, one.again) == (layers, sum(truth))
        assert one.highest <= max(truth)
        assert (one.highest == 0) == (max(truth) == 0)


@given(checkpoints(), st.integers(1, 3))
def test_by_order_never_more_than_the_truth(plan: tuple[int, list[Group]], times: int) -> None:
    layers, groups = plan
    found = passes_by_order(by_order(layers, groups, times))
    truth = multiplicity(layers, groups)
    if found is not None:
        assert sum(one.again for one in found) == times * sum(truth)
        assert all(one.highest <= max(truth) for one in found)


@given(st.integers(2, 9), st.integers(0, 3), st.integers(0, 30), st.integers(0, 30))
def test_a_recording_cut_within_passes(layers: int, levels: int, head: int, tail: int) -> None:
    events = by_order(layers, each_layer(layers, levels), 4)
    length = len(events) // 4
    cut = events[head % length : len(events) - tail % length]
    found = present(passes_by_order(cut, cut=True))
    assert set(found) == {Pass((levels,) * layers)}


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ("FFFFFFFF" "BBBB", "another forward pass, or a checkpoint around the whole model"),
        ("FFB" * 4, "one layer: its recompute, or another forward"),
        ("FFFFBBBB" "FFBB", "two models"),
        ("BBBB", "no forward"),
        ("FBB", "more backwards than forwards"),
    ],
)  # fmt: skip
def test_orders_that_tell_nothing(events: str, why: str) -> None:
    assert passes_by_order(list(events)) is None, why


def parted(order: str) -> list[Pass] | None:
    """By order; signs other than F and B are kernels that are named after the backward pass."""
    events, named = "", [""]
    for sign in order:
        if sign in "FB":
            events += sign
            named.append("")
        else:
            named[-1] += sign
    return passes_by_order(list(events), False, [set(map(ord, signs)) for signs in named[:-1]])


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("FFFF|BBBB", (0, 0, 0, 0)),
        ("FFFF|FB|FB|FB|FB", (1, 1, 1, 1)),
        ("FFFF|FFFFB|B|B|B", (4, 0, 0, 0)),  # a checkpoint around all
        ("FFFF|FFFFFB|FB|FB|FB", (5, 1, 1, 1)),  # and one a layer
        ("FFFF|FFFF|FB|FB|FB|FB", (5, 1, 1, 1)),
        ("FFFFFB|FB|FB|FB", (1, 1, 1, 1)),  # a loss without a name
        ("FFFFFFFF|BBBB", None),  # evaluation, or another model
        ("FFFFFFFF|FB|FB|FB|FB", None),
        ("F|FFFF|BBBB", None),  # something ran after the last backward pass
        # A further forward pass, and a recompute of two layers, look alike.
        ("FFFF!FFBBFFBB", None),
        ("FFFF|FF|BBFF|BB", None),
        ("FFFFBBFFBB", None),
    ],
)
def test_where_the_backward_pass_begins_tells_recomputes(
    step: str, found: tuple[int, ...] | None
) -> None:
    for times in (1, 3):
        passes = parted("|".join([step] * times))
        assert passes == (None if found is None else [Pass(found)] * times)


@pytest.mark.parametrize("order", ["FFFFRBRBRBRBR", "FFFFBRBRBRBRFFFFBRBRBRBR", "FFBRFFBB"])
def test_attention_in_a_backward_pass_that_nobody_needs_is_no_recompute(order: str) -> None:
    assert passes_by_thread(list(order)) is None


def test_a_recording_can_end_within_a_recompute() -> None:
    assert passes_by_thread(list("FFRBRBFFRBR"), cut=True) == [Pass((1, 1)), Pass((1,))]
