"""Verdicts from attention's kernels, where a trace has no operators or hides them."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute_scan.analysis.pipeline import result_of
from recompute_scan.result import Result
from recompute_scan.trace import load
from tests.effort import examples
from tests.recompute.attention_traces import ALL, FLASH_2, Layout, each_layer, recorded
from tests.recompute.training import gradients, run
from tests.sources.nsys_builder import from_trace
from tests.trace.kineto_reading import parse
from tests.trace_builder import Call, as_bytes, document, node, op, step, thread

Event = dict[str, Any]
PUBLIC = Path(__file__).parents[2] / "traces" / "public"
COMPILED = PUBLIC / "h100-nanogpt-compiled.json.gz"
VERDICTS = {0: "none", 1: "full", 2: "doubled", 3: "doubled"}


def answer(events: list[Event]) -> Result:
    return result_of(parse(as_bytes({"traceEvents": events}), "kernels"))


def answer_to(layout: Layout) -> Result:
    return answer(recorded(layout))


def counts(result: Result) -> tuple[float, float, float]:
    attention = result.attention
    assert attention is not None
    return attention.forward_per_step, attention.recomputed_per_step, attention.backward_per_step


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("levels", VERDICTS)
def test_device_activity_alone(family: str, levels: int) -> None:
    layout = Layout(6, each_layer(6, levels), ALL[family])
    result = answer_to(layout)
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert (result.evidence_level, result.confidence) == ("kernels", "medium")
    assert counts(result) == (6, 6 * levels, 6)
    assert [(f.family, f.kind) for f in result.families] == [(family, "attention")]
    assert [(s.index, s.complete, s.micro_batches) for s in result.steps] == [
        (7, True, 1), (8, True, 1), (9, True, 1),
    ]  # fmt: skip
    # Of anything but attention and what runs with it nothing is known.
    assert (result.mean_recompute, result.recomputed_share) == (None, None)
    assert result.cost is not None
    assert (result.cost.method, result.cost.redundant_recompute_ms > 0) == ("kernels", levels > 1)
    assert result.regions == ()
    assert any("Only attention" in warning for warning in result.warnings)
    assert "attention" in result.headline


@pytest.mark.parametrize("levels", VERDICTS)
@pytest.mark.parametrize("graphs", ["passes", "steps"])
def test_graphs(levels: int, graphs: str) -> None:
    """Kernels of a graph share one launch, of a whole step or of a pass."""
    layout = Layout(5, each_layer(5, levels), graphs=graphs)  # type: ignore[arg-type]
    result = answer_to(layout)
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert counts(result) == (5, 5 * levels, 5)
    # Of one graph a step, only the order tells.
    assert result.confidence == ("medium" if graphs == "passes" else "low")


@pytest.mark.parametrize("levels", VERDICTS)
@pytest.mark.parametrize("threads", ["one", "none"])
def test_without_a_thread_of_autograds_own(levels: int, threads: str) -> None:
    layout = Layout(4, each_layer(4, levels), threads=threads, micro_batches=2)  # type: ignore[arg-type]
    result = answer_to(layout)
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert result.confidence == "low"
    per_step = 8 if threads == "one" else 24
    assert counts(result) == (per_step, per_step * levels, per_step)
    assert any("kernel order" in warning for warning in result.warnings)
    unmarked = any("The trace does not mark steps" in warning for warning in result.warnings)
    assert unmarked == (threads == "none")


@pytest.mark.parametrize(
    "annotations", ["", "step {}", "train_iter:{}", "Iteration {}", "epoch {}"]
)
def test_steps_by_ranges_of_the_users_own(annotations: str) -> None:
    result = answer_to(Layout(4, each_layer(4, 2), annotations=annotations))
    named = annotations not in ("", "epoch {}")
    assert result.verdict == "doubled"
    assert [s.index for s in result.steps] == ([7, 8, 9] if named else [0])
    assert result.confidence == ("medium" if named else "low")
    assert counts(result) == ((4, 8, 4) if named else (12, 24, 12))


def test_evaluation_is_no_recompute_where_threads_tell() -> None:
    result = answer_to(Layout(4, evaluations=2))
    assert (result.verdict, result.recompute_per_backward) == ("none", 0.0)
    assert any("Attention forwards without a backward: 24" in w for w in result.warnings)


@pytest.mark.parametrize("layout", [
    Layout(4, evaluations=1, threads="one", annotations=""),
    Layout(4, [(0, 3)], threads="one"),
    Layout(1, [(0, 0)], threads="one"),
])  # fmt: skip
def test_orders_that_cannot_be_read_are_not_guessed(layout: Layout) -> None:
    result = answer_to(layout)
    assert (result.verdict, result.recompute_per_backward) == ("inconclusive", None)
    assert result.evidence_level == "kernels"
    assert "other forward passes" in (result.reason or "")


def test_one_layer_is_enough_where_threads_tell() -> None:
    assert answer_to(Layout(1, [(0, 0)] * 2)).recompute_per_backward == 2.0


def test_kernels_without_a_launch_belong_to_no_step() -> None:
    # What the first forward pass launched, and the first of four layers' backwards.
    layout = Layout(4, each_layer(4), missing=4 * 3 + 1)
    result = answer_to(layout)
    assert (result.verdict, result.recompute_per_backward) == ("full", 1.0)
    assert result.health["kernels_without_launch"] == 13
    assert [s.complete for s in result.steps] == [False, True, True]


def test_steps_that_differ_are_named() -> None:
    once, twice = (recorded(Layout(4, each_layer(4, m), steps=3)) for m in (1, 2))
    later = max(event["ts"] for event in once) + 100
    moved = [
        {**e, "ts": e["ts"] + later, "name": e["name"].replace("Step#7", "Step#17")}
        | {"args": {k: v + 5000 * (k == "correlation") for k, v in e["args"].items()}}
        for e in twice
        if e["ts"] < 1000 + (max(x["ts"] for x in twice) - 1000) // 3
        if "Step#8" not in e["name"]
    ]  # fmt: skip
    result = answer(once + moved)
    assert (result.verdict, result.confidence) == ("doubled", "low")
    assert any("17 (2)" in warning for warning in result.warnings)


@settings(max_examples=examples(50), deadline=None)
@given(
    layers=st.integers(2, 5),
    levels=st.integers(0, 2),
    micro_batches=st.integers(1, 3),
    evaluations=st.integers(0, 2),
    start=st.integers(-(10**9), 10**9),
    factor=st.sampled_from([1, 2, 16]),
    tid=st.integers(1, 2**31),
    order=st.randoms(use_true_random=False),
)
def test_clocks_names_and_order_do_not_matter(
    layers: int, levels: int, micro_batches: int, evaluations: int, start: int, factor: int,
    tid: int, order: Any,
) -> None:  # fmt: skip
    layout = Layout(
        layers, each_layer(layers, levels), steps=2, micro_batches=micro_batches,
        evaluations=evaluations,
    )  # fmt: skip
    events = [
        {**e, "ts": start + factor * e["ts"], "dur": factor * e["dur"], "tid": e["tid"] + tid}
        for e in recorded(layout)
    ]
    strangers = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_tst_64x8", "pid": 0, "tid": 9, "args": {}}
        | {"ts": e["ts"], "dur": 1}
        for e in events[::7]
    ]
    events += strangers
    order.shuffle(events)
    result = answer(events)
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert {s.micro_batches for s in result.steps} == {micro_batches}


@given(st.integers(0, 11), st.integers(2, 3))
@settings(max_examples=examples(30), deadline=None)
def test_a_recompute_less_counts_one_less(number: int, levels: int) -> None:
    events = recorded(Layout(4, each_layer(4, levels), steps=3))
    launched_by_autograd = {
        e["args"]["correlation"] for e in events if e["cat"] == "cuda_runtime" and e["tid"] == 2
    }
    recomputes = [
        e for e in events
        if e["name"] == FLASH_2.forward and e["args"]["correlation"] in launched_by_autograd
    ]  # fmt: skip
    before, after = (
        sum(s.recomputed_ops for s in answer(kept).steps)
        for kept in (events, [e for e in events if e is not recomputes[number]])
    )
    assert (before, after) == (12 * levels, 12 * levels - 1)


# Nsight Systems' exports hold kernels and launches; operators only under emit_nvtx.


@pytest.mark.parametrize("levels", VERDICTS)
def test_nsight_exports(levels: int, tmp_path: Path) -> None:
    layout = Layout(4, each_layer(4, levels), ALL["cudnn_attention"], annotations="step {}")
    trace = parse(as_bytes({"traceEvents": recorded(layout)}), "kernels")
    result = result_of(load(from_trace(trace, tmp_path / "report.sqlite", by_id=True)))
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert (result.evidence_level, result.confidence) == ("kernels", "medium")
    assert [s.index for s in result.steps] == [7, 8, 9]


# Operators are there, and the attention is not among them.


def beside(events: list[Event], *calls: Call) -> list[Event]:
    """The same with a step of these calls at its end."""
    shown = document(thread(step(99, *calls)), tid=1)["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events)
    return events + [{**event, "ts": event["ts"] + last + 50} for event in shown]


@pytest.mark.parametrize("levels", VERDICTS)
def test_graphs_beside_operators(levels: int) -> None:
    layout = Layout(4, each_layer(4, levels), graphs="passes")
    ends = run(0, ("embedding", "mse_loss"))
    result = answer(beside(recorded(layout), *ends, *gradients(ends)))
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert result.evidence_level == "kernels"


def test_a_graph_whose_kernels_say_nothing_is_no_none() -> None:
    names = replace(FLASH_2, forward="nvjet_a", backward="nvjet_b", before=(), behind=())
    events = recorded(Layout(4, graphs="passes", names=names))
    inside = document(thread(step(99, *run(0), *gradients(run(0)))))["traceEvents"]
    assert answer(inside).verdict == "none"
    # The same step with its backward's work in a graph that a node launches.
    graph = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 100, "tid": 1}
    (formula,) = [e for e in inside if e["name"] == "GeluBackward0"]
    graph |= {"ts": formula["ts"] + 1, "dur": 1, "args": {"correlation": 777}}
    kernel = {"ph": "X", "cat": "kernel", "name": "nvjet_c", "pid": 0, "tid": 7, "dur": 50}
    kernel |= {"ts": formula["ts"] + 9, "args": {"correlation": 777, "stream": 7}}
    result = answer([*inside, graph, kernel])
    assert result.verdict == "inconclusive"
    assert "graph launches" in (result.reason or "")
    assert answer(events).verdict == "inconclusive"


@pytest.mark.parametrize("levels", VERDICTS)
@pytest.mark.parametrize("graphs", ["", "passes"])
def test_compiled_code(levels: int, graphs: Literal["", "passes"]) -> None:
    """A compiled backward is judged by attention that runs again in it, and never cleared by it."""
    graph = op("CompiledFunction", op("aten::mm"), seq=0)
    backward = node("CompiledFunctionBackward", op("aten::mm"), seq=0)
    events = recorded(Layout(4, each_layer(4, levels), graphs=graphs))
    result = answer(beside(events, graph, backward))
    if levels:
        assert (result.verdict, result.evidence_level) == (VERDICTS[levels], "kernels")
    else:
        assert result.verdict == "inconclusive"
        assert "compiled" in (result.reason or "")
        assert graphs or result.evidence_level == "autograd"
    assert graphs or counts(result) == (4, 4 * levels, 4)


# A real one: ten attention layers, four steps, 27 attention kernels of earlier steps unlaunched.


def stripped(keep: Callable[[Event], bool]) -> Result:
    written = json.loads(gzip.decompress(COMPILED.read_bytes()))
    written["traceEvents"] = [event for event in written["traceEvents"] if keep(event)]
    return result_of(parse(as_bytes(written), "stripped"))


@pytest.mark.parametrize(
    ("keep", "confidence", "steps", "counted"),
    [
        (lambda category: category != "cpu_op", "medium", [10, 11, 12, 13], (10, 0, 10)),
        (lambda category: category not in ("cpu_op", "user_annotation"), "low", [0], (40, 0, 40)),
        # Seven backwards and seven forwards stand in passes that the recording cut.
        (lambda category: category == "kernel", "low", [0], (50, 0, 57)),
    ],
    ids=["operators", "steps", "launches"],
)
def test_a_real_trace_without_its(
    keep: Callable[[str | None], bool],
    confidence: str,
    steps: list[int],
    counted: tuple[float, float, float],
) -> None:
    result = stripped(lambda event: keep(event.get("cat")))
    assert (result.verdict, result.evidence_level) == ("none", "kernels")
    assert (result.confidence, [s.index for s in result.steps]) == (confidence, steps)
    assert counts(result) == counted


def test_a_real_trace_with_recomputes_put_in() -> None:
    """Before each backward, autograd's thread launches the forward that it belongs to, twice."""
    written = json.loads(gzip.decompress(COMPILED.read_bytes()))["traceEvents"]
    events = [event for event in written if event.get("cat") != "cpu_op"]
    forward = next(e for e in events if "FlashAttnFwdSm90" in e["name"])
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]
    }
    put_in: list[Event] = []
    for event in events:
        if event.get("cat") == "kernel" and "FlashAttnBwdSm90" in event["name"]:
            launch = launches.get(event["args"]["correlation"])
            if launch is None:
                continue
            for turn in (1, 2):
                mine = {"correlation": 10**8 + len(put_in)}
                put_in += [
                    {**launch, "ts": launch["ts"] - 0.01 * turn, "dur": 0.001, "args": mine},
                    {**forward, "ts": event["ts"] - 0.01 * turn, "dur": 0.005, "args": mine},
                ]
    assert len(put_in) == 2 * 2 * 40
    result = answer(events + put_in)
    assert (result.verdict, result.recompute_per_backward) == ("doubled", 2.0)
    assert counts(result) == (10, 20, 10)
