"""What the recomputes cost: phases that add up, and savings that only redundant brings."""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from recompute_scan.cost.phases import device_phases, host_phases, sum_covered
from recompute_scan.cost.price import price
from recompute_scan.cost.simulate import prepare
from recompute_scan.recompute.study import study
from recompute_scan.result import Cost
from recompute_scan.trace import load
from tests.cases.recorded import recorded
from tests.present import present
from tests.recompute.training import (
    SHAPE,
    checkpointed_step,
    gradients,
    plain_step,
    run,
    training_step,
)
from tests.trace_builder import Call, Thread, launch, op, step, studied, thread, wait

TWICE = dict.fromkeys(range(3), 2)


def cost_of(*calls: Call, timed: tuple[float, ...] = ()) -> Cost:
    return present(price(studied(thread(*calls)), timed))


@pytest.mark.parametrize(
    "name", ["no_checkpoint", "n_outside", "r_in_n", "n_halves_in_n", "accumulation_doubled"]
)
def test_phases_of_recorded_steps_add_up(name: str) -> None:
    phases = host_phases(study(load(recorded(name)[0])))
    parts = [getattr(phases, field.name) for field in structs.fields(phases)][1:]
    assert np.sum(parts, axis=0) == pytest.approx(phases.step)
    assert all((part >= 0).all() for part in parts)


def test_phases_of_a_step_by_the_hosts_clock() -> None:
    """Three layers of 51 µs each, recomputed twice; times in ns."""
    phases = host_phases(studied(thread(checkpointed_step(0, recomputes=TWICE))))
    assert phases.forward.tolist() == [3 * 51_000 + 2_000 + 1_000]
    assert phases.recompute.tolist() == phases.redundant.tolist() == [3 * 51_000]
    assert phases.optimizer.tolist() == [12_000]


def test_the_breakdown_sums_to_the_step() -> None:
    cost = cost_of(checkpointed_step(0, recomputes=TWICE), checkpointed_step(1))
    assert sum(structs.astuple(cost.breakdown)) == pytest.approx(cost.step_ms)
    assert cost.breakdown.redundant == pytest.approx(cost.redundant_recompute_ms)
    assert cost.breakdown.recompute + cost.breakdown.redundant == pytest.approx(cost.recompute_ms)


@pytest.mark.parametrize("calls", [plain_step(0), checkpointed_step(0)])
def test_without_redundant_there_is_nothing_to_save(calls: Call) -> None:
    cost = cost_of(calls)
    assert (cost.saving_pct, cost.redundant_recompute_ms) == (0.0, 0.0)
    assert cost.predicted_step_ms == cost.step_ms == cost.predicted_low_ms


def test_recorded_steps_are_the_base_where_none_was_timed() -> None:
    steps = [training_step(0, wait(100), *run(0), *gradients(run(0)))]
    steps += [training_step(1, wait(700), *run(50), *gradients(run(50)))]
    steps += [training_step(2, wait(300), *run(90), *gradients(run(90)))]
    cost = cost_of(*steps)
    lengths = sorted(s.end - s.start for s in studied(thread(*steps)).steps)
    assert cost.step_source == "trace"
    assert cost.step_ms == pytest.approx(lengths[1] / 1e6, rel=0.01)  # from end to end


def test_timed_steps_are_the_base_where_there_are_some() -> None:
    traced = cost_of(checkpointed_step(0, recomputes=TWICE))
    cost = cost_of(checkpointed_step(0, recomputes=TWICE), timed=(50.0, 10.0, 20.0, 30.0, 40.0))
    assert (cost.step_source, cost.step_ms) == ("timed", 30.0)
    # They vary: something is taken off for the profiler, which the trace alone does not tell.
    assert cost.saving_pct == pytest.approx(traced.saving_pct, abs=1.0)
    steady = cost_of(checkpointed_step(0, recomputes=TWICE), timed=(1.2 * traced.step_ms,) * 5)
    assert steady.saving_pct == pytest.approx(traced.saving_pct)
    assert cost.predicted_step_ms == pytest.approx(30.0 * (1 - cost.saving_pct / 100))
    assert cost.predicted_low_ms < cost.predicted_step_ms < cost.predicted_high_ms
    assert sum(structs.astuple(cost.breakdown)) == pytest.approx(30.0)


def test_the_step_time_says_how_sure_it_is() -> None:
    timed = (68.1, 71.1, 95.5, 116.1, 165.9, 208.2, 248.2, 329.9, 363.4, 579.4)
    cost = cost_of(checkpointed_step(0), timed=timed)
    # Of ten times, the second smallest and the second largest hold the median with 97.9 %.
    assert (cost.step_low_ms, cost.step_high_ms, cost.steps) == (71.1, 363.4, 10)
    single = cost_of(checkpointed_step(0))
    assert (single.step_low_ms, single.step_high_ms, single.steps) == (None, None, 1)
    recorded = cost_of(*(checkpointed_step(number) for number in range(3)))
    assert recorded.steps == 3
    assert present(recorded.step_low_ms) <= recorded.step_ms


def test_steps_that_something_else_slowed_down_do_not_count() -> None:
    """Five of nine: the median step is a slow one."""
    quick = [checkpointed_step(number, recomputes=TWICE) for number in range(4)]
    slow = []
    for number in range(4, 9):
        whole = checkpointed_step(number, recomputes=TWICE)
        slow.append(dataclasses.replace(whole, inside=(wait(400), *whole.inside)))
    share = [cost.predicted_step_ms / cost.step_ms for cost in (cost_of(*quick), cost_of(*slow))]
    mixed = cost_of(*slow, *quick)
    assert share[0] < share[1] - 0.05
    assert mixed.predicted_step_ms / mixed.step_ms == pytest.approx(share[0], abs=0.01)


def hurried(number: int, profiler_us: float) -> Call:
    """A step of many short calls, each of which the profiler makes longer at both ends."""
    forward, first, second = (
        [op("aten::relu", seq=seq + i, us=2 + 2 * profiler_us, dims=SHAPE) for i in range(40)]
        for seq in (0, 100, 200)
    )
    return training_step(number, *forward, *gradients(forward, [*first, *second]))


def test_timed_steps_tell_what_the_profiler_takes() -> None:
    steps = [hurried(number, profiler_us=1.0) for number in range(8)]
    recorded = studied(thread(*steps))
    trace_ns = float(np.median([s.end - s.start for s in recorded.steps]))
    taken = []
    for share in (0.4, 0.6, 0.8):
        base = present(prepare(recorded, np.full(10, share * trace_ns)))
        taken.append(base.overhead)
    assert taken[0] > taken[1] > taken[2] > 0
    assert taken[1] == pytest.approx(1000, rel=0.15)  # which makes 0.6 of the step what it was


def test_timed_steps_that_vary_tell_less() -> None:
    """A slow minute of the machine is not taken for a profiler that costs nothing."""
    recorded = studied(thread(*(hurried(number, profiler_us=1.0) for number in range(8))))
    trace_ns = float(np.median([s.end - s.start for s in recorded.steps]))
    steady, varying = (
        prepare(recorded, trace_ns * np.array(timed))
        for timed in ((1.1,) * 5, (0.7, 0.8, 1.1, 1.4))
    )
    assert steady is not None
    assert varying is not None
    assert steady.overhead == 0
    assert varying.overhead == pytest.approx(850, rel=0.3)  # what is usual


def test_a_plain_trace_leaves_room_for_what_the_profiler_takes() -> None:
    hurry = prepare(
        studied(thread(*(hurried(number, profiler_us=1.0) for number in range(8)))), np.array([])
    )
    assert hurry is not None
    assert hurry.overhead == 0
    assert hurry.other == pytest.approx(850, rel=0.3)  # what is usual of 1,000
    # Small calls beside a long wait, in which the profiler takes nothing.
    steps = []
    for number in range(8):
        whole = checkpointed_step(number, recomputes=TWICE)
        steps.append(dataclasses.replace(whole, inside=(wait(400), *whole.inside)))
    cost = cost_of(*steps)
    assert present(cost.doubt_ms)["profiler"] > 0.01 * (cost.step_ms - cost.predicted_step_ms)


def test_a_single_step_leaves_room_for_others() -> None:
    one = cost_of(checkpointed_step(0, recomputes=TWICE))
    assert one.doubt_ms is not None
    assert one.doubt_ms["steps"] == pytest.approx(0.15 * (one.step_ms - one.predicted_step_ms))


def test_without_a_complete_step_there_is_no_price() -> None:
    assert price(studied(thread(step(0, *run(0)))), (10.0,)) is None


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(0, 2))
def test_more_redundant_never_means_less_saving(times: list[int], layer: int) -> None:
    def saving(recomputes: list[int]) -> float:
        steps = [
            checkpointed_step(i, layers=1, recomputes={0: n}) for i, n in enumerate(recomputes)
        ]
        return cost_of(*steps).saving_pct

    more = [n + (place == layer) for place, n in enumerate(times)]
    assert saving(more) >= saving(times) - 1e-9


# -- on a GPU ------------------------------------------------------------------------------------


def gpu_layer(first: int, us: float) -> list[Call]:
    """Four operators, one kernel each, all but instant on the host."""
    return [
        op(str(call.name), launch(f"k{first + i}", us), seq=first + i)
        for i, call in enumerate(run(first))
    ]


def gpu_step(number: int, recomputes: int = 2) -> Call:
    """A step that the GPU limits: 4 ms of forward kernels, as much in every recompute."""
    base = 1000 * number
    forward = gpu_layer(base, 1000.0)
    again = [call for turn in range(recomputes) for call in gpu_layer(base + 100 * turn + 100, 1e3)]
    return step(
        number, *forward, *gradients(forward, again), synchronize(4000.0 * (1 + recomputes))
    )


def synchronize(us: float) -> Call:
    """The host waits until the GPU is done."""
    return Call("cudaDeviceSynchronize", "cuda_runtime", us=us)


def gpu_cost(*calls: Call) -> Cost:
    cost = cost_of(*calls)
    assert cost.device == "gpu"
    return cost


def test_on_a_gpu_kernel_time_is_what_counts() -> None:
    cost = gpu_cost(gpu_step(0), gpu_step(1))
    assert cost.step_ms == pytest.approx(12.0, rel=0.02)
    assert cost.recompute_ms == pytest.approx(8.0, rel=0.02)
    assert cost.redundant_recompute_ms == pytest.approx(4.0, rel=0.02)
    # The sample's own host time, 0.1 ms, is not what goes.
    assert cost.saving_pct == pytest.approx(100 / 3, rel=0.02)


def test_phases_of_a_step_by_kernels() -> None:
    phases = device_phases(studied(thread(gpu_step(0))))
    assert (phases.forward / 1e6).tolist() == pytest.approx([4.0], rel=0.01)
    assert (phases.redundant / 1e6).tolist() == pytest.approx([4.0], rel=0.01)
    total = phases.forward + phases.recompute + phases.redundant + phases.backward
    assert (total + phases.optimizer + phases.other).tolist() == pytest.approx(phases.step)


# Two steps of a Llama (8 layers of width 2,048, doubled checkpoints) on an H100, without shapes of
# most operators; recording began while 299 kernels of the step before were in the queue.
QUEUED = Path(__file__).parents[2] / "traces" / "gpu" / "h100-llama-queued.json.gz"
# Medians of ten steps with a checkpoint too many and without it, by CUDA events, no profiler.
TWICE_MS, ONCE_MS = 117.7, 94.7


def test_what_was_queued_when_recording_began_is_in_no_step() -> None:
    facts = study(load(QUEUED))
    events = json.loads(gzip.decompress(QUEUED.read_bytes()))["traceEvents"]
    marks = [e for e in events if e["name"].startswith("ProfilerStep#")]
    kernels = [e for e in events if e["cat"] in ("kernel", "gpu_memset", "gpu_memcpy")]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    ends = [[e["ts"] + e["dur"] for e in kernels if e["args"]["correlation"] not in launches]]
    for mark in marks:
        ends.append(
            [
                e["ts"] + e["dur"]
                for e in kernels
                if mark["ts"]
                <= launches.get(e["args"]["correlation"], 0)
                < mark["ts"] + mark["dur"]
            ]
        )
    over = [max(times) for times in ends]
    assert (facts.work.unlaunched, facts.work.queued) == (len(ends[0]),) * 2 == (299, 299)
    base = present(prepare(facts, np.array([])))
    assert (base.graph.measured / 1e3).tolist() == pytest.approx(np.diff(over).tolist(), abs=1)
    assert base.error < 1e-4
    cost = present(price(facts, [TWICE_MS] * 3))
    # 113.3 ms of a step are kernels; what the profiler makes the GPU wait is no part of it.
    assert cost.breakdown.other == pytest.approx(TWICE_MS - 113.3, abs=0.5)
    assert present(cost.doubt_ms)["unattributed"] < 0.5
    assert cost.predicted_low_ms < ONCE_MS < cost.predicted_high_ms


def test_an_idle_gpu_leaves_the_price_to_the_host() -> None:
    lazy: Thread = thread(step(0, gpu_step(0), us=90_000.0))
    cost = present(price(studied(lazy), ()))
    assert cost.device == "cpu"
    assert any("GPU is idle" in said for said in cost.assumptions)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_covered_is_the_length_of_the_union(pairs: list[tuple[int, int]]) -> None:
    start = np.array([first for first, _ in pairs], np.int64)
    end = start + np.array([length for _, length in pairs], np.int64)
    points = {point for first, length in pairs for point in range(first, first + length)}
    assert sum_covered(start, end) == len(points)
