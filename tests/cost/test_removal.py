"""Which of two recomputes goes with which checkpoint, and what goes with it."""

import re

import numpy as np
import pytest

from recompute_scan.annotations import ANNOTATING
from recompute_scan.cost.removal import Context, Removal, TimeEdit, annotation_edits
from recompute_scan.cost.reruns import Hooks
from recompute_scan.cost.simulate import join, predict, prepare
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import load
from tests.cases.recorded import recorded
from tests.recompute.training import gradients, marked_step, run, training_step
from tests.trace_builder import annotation, studied, thread, wait

NO_HOOKS = Hooks(0.0, 0.0, 0.0)


def gone(facts: RecomputeFacts, place: int | None) -> list[TimeEdit]:
    keep = None if place is None else lambda checkpoints: checkpoints[place]
    around = Context(facts, facts.steps[0].start, facts.steps[-1].end)
    edits = Removal(around, keep).edits(NO_HOOKS, lambda rows: np.zeros(len(rows)))
    return [edit for edit in edits if edit.gone]


def starts_inside(facts: RecomputeFacts, edits: list[TimeEdit], recompute: int) -> int:
    """How many layers' operators of that recompute (0 or 1) lie in what goes."""
    return sum(
        any(e.start <= facts.calls.start[r.again[0]] < e.end for e in edits)
        for r in facts.alignment.recomputes[recompute::2]
    )


@pytest.mark.parametrize(("kept", "stays"), [(0, 0), (1, 1)])
def test_the_run_of_the_checkpoint_that_goes_is_the_one_that_goes(kept: int, stays: int) -> None:
    facts = studied(thread(marked_step(0, recomputes=2)))
    edits = gone(facts, kept)
    assert starts_inside(facts, edits, stays) == 0
    assert starts_inside(facts, edits, 1 - stays) == 3


def test_without_any_checkpoint_every_recompute_goes() -> None:
    facts = studied(thread(marked_step(0, recomputes=2)))
    edits = gone(facts, None)
    assert starts_inside(facts, edits, 0) == starts_inside(facts, edits, 1) == 3


def test_a_single_recompute_stays_where_a_checkpoint_is_kept() -> None:
    facts = studied(thread(marked_step(0, recomputes=1)))
    assert gone(facts, 0) == []


def test_the_preparation_of_a_recompute_goes_with_it() -> None:
    """200 µs before the first operator, inside the node that asked for it."""
    forward = run(0)
    again = [wait(200), *run(50), *run(60)]
    facts = studied(thread(training_step(0, *forward, *gradients(forward, again))))
    first = min(gone(facts, 1), key=lambda edit: edit.start)
    assert facts.calls.start[facts.alignment.recomputes[0].again[0]] - first.start >= 200_000


def test_backward_passes_between_the_parts_of_a_run_stay() -> None:
    """A function in tiles runs one again, then its backward pass, then the next.

    With one checkpoint kept nothing goes: the tiles run again by the function's own design.
    """
    trace, _ = recorded("tiles_in_r")
    facts = study(load(trace))
    assert not len(gone(facts, 0))
    calls, edits = facts.calls, gone(facts, None)
    gradients = calls.start[calls.named(re.compile(r"AddmmBackward0$"))]
    assert len(edits)
    assert len(gradients)
    assert not any(((edit.start <= gradients) & (gradients < edit.end)).any() for edit in edits)


def test_the_time_of_naming_checkpoints_is_no_part_of_a_step() -> None:
    def step(us: float) -> RecomputeFacts:
        forward = run(0)
        annotating = annotation(ANNOTATING, us=us)
        return studied(
            thread(
                training_step(0, annotating, *forward, *gradients(forward, [*run(50), *run(60)]))
            )
        )

    short, long = (prepare(step(rows), np.zeros(0)) for rows in (10, 400))
    assert short is not None
    assert long is not None
    assert len(annotation_edits(long.facts)) == 1
    assert long.steps == pytest.approx(short.steps, abs=10)
    keep_last = lambda checkpoints: checkpoints[-1]  # noqa: E731
    assert predict(long, keep_last).share == pytest.approx(predict(short, keep_last).share)


def test_edits_never_overlap() -> None:
    edits = join(
        [
            TimeEdit(1, 0, 100, gone=False, add=5.0),
            TimeEdit(1, 20, 40, gone=True),
            TimeEdit(1, 30, 60, gone=True),
            TimeEdit(2, 10, 20, gone=True),
        ]
    )
    for code in (1, 2):
        mine = edits.of(code)
        assert (mine.start[1:] >= mine.end[:-1]).all()
    lost = edits.removed(np.array([1, 1, 2], np.int32), np.array([10, 50, 15]))
    assert lost.tolist() == [False, True, True]
