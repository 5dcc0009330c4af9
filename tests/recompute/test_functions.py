"""Checkpoint functions are known by what their nodes do, whatever their names."""

import pytest

from recompute_scan.annotations import IN_PARTS
from tests.cases.case import Case
from tests.cases.functions import FUNCTIONS
from tests.cases.functions_more import MORE_FUNCTIONS
from tests.cases.recorded import recorded
from tests.effort import some
from tests.recompute.test_accuracy import answer


@pytest.mark.parametrize("case", some((*FUNCTIONS, *MORE_FUNCTIONS), 2), ids=lambda case: case.name)
def test_the_count_is_the_truth_under_any_name(case: Case) -> None:
    _, truth = recorded(case.name)
    result = answer(case.name)
    assert truth.verdict in (None, result.verdict)
    assert result.recompute_per_backward == max(map(max, truth.multiplicity()))
    assert result.cross_check is not None and result.cross_check.agrees is True
    assert result.confidence == "high"


def test_two_models_of_one_class_have_rows_of_their_own() -> None:
    counted = [region.recompute_runs_per_backward for region in answer("two_kinds").regions]
    assert sorted(counted) == [1.0] * 4 + [2.0] * 4


def test_the_function_is_named() -> None:
    for region in answer("two_names").regions:
        assert [c.function for c in region.checkpoints if c.function]


OWN = {"grad_ckpt": "GradCkpt", "remat": "_Remat", "run_twice": "RunTwice", "to_host": "ToHost"}


@pytest.mark.parametrize("kind", OWN)
def test_each_function_is_named_where_it_stands(kind: str) -> None:
    own = OWN[kind]
    nestings = {
        "in_r": [None, own],
        "round_r": [own, None],
        "round_n": [own, None],
        "twice": [own, own],
    }
    names = {case.name for case in FUNCTIONS}
    for nesting, functions in nestings.items():
        if (name := f"{kind}_{nesting}") in names:
            for region in answer(name).regions:
                assert [one.function for one in region.checkpoints] == functions


@pytest.mark.parametrize(
    ("name", "in_parts"),
    [("tiles_in_n", True), ("tiles_in_r", True), ("grad_ckpt_round_n", False)],
)
def test_what_goes_through_its_block_in_parts_is_told_and_stays(name: str, in_parts: bool) -> None:
    for region in answer(name).regions:
        told = [one.function is not None for one in region.checkpoints if IN_PARTS in one.options]
        assert told == [True] * in_parts
    doubled = [one for one in answer(name).findings if one.code == "RS001"]
    assert len(doubled) == (not in_parts)  # what goes on in parts is a function's own design
