"""A trace that lost something says so, and is never both sure and wrong."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from recompute_scan.analysis.pipeline import result_of
from recompute_scan.recompute.checks import confidence
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import sources
from tests.damage.damaging import STRENGTHS, answer, damaged, events_of, labelled
from tests.damage.ways import WAYS
from tests.effort import some
from tests.fuzz.seeds import training
from tests.trace.kineto_reading import read

Event = dict[str, Any]
SMALL = {label.name: label for label in labelled() if label.name in ("plain_once", "plain_twice")}


def studied(events: list[Event]) -> RecomputeFacts:
    data = json.dumps({"traceEvents": events}).encode()
    return study(read(io.BytesIO(data), "test.json"))


def sound() -> list[Event]:
    events: list[Event] = json.loads(training(steps=4, layers=4))["traceEvents"]
    return events


def lost(facts: RecomputeFacts) -> dict[str, int]:
    return {name: n for name, n in facts.trace.health.items() if not name.endswith("_of")}


def test_a_sound_trace_has_nothing_to_say() -> None:
    facts = studied(sound())
    assert facts.trace.health == {}
    assert (facts.judgement.verdict, confidence(facts)) == ("full", "high")


def test_results_whose_size_the_data_give_are_no_damage() -> None:
    events = sound()
    last = max(event["ts"] + event.get("dur", 0) for event in events if "ts" in event)
    one = next(event for event in events if event["name"] == "aten::linear")
    for place in range(12):
        for name, inner, number in (("aten::nonzero", 0, 7), ("aten::empty", 1, place)):
            more = {"name": name, "ts": last + 10 * place + 2 + inner, "dur": 5 - 2 * inner}
            events.append({**one, **more, "args": {"Input Dims": [[number, 3]]}})
    assert lost(studied(events)) == {}


@pytest.mark.parametrize("label", SMALL.values(), ids=str)
def test_the_traces_that_are_damaged_below_are_sound(label: Any) -> None:
    said = answer(events_of(label))
    assert (said.verdict, said.highest, said.confidence) == (label.verdict, label.highest, "high")


@pytest.mark.parametrize("way", some(WAYS, 2))
@pytest.mark.parametrize("name", SMALL)
def test_no_damaged_trace_is_both_sure_and_wrong(name: str, way: str) -> None:
    label = SMALL[name]
    strength = STRENGTHS[(list(WAYS).index(way) + list(SMALL).index(name)) % len(STRENGTHS)]
    said = answer(damaged(_EVENTS[name], way, strength, "test"))
    assert said.confidence != "high" or not said.wrong(label), said


_EVENTS = {name: events_of(label) for name, label in SMALL.items()}


def without(field: str) -> Callable[[Event], Event]:
    return lambda event: {key: value for key, value in event.items() if key != field}


def with_args(**fields: Any) -> Callable[[Event], Event]:
    return lambda event: event | {"args": event["args"] | fields}


@pytest.mark.parametrize(
    ("change", "counter", "words"),
    [
        (without("ts"), "events_without_time", "no usable start"),
        (without("dur"), "events_without_duration", "no usable duration"),
        (without("name"), "events_without_name", "names"),
        (without("tid"), "events_without_thread", "do not say which thread"),
        (without("pid"), "events_without_thread", "do not say which thread"),
        (without("cat"), "events_without_category", "do not say that they are"),
        (without("args"), "events_without_args", "have no arguments"),
        (with_args(**{"Sequence number": -7}), "numbers_out_of_range", "numbers"),
        (
            lambda event: event | {"args": {"Ev Idx": event["args"]["Ev Idx"]}},
            "shapes_missing",
            "no shapes",
        ),
    ],
)
def test_what_events_lost_is_counted(
    change: Callable[[Event], Event], counter: str, words: str
) -> None:
    events = sound()
    at = next(n for n, event in enumerate(events) if event["name"] == "AddmmBackward0")
    events[at] = change(events[at])
    facts = studied(events)
    assert counter in lost(facts)
    assert confidence(facts) != "high"
    assert any(words in warning for warning in result_of(facts.trace).warnings)


@pytest.mark.parametrize("name", ["aten::linear", "AddmmBackward0", "ProfilerStep#1", "aten::mm"])
def test_an_event_that_is_gone_is_missed_by_its_number(name: str) -> None:
    events = sound()
    events.remove(next(event for event in events if event["name"] == name))
    facts = studied(events)
    assert facts.trace.health["events_missing"] == 1
    assert facts.trace.health["events_missing_of"] == len(sound())
    assert confidence(facts) != "high"


def test_the_share_that_was_lost_is_said() -> None:
    events = sound()
    for event in events[: len(events) // 4]:
        del event["dur"]
    warnings = result_of(studied(events).trace).warnings
    assert any("43 events (25 %) have no usable duration" in warning for warning in warnings), (
        warnings
    )


def test_events_that_are_there_twice_are_counted() -> None:
    facts = studied(sound() + sound()[-3:])
    assert facts.trace.health["events_twice"] == 3
    assert confidence(facts) != "high"


@pytest.mark.parametrize(
    ("unwanted", "counter"),
    [
        ("AddmmBackward0", "nodes_apart"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "nodes_apart"),
        ("CheckpointFunction", "numbers_astray"),
        ("aten::addmm", "numbers_astray"),
    ],
)
def test_without_numbers_it_is_missed_by_what_belongs_to_it(unwanted: str, counter: str) -> None:
    events = [event for event in sound() if event["name"] != unwanted]
    for event in events:
        del event["args"]["Ev Idx"]
    facts = studied(events)
    assert counter in lost(facts)
    assert "events_missing" not in lost(facts)
    assert confidence(facts) != "high"


def test_numbers_of_python_frames_and_instants_count_too() -> None:
    events = sound()
    more = len(events)
    frame = {
        "ph": "X",
        "cat": "python_function",
        "name": "f",
        "pid": 7,
        "tid": 7,
        "ts": 1,
        "dur": 1,
    }
    instant = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7, "tid": 7}
    events.append(frame | {"args": {"Ev Idx": more}})
    events.append(instant | {"ts": 2, "args": {"Ev Idx": more + 1}})
    assert lost(studied(events)) == {}


def test_forward_operators_may_carry_a_number_that_nobody_asks_for() -> None:
    """A node whose result nobody needs is opened without its number, and is empty."""
    events = sound()
    last = events[-1]
    empty = last | {"name": "autograd::engine::evaluate_function: AddmmBackward0", "cat": "cpu_op"}
    args = {"Ev Idx": len(events), "Input Dims": [[4, 4]]}
    events.append(empty | {"ts": last["ts"] + last["dur"] + 1, "args": args})
    assert lost(studied(events)) == {}


def test_public_traces_of_every_age_are_held_sound_or_known_not_to_be() -> None:
    """Without sequence numbers (torch 1.8), and with 30 nodes of 144 that lead nowhere."""
    flagged = {}
    for label in labelled():
        if label.path.parent.name == "public":
            facts = study(sources.read(io.BytesIO(label.path.read_bytes()), label.name))
            if lost(facts):
                flagged[label.name] = set(lost(facts))
    assert flagged == {
        "v100-resnet50-torch1.8.json.gz": {"numbers_astray"},
        "v100-torchrec.json.gz": {"numbers_astray"},
    }


def test_deep_nesting_takes_time_by_its_events_alone() -> None:
    deep = 20_000
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::op",
            "pid": 1,
            "tid": 1,
            "ts": at * 0.5,
            "dur": 3.0 * (deep - at),
            "args": {"Ev Idx": at},
        }
        for at in range(deep)
    ]
    facts = studied(events)
    assert facts.calls.depth.max() == 1000
    assert len(facts.calls) == deep
    assert facts.calls.size[0] == deep - 1
