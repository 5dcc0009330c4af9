"""Recomputed steps against a small simulator: unchanged, and with redundant work taken out."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute_scan.cost.removal import TimeEdit
from recompute_scan.cost.simulate import Edits, join, simulate, simulate_unchanged
from recompute_scan.cost.timeline import build_graph
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import load
from tests.cost.simulator import (
    Do,
    Machine,
    backward,
    host,
    launch,
    repaired,
    run,
    synchronize,
    wait_stream,
)
from tests.effort import examples
from tests.trace.kineto_reading import parse

PUBLIC = Path(__file__).parents[2] / "traces" / "public"
COMPUTE, COMMUNICATION = 7, 20


def facts_of(machine: Machine) -> RecomputeFacts:
    return study(parse(json.dumps({"traceEvents": machine.events}).encode(), "simulated"))


def edits_of(facts: RecomputeFacts, machine: Machine) -> Edits:
    threads = {tid: code for code, (_, tid) in enumerate(facts.trace.threads)}
    return join(
        [
            TimeEdit(threads[str(thread)], round(1000 * begin), round(1000 * end), gone=True)
            for thread, begin, end in machine.gone
        ]
    )


def periods(machine: Machine) -> list[float]:
    """How long each step took, µs."""
    times: list[float] = np.diff(machine.finished, prepend=0.0).tolist()
    return times


def recomputed(
    program: Sequence[Do], early: float = 0.0
) -> tuple[list[float], list[float], list[float]]:
    """Step times in µs: unchanged, predicted without what is redundant, and true without it."""
    machine = run(program, early=early)
    facts = facts_of(machine)
    graph = build_graph(facts, facts.steps)
    unchanged = (simulate_unchanged(graph) / 1000).tolist()
    assert unchanged == pytest.approx(periods(machine), abs=0.01)
    predicted = (simulate(graph, facts, edits_of(facts, machine)) / 1000).tolist()
    return unchanged, predicted, periods(run(repaired(program), early=early))


def assert_predicted(program: Sequence[Do]) -> tuple[float, float]:
    """The prediction is true to 5 µs per step; the last step before and after."""
    unchanged, predicted, truth = recomputed(program)
    assert predicted == pytest.approx(truth, abs=5.0)
    return unchanged[-1], predicted[-1]


def test_a_step_that_launches_limit() -> None:
    """Kernels of 2 µs behind operators of 20 µs: what the host saves is saved."""
    layer = [host(20), launch(2)]
    redundant = [host(20, redundant=True), launch(2, redundant=True)]
    before, after = assert_predicted([*layer * 10, *redundant * 5, synchronize()])
    assert before - after == pytest.approx(5 * (20 + 4 + 2), abs=1)


def test_a_step_that_kernels_limit() -> None:
    """Kernels of 500 µs: the GPU is busy throughout, and saves the redundant recomputes kernels."""
    layer = [host(10), launch(500)]
    redundant = [host(10, redundant=True), launch(500, redundant=True)]
    before, after = assert_predicted([*layer * 10, *redundant * 4, synchronize()])
    assert before - after == pytest.approx(4 * 501, abs=1)


@pytest.mark.parametrize("early", [0.1, 0.3])
def test_kernels_that_begin_before_the_end_of_the_one_before(early: float) -> None:
    """How much is left of a kernel then is its own, and no matter of what came next."""
    program = [
        *[launch(us) for us in (300, 500)],
        *[launch(us, redundant=True) for us in (900, 100, 700)],
        *[launch(us) for us in (200, 400)],
        launch(50, redundant=True),
        launch(600),
        synchronize(),
    ]
    _, predicted, truth = recomputed(program, early)
    assert predicted == pytest.approx(truth, abs=5.0)


def test_taking_kernels_out_can_leave_the_host_to_limit() -> None:
    """Ten kernels of 300 µs hide 1 ms of host time; without them it shows."""
    redundant = [launch(300, redundant=True)] * 10
    before, after = assert_predicted([*redundant, *[host(100)] * 10, launch(5), synchronize()])
    assert after == pytest.approx(1050, abs=50)
    assert before > 3000


def test_a_gather_that_the_redundant_hid_becomes_visible() -> None:
    """Compute waits for a gather of 800 µs on another stream; 1000 µs of redundant hid it."""
    program = [
        *wait_stream(COMMUNICATION, COMPUTE),
        launch(800, COMMUNICATION),
        launch(1000, COMPUTE, redundant=True),
        *wait_stream(COMPUTE, COMMUNICATION),
        launch(500, COMPUTE),
        synchronize(),
    ]
    before, after = assert_predicted(program)
    assert before == pytest.approx(1500, abs=60)
    assert after == pytest.approx(1300, abs=60)


def test_gathers_that_the_redundant_repeats_go_with_it() -> None:
    program = [
        launch(200),
        *wait_stream(COMMUNICATION, COMPUTE, redundant=True),
        launch(900, COMMUNICATION, redundant=True),
        *wait_stream(COMPUTE, COMMUNICATION, redundant=True),
        launch(100, COMPUTE, redundant=True),
        launch(200),
        synchronize(),
    ]
    before, after = assert_predicted(program)
    assert before - after == pytest.approx(1000, abs=20)


def test_redundant_behind_another_stream_costs_nothing() -> None:
    program = [
        launch(3000, COMMUNICATION),
        launch(500, COMPUTE, redundant=True),
        launch(500, COMPUTE),
        synchronize(),
    ]
    before, after = assert_predicted(program)
    assert before - after < 10


def test_a_backward_pass_on_a_thread_of_its_own() -> None:
    inside = [host(30), launch(10), host(40, redundant=True), launch(10, redundant=True), host(30)]
    program = [host(100), launch(10), backward(*inside * 3), host(60), launch(10), synchronize()]
    before, after = assert_predicted(program)
    assert before - after == pytest.approx(3 * (40 + 4 + 2), abs=1)


def test_nothing_taken_out_changes_nothing() -> None:
    unchanged, predicted, _ = recomputed([host(20), launch(50), synchronize()])
    assert predicted == pytest.approx(unchanged)


@st.composite
def programs(draw: st.DrawFn) -> list[Do]:
    """Forward work, waits between two streams, redundant anywhere, at times a synchronisation."""
    program: list[Do] = []
    for _ in range(draw(st.integers(2, 8))):
        redundant = draw(st.booleans())
        stream = draw(st.sampled_from((COMPUTE, COMMUNICATION)))
        program.append(host(draw(st.integers(1, 60)), redundant=redundant))
        program.append(launch(draw(st.integers(1, 900)), stream, redundant=redundant))
        if draw(st.booleans()):
            other = COMMUNICATION if stream == COMPUTE else COMPUTE
            program += wait_stream(other, stream)
            program.append(launch(draw(st.integers(1, 300)), other))
        if draw(st.integers(0, 4)) == 0:
            program.append(synchronize())
    return [*program, synchronize()]


@settings(deadline=None, max_examples=examples(150))
@given(programs())
def test_any_program_is_recomputed_and_repaired(program: list[Do]) -> None:
    unchanged, predicted, truth = recomputed(program)
    for was, said, true in zip(unchanged, predicted, truth, strict=True):
        assert said <= was + 0.01
        # How long a launch, gap or wait takes that held nothing up in the trace is not known but
        # for what others took: some µs each.
        assert said == pytest.approx(true, abs=max(25.0, 0.02 * was))


@settings(deadline=None, max_examples=examples(60))
@given(programs(), st.data())
def test_more_taken_out_is_never_less_saved(program: list[Do], data: st.DataObject) -> None:
    machine = run(program)
    facts = facts_of(machine)
    graph = build_graph(facts, facts.steps)
    every = edits_of(facts, machine)
    size = len(every.start)
    kept = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    some = join(
        [
            TimeEdit(int(every.thread[i]), int(every.start[i]), int(every.end[i]), gone=True)
            for i in range(size)
            if kept[i]
        ]
    )
    assert simulate(graph, facts, every).sum() <= simulate(graph, facts, some).sum() + 1


@pytest.mark.parametrize("trace", sorted(PUBLIC.glob("*.json.gz")), ids=lambda path: path.name)
def test_real_traces_recompute_to_their_own_times(trace: Path) -> None:
    """Within 1 % asked; within 0.01 % held."""
    facts = study(load(trace))
    graph = build_graph(facts, facts.steps)
    assert simulate_unchanged(graph) == pytest.approx(graph.measured, rel=1e-4)


def test_a_hundred_thousand_operators_take_about_a_second() -> None:
    layer = [host(5), host(5), host(5), launch(20), *wait_stream(COMMUNICATION, COMPUTE)]
    program = [*layer * 17_000, synchronize()]
    machine = run(program, steps=1)
    facts = facts_of(machine)
    begin = time.process_time()
    graph = build_graph(facts, facts.steps)
    simulate(graph, facts)
    assert len(facts.calls) > 100_000
    assert time.process_time() - begin < 2.0
