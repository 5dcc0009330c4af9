"""Steps of a trace, and which call launched which kernel."""

import numpy as np

from recompute_scan.trace.calls import StepSpan, find_steps, link_kernels, nest, step_of
from recompute_scan.trace.columns import Trace
from tests.trace.kineto_reading import parse
from tests.trace_builder import (
    as_bytes,
    document,
    launch,
    loaded,
    op,
    step,
    thread,
)


def steps_of(trace: Trace) -> list[StepSpan]:
    return find_steps(nest(trace))


def test_a_step_marked_on_two_threads_counts_once() -> None:
    steps = steps_of(
        loaded(thread(step(1, op("a"), us=80)), thread(step(1, op("b"), us=10), tid=2, start=20))
    )
    assert steps == [StepSpan(1, 0, 80_000)]


def test_without_marks_and_optimizer_the_whole_trace_is_one_step() -> None:
    calls = nest(loaded(thread(op("forward"), op("backward"))))
    assert find_steps(calls) == [StepSpan(0, 0, int(calls.end.max()) + 1)]


def test_steps_are_half_open() -> None:
    steps = [StepSpan(4, 100, 200), StepSpan(5, 200, 300)]
    times = np.array([99, 100, 199, 200, 299, 300])
    assert step_of(steps, times).tolist() == [-1, 0, 0, 1, 1, -1]
    assert step_of([], times).tolist() == [-1] * 6


def linked(trace: Trace) -> dict[str, str | None]:
    """Name of each kernel and of the operator that launched it."""
    calls = nest(trace)
    kernels = link_kernels(trace, calls)
    found: dict[str, str | None] = {}
    for event, row in zip(kernels.event, kernels.launch, strict=True):
        above = calls.parent[row] if row >= 0 else -1
        name = calls.names[calls.name[above]] if above >= 0 else None
        found[trace.names[trace.name[event]]] = name
    return found


def test_kernels_stand_in_order_of_time_however_late() -> None:
    trace = loaded(
        thread(
            op("aten::mm", launch("late", stream=9, at=9_000.0)), op("aten::add", launch("soon"))
        )
    )
    kernels = link_kernels(trace, nest(trace))
    assert [trace.names[trace.name[event]] for event in kernels.event] == ["soon", "late"]
    assert linked(trace) == {"soon": "aten::add", "late": "aten::mm"}


def test_a_kernel_without_record_of_its_launch_belongs_to_nobody() -> None:
    written = document(thread(op("aten::mm", launch("lost")), op("aten::add", launch("kept"))))
    events = written["traceEvents"]
    (launched,) = [
        e for e in events if e["cat"] == "cuda_runtime" and e["args"]["correlation"] == 1
    ]
    events.remove(launched)
    # The operator number that some versions write must not be mistaken for the correlation.
    for event in events:
        event["args"]["External id"] = 1
    assert linked(parse(as_bytes(written), "t")) == {"lost": None, "kept": "aten::add"}


def test_kernels_ahead_of_all_that_were_launched_on_their_stream_were_queued() -> None:
    names = ("ahead", "first", "between", "last", "aside early", "aside late")
    streams = {"aside early": 9, "aside late": 9}
    calls = [op("aten::mm", launch(name, stream=streams.get(name, 7))) for name in names]
    written = document(thread(*calls))
    events = written["traceEvents"]
    starts = {"ahead": -5, "aside early": -4, "first": 30, "between": 40, "aside late": 45}
    number = {}
    for event in [e for e in events if e["cat"] == "kernel"]:
        event["ts"] = starts.get(event["name"], 50)
        number[event["name"]] = event["args"]["correlation"]
    for lost in ({"ahead", "between", *streams}, set(names)):
        gone = {number[name] for name in lost}
        kept = [
            e for e in events if e["cat"] != "cuda_runtime" or e["args"]["correlation"] not in gone
        ]
        trace = parse(as_bytes({**written, "traceEvents": kept}), "t")
        kernels = link_kernels(trace, nest(trace))
        queued = {trace.names[code] for code in trace.name[kernels.event[kernels.queued]]}
        # Without any launch on record, nothing tells which were queued.
        assert queued == ({"ahead", "aside early"} if len(lost) < len(names) else set())


def test_all_kernels_of_a_graph_belong_to_its_launch() -> None:
    # One `cudaGraphLaunch`, many kernels with its correlation, none with a launch of its own.
    graphs = [launch("recomputed"), launch("again")]
    written = document(thread(op("forward", graphs[0]), op("backward", graphs[1])))
    events = written["traceEvents"]
    for kernel in [e for e in events if e["cat"] == "kernel"]:
        events += [{**kernel, "name": f"{kernel['name']} {n}"} for n in range(3)]
    links = linked(parse(as_bytes(written), "t"))
    for name, where in links.items():
        assert where == ("backward" if name.startswith("again") else "forward")
    assert len(links) == 8


def test_a_kernel_without_correlation_belongs_to_nobody() -> None:
    written = document(thread(op("aten::mm", launch("gemm"))))
    for event in written["traceEvents"]:
        event["args"].pop("correlation", None)
    assert linked(parse(as_bytes(written), "t")) == {"gemm": None}
