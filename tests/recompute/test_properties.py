"""What must not matter to the answer: clocks, names of threads, order in the file, strangers."""

import functools
import gzip
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts, study
from tests.cases.recorded import recorded
from tests.effort import examples
from tests.trace.kineto_reading import parse

Event = dict[str, Any]
CASE = "one_layer_doubled"

few = settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def complete_events(name: str) -> tuple[Event, ...]:
    document = msgspec.json.decode(gzip.decompress(recorded(name)[0].read_bytes()))
    return tuple(event for event in document["traceEvents"] if event["ph"] == "X")


def events_of(name: str) -> list[Event]:
    """The complete events of a recorded case, for a test to order anew; none may be changed."""
    return list(complete_events(name))


def studied_events(events: list[Event]) -> RecomputeFacts:
    return study(parse(msgspec.json.encode({"traceEvents": events}), "changed"))


Answer = tuple[str, float | None, list[float], list[int]]


def answer(events: list[Event]) -> Answer:
    facts = studied_events(events)
    regions = list_regions(facts)
    return (
        facts.judgement.verdict,
        facts.judgement.highest,
        [region.recompute_runs_per_backward for region in regions],
        facts.counts.runs.tolist(),
    )


@functools.cache
def unchanged() -> Answer:
    found = answer(events_of(CASE))
    assert found[:3] == ("doubled", 2.0, [1.0, 1.0, 2.0, 1.0])
    return found


def changed(change: Callable[[Event], Event]) -> Answer:
    return answer([change(event) for event in events_of(CASE)])


@few
@given(st.integers(-(10**12), 10**12))
@example(-(10**15))
def test_the_clock_may_start_anywhere(microseconds: int) -> None:
    # Times have three digits behind the point: counting from the first event keeps them.
    first = min(event["ts"] for event in events_of(CASE))
    moved = changed(lambda e: {**e, "ts": round(e["ts"] - first, 3) + microseconds // 10**6})
    assert moved == unchanged()


def test_no_figure_depends_on_where_the_clock_starts(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "traces" / "doubled_llama_fsdp" / "trace-rank0.json.gz"
    document = msgspec.json.decode(gzip.decompress(stored.read_bytes()))
    timed = [event for event in document["traceEvents"] if "ts" in event]
    first = min(event["ts"] for event in timed)
    found = []
    for begin in (1000, -(10**5), -(10**7)):
        moved = [{**event, "ts": round(event["ts"] - first, 3) + begin} for event in timed]
        path = tmp_path / f"{begin}.json"
        path.write_bytes(msgspec.json.encode({**document, "traceEvents": moved}))
        result = analyse([path])
        found.append((result.verdict, result.regions, result.cost))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("factor", [2, 0.5, 16])
def test_the_clock_may_run_at_any_speed(factor: float) -> None:
    first = min(event["ts"] for event in events_of(CASE))
    scaled = changed(
        lambda e: {**e, "ts": (e["ts"] - first) * factor, "dur": e["dur"] * factor},
    )
    assert scaled == unchanged()


@few
@given(st.integers(0, 2**31), st.sampled_from([int, str, lambda tid: f"thread {tid}"]))
def test_threads_may_have_any_name(offset: int, spelled: Callable[[Any], Any]) -> None:
    def renamed(event: Event) -> Event:
        # Spans of the profiler itself have a name for a thread, and are no calls.
        tid = event["tid"]
        new = spelled(tid + offset) if isinstance(tid, int) else tid
        return {**event, "pid": str(event["pid"]), "tid": new}

    assert changed(renamed) == unchanged()


@few
@given(st.integers(0, 2**31))
def test_events_may_stand_in_any_order(seed: int) -> None:
    """Only calls that share start and duration are told apart by the order of the file."""
    events = events_of(CASE)
    random.Random(seed).shuffle(events)
    spots = defaultdict(list)
    for spot, event in enumerate(events):
        spots[event["ts"], event["dur"], event["tid"]].append(spot)
    # Equal intervals keep their order, wherever they stand.
    for event in reversed(events_of(CASE)):
        events[spots[event["ts"], event["dur"], event["tid"]].pop()] = event
    assert answer(events) == unchanged()


@few
@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 5_000)), max_size=40))
def test_strangers_on_another_thread_do_not_matter(intervals: list[tuple[int, int]]) -> None:
    events = events_of(CASE)
    first = min(event["ts"] for event in events)
    strangers = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::pin_memory", "pid": 1, "tid": 987}
        | {"ts": first + start, "dur": duration, "args": {}}
        for start, duration in intervals
    ]
    # They are forward work to the program, without gradients; the layers' own counts stay.
    assert answer(events + strangers)[:3] == unchanged()[:3]


def inside(event: Event, outer: Event) -> bool:
    return bool(
        event["tid"] == outer["tid"]
        and event["ts"] >= outer["ts"]
        and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]
    )


def runs_per_block(facts: RecomputeFacts) -> list[list[float]]:
    """Recomputes of each layer in each step."""
    return [[facts.counts.highest(block.places) for block in blocks] for blocks in facts.layers]


@pytest.mark.parametrize("name", ["r_in_r", "n_in_r", "r_in_n", "n_in_n_no_early_stop"])
@pytest.mark.parametrize("layer", range(4))
def test_without_its_second_recompute_a_layer_counts_one_less(name: str, layer: int) -> None:
    events = events_of(name)
    whole = studied_events(events)
    # The backward pass of the middle step recomputes the last layer first, each layer twice.
    middle = [
        recompute
        for recompute in whole.alignment.recomputes
        if whole.steps[1].start <= whole.calls.start[recompute.engine] < whole.steps[1].end
    ]
    second = middle[2 * (3 - layer) + 1]
    removed = [events[event] for event in whole.calls.event[second.again]]
    facts = studied_events([e for e in events if not any(inside(e, one) for one in removed)])
    expected = [[2.0, 2.0, 2.0] for _ in range(4)]
    expected[layer][1] = 1.0
    assert len(middle) == 8
    assert runs_per_block(facts) == expected


@pytest.mark.parametrize("layer", range(4))
def test_a_recompute_repeats_only_what_ran_before_it(layer: int) -> None:
    """What is left of a layer whose first recompute is not in the trace stays in its step."""
    events = events_of("r_in_r")
    whole = studied_events(events)
    around = (whole.structure.function[each.again[0]] for each in whole.alignment.recomputes)
    function = events[whole.calls.event[[row for row in around if row >= 0][4 + layer]]]
    assert function["name"] == "CheckpointFunction"
    facts = studied_events([event for event in events if not inside(event, function)])
    for recompute in facts.alignment.recomputes:
        assert facts.calls.end[recompute.original].max() <= facts.calls.start[recompute.again].min()
