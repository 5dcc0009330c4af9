"""Calls in whole microseconds: told apart by order and by how names nest elsewhere.

The truth is that of finer times, which the program does not see.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from recompute_scan.analysis.pipeline import result_of
from recompute_scan.trace import load
from recompute_scan.trace.calls import Calls, nest
from recompute_scan.trace.columns import Int64, Kind, Trace
from tests.cases.coarse import coarse
from tests.effort import examples

TRACES = Path(__file__).parents[2] / "traces"
PUBLIC, TWICE = TRACES / "public", TRACES / "plain_twice" / "trace-rank0.json.gz"
# In these, times are ns.
FINE = (
    "a100-resnet-ddp",
    "cpu-only-gloo-rank34",
    "h100-nanogpt-compiled",
    "h100-qwen-inference",
    "mi300x-resnet-checkpointed",
    "mi300x-resnet18-ddp",
    "v100-megatron-tp2-rank0",
)
COLUMNS = ("name", "kind", "thread", "ts", "dur", "sequence", "correlation", "stream", "dims")


class Call(NamedTuple):
    """One call of a made-up program: how long it takes itself around what it holds, in ns."""

    name: str
    own: int
    inside: tuple[Call, ...] = ()


LINEAR = Call(
    "linear",
    400,
    (
        Call("t", 150, (Call("transpose", 150, (Call("as_strided", 120),)),)),
        Call("addmm", 700, (Call("expand", 140, (Call("as_strided", 120),)), Call("copy_", 300))),
    ),
)
BLOCK = Call("block", 300, (Call("layer_norm", 900), LINEAR, Call("gelu", 500), LINEAR))


def program(*calls: Call, times: int, seed: int = 0) -> Trace:
    """These calls so many times over, on one thread, in the order in which they began."""
    chance = random.Random(seed)
    rows: list[tuple[str, int, int]] = []

    def run(call: Call, at: int) -> int:
        row = len(rows)
        rows.append(("", 0, 0))
        # Before, between and behind what it holds.
        part = max(1, call.own // (len(call.inside) + 1))
        end = at + chance.randint(part // 2, 2 * part)
        for inner in call.inside:
            end = run(inner, end) + chance.randint(part // 2, 2 * part)
        rows[row] = (call.name, at, end)
        return end

    at = 1_000_000
    for _ in range(times):
        for call in calls:
            at = run(call, at) + chance.randint(50, 300)
    names = tuple(dict.fromkeys(name for name, _, _ in rows))
    nothing = np.full(len(rows), -1, np.int64)
    return Trace(
        name=np.array([names.index(name) for name, _, _ in rows], np.int32),
        kind=np.full(len(rows), Kind.OP, np.int8),
        thread=np.zeros(len(rows), np.int32),
        ts=np.array([start for _, start, _ in rows], np.int64),
        dur=np.array([end - start for _, start, end in rows], np.int64),
        sequence=nothing,
        correlation=nothing,
        stream=nothing.astype(np.int32),
        dims=np.zeros(len(rows), np.int32),
        names=names,
        threads=(("1", "1"),),
        signatures=("",),
    )


def parents(calls: Calls) -> dict[int, int]:
    """Event of the parent by event; -1 at the top."""
    events = np.asarray(calls.event)
    above = np.where(calls.parent >= 0, events[calls.parent], -1)
    return dict(zip(events.tolist(), above.tolist(), strict=True))


def reordered(trace: Trace, order: Int64) -> Trace:
    return replace(trace, **{name: getattr(trace, name)[order] for name in COLUMNS})


def wrong(fine: Trace, cut: Trace, order: Int64 | None = None) -> int:
    """How many calls stand in another parent than by their fine times."""
    truth, found = parents(nest(fine)), parents(nest(cut))
    if order is not None:
        place = [*order.tolist(), -1]
        found = {place[event]: place[above] for event, above in found.items()}
    return sum(above != found[event] for event, above in truth.items())


def test_calls_of_no_length_stand_where_they_ran() -> None:
    fine = program(BLOCK, Call("add", 200), times=60)
    cut = coarse(fine)
    # By time alone most of these cannot be told.
    assert (cut.dur == 0).mean() > 0.4
    assert wrong(fine, cut) == 0
    assert nest(cut).guessed == 0


def test_the_order_in_which_calls_ended_tells_as_much() -> None:
    fine = program(BLOCK, Call("add", 200), times=60)
    order = np.argsort(fine.ts + fine.dur, kind="stable")
    assert wrong(fine, reordered(coarse(fine), order), order) == 0


def test_the_same_name_inside_and_behind() -> None:
    # In one place `t` is part of a linear, in another it follows one.
    fine = program(LINEAR, Call("t", 150), Call("mm", 600), LINEAR, Call("mm", 600), times=80)
    assert wrong(fine, coarse(fine)) == 0


@pytest.mark.parametrize("name", FINE)
def test_published_traces_cut_to_microseconds(name: str) -> None:
    fine = load(PUBLIC / f"{name}.json.gz")
    cut = coarse(fine)
    assert wrong(fine, cut) == 0
    assert nest(cut).guessed <= 0.001 * len(nest(cut))


@pytest.mark.parametrize("name", ["cpu-only-gloo-rank34", "mi300x-resnet-checkpointed"])
def test_a_host_twice_as_fast(name: str) -> None:
    fine = load(PUBLIC / f"{name}.json.gz")
    begin = int(fine.ts.min())
    fast = replace(fine, ts=(fine.ts - begin) // 2, dur=fine.dur // 2)
    assert wrong(fast, coarse(fast)) <= 0.001 * len(fast)


def test_times_move_within_their_microsecond_and_say_the_same_as_the_forest() -> None:
    cut = coarse(program(BLOCK, Call("add", 200), times=60))
    calls = nest(cut)
    for moved, written in (
        (calls.start, cut.ts[calls.event]),
        (calls.end, (cut.ts + cut.dur)[calls.event]),
    ):
        assert ((moved >= written) & (moved < written + 1000)).all()
    inside = calls.parent >= 0
    above = calls.parent[inside]
    assert (calls.start[inside] >= calls.start[above]).all()
    assert (calls.end[inside] <= calls.end[above]).all()
    assert (calls.duration == calls.end - calls.start).all()
    # Whoever is over before another one begins has ended by then.
    behind = np.arange(len(calls)) + calls.size + 1
    follows = behind < len(calls)
    assert (calls.end[follows] <= calls.start[behind[follows]]).all()


@pytest.mark.parametrize("lost", ["shuffled", "by name", "shortest first", "backwards"])
def test_a_lost_order_is_noticed(lost: str) -> None:
    cut = coarse(program(BLOCK, Call("add", 200), times=60))
    chance = np.random.default_rng(0)
    keys: dict[str, tuple[Int64, ...]] = {
        "shuffled": (chance.permutation(len(cut)), cut.ts),
        "by name": (cut.name.astype(np.int64), cut.ts),
        "shortest first": (cut.dur, cut.ts),
        "backwards": (-np.arange(len(cut)),),
    }
    calls = nest(reordered(cut, np.lexsort(keys[lost])))
    assert calls.guessed > 0.2 * len(calls)


def test_an_answer_without_the_order_is_not_sure() -> None:
    cut = coarse(load(TWICE))
    sure = result_of(cut)
    assert (sure.verdict, sure.recompute_per_backward, sure.confidence) == ("doubled", 2.0, "high")
    chance = np.random.default_rng(0)
    lost = result_of(reordered(cut, np.lexsort((chance.permutation(len(cut)), cut.ts))))
    assert lost.confidence == "low"
    assert lost.health["guessed_parents"] > 0.02 * len(nest(cut))
    assert any("whole microseconds" in warning for warning in lost.warnings)


def test_a_file_sorted_by_time_alone_keeps_its_order() -> None:
    fine = program(BLOCK, Call("add", 200), times=60)
    cut = coarse(fine)
    order = np.argsort(cut.ts, kind="stable")
    assert wrong(fine, reordered(cut, order), order) == 0


def test_names_that_were_never_seen_are_guesses() -> None:
    # Once each: what could tell whether one holds the other?
    start = 10_000 * np.arange(40, dtype=np.int64).repeat(2)
    names = tuple(f"op{number}" for number in range(80))
    fine = program(Call("op", 1), times=80)
    trace = replace(
        fine, name=np.arange(80, dtype=np.int32), names=names, ts=start, dur=np.zeros_like(start)
    )
    calls = nest(trace)
    assert calls.parent.tolist() == [-1] * 80
    assert calls.guessed == 40


def test_a_trace_without_times_is_all_guesses() -> None:
    fine = program(BLOCK, times=300)
    nowhere = np.zeros(len(fine), np.int64)
    calls = nest(replace(fine, ts=nowhere, dur=nowhere))
    assert calls.guessed >= 0.9 * len(calls)


microseconds = st.integers(0, 6).map(lambda us: us * 1000)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), microseconds, microseconds), max_size=20))
def test_any_whole_microseconds_give_a_forest(rows: list[tuple[int, int, int]]) -> None:
    name, ts, dur = np.array(rows, np.int64).reshape(-1, 3).T
    some = program(Call("op", 1), times=max(1, len(rows)))
    trace = replace(
        some,
        **{field: getattr(some, field)[: len(rows)] for field in COLUMNS},
    )
    calls = nest(replace(trace, name=name.astype(np.int32), names=tuple("abcd"), ts=ts, dur=dur))
    assert sorted(np.asarray(calls.event).tolist()) == list(range(len(rows)))
    for row, above in enumerate(calls.parent.tolist()):
        assert above < row
        assert calls.depth[row] == (calls.depth[above] + 1 if above >= 0 else 0)
    if not calls.overruns:
        assert (np.abs(calls.start - ts[np.asarray(calls.event)]) < 1000).all()
