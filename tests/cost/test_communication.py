"""Repeated collectives in traces whose sizes and overlaps are known by construction."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from recompute_scan.cost.phases import Repeated
from recompute_scan.cost.phases import repeated as add_up
from recompute_scan.cost.price import price
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import Kind, load
from tests.present import present
from tests.recompute.training import checkpointed_step, gradients, run, training_step
from tests.trace_builder import Call, annotation, launch, op, studied, thread

PUBLIC = Path(__file__).parents[2] / "traces" / "public"
BF16 = "c10::BFloat16"
BASE = "c10d::_allgather_base_"


def repeating(*collectives: Call, beside: tuple[Call, ...] = ()) -> RecomputeFacts:
    """A step whose recompute does these collectives, and ``beside`` in the backward pass."""
    forward = run(0)
    first, *rest = run(50)
    nodes = gradients(forward, [first, *collectives, *rest])
    nodes[-1] = replace(nodes[-1], inside=(*nodes[-1].inside, *beside))
    return studied(thread(training_step(0, *forward, *nodes)))


def of_recomputes(facts: RecomputeFacts) -> Repeated:
    return add_up(facts, facts.collectives.repeated)


def repeated(*collectives: Call, beside: tuple[Call, ...] = ()) -> Repeated:
    return of_recomputes(repeating(*collectives, beside=beside))


def nccl(name: str, *inside: Call, dims: Any = None, types: Any = None) -> Call:
    """One collective as NCCL records it; the range inside tells one side again."""
    return op(name, op("record_param_comms", *inside), dims=dims, types=types)


def gather(at: float | None = None, us: float = 40.0) -> Call:
    """8 processes gather 10 rows of 100 numbers each."""
    return nccl(
        BASE,
        annotation("nccl:_all_gather_base", launch("ncclDevKernel_AllGather", us, stream=9, at=at)),
        dims=[[80, 100], [10, 100], [], [], []],
        types=[BF16, BF16, "", "Scalar", "Scalar"],
    )


def gemm(at: float, us: float, stream: int = 7) -> Call:
    return op("aten::mm", launch("gemm", us, stream=stream, at=at))


def test_a_gathers_bytes_are_all_that_it_returns() -> None:
    assert repeated(gather()).bytes == 80 * 100 * 2
    assert repeated(gather(), gather()).bytes == 2 * 80 * 100 * 2


@pytest.mark.parametrize(
    ("collective", "size"),
    [
        (nccl("c10d::_reduce_scatter_base_", dims=[[5], [40]], types=["float", "float"]), 160),
        # A list has no type; the backend's own range has.
        (
            op(
                "c10d::allreduce_",
                op("nccl:all_reduce", dims=[[6, 2]], types=["c10::Half"]),
                dims=[[[6, 2], [3]], [], []],
                types=["TensorList", "", "Scalar"],
            ),
            30,
        ),
        (nccl("c10d::alltoall_base_", dims=[[7], [9]], types=["double", "double"]), 72),
        # No type, no shape, one side of two, two types at once: no word.
        (nccl("c10d::allreduce_", dims=[[[6, 2]], [], []], types=["TensorList", "", ""]), None),
        (nccl("c10d::allreduce_", dims=[[], [], []], types=["TensorList", "", ""]), None),
        (nccl("c10d::allreduce_"), None),
        (
            nccl(
                "c10d::allgather_",
                op("nccl:all_gather", dims=[[4]], types=["float"]),
                dims=[[], [[4]], []],
                types=["", "TensorList", ""],
            ),
            None,
        ),
        (nccl("c10d::_allgather_base_", dims=[[8], [4]], types=["float", "double"]), None),
        # Damaged.
        (nccl("c10d::broadcast_", dims=[[-4]], types=["float"]), None),
        (nccl("c10d::broadcast_", dims=[[2**60]], types=["float"]), None),
        (nccl("c10d::broadcast_", dims=7, types={"float": 1}), None),
        (nccl("c10d::broadcast_", dims=[[["x"]]], types=["TensorList"]), None),
    ],
)
def test_bytes_of_each_kind(collective: Call, size: int | None) -> None:
    assert repeated(collective).bytes == size


def test_one_collective_without_a_size_leaves_the_sum_unknown() -> None:
    found = repeated(gather(), nccl("c10d::allreduce_"))
    assert (found.count, found.bytes) == (2, None)


def test_gloos_own_ranges_tell_the_type_of_a_list() -> None:
    reduce = op("c10d::allreduce_", dims=[[[25]], []], types=["TensorList", ""])
    forward = run(0)
    again = [*run(50)[:2], reduce, *run(60)[2:]]
    main = thread(training_step(0, *forward, *gradients(forward, again)))
    for types, size in ((["double"], 200), (["double", "float"], None)):
        ranges = [op("gloo:all_reduce", dims=[[25]], types=[one]) for one in types]
        found = of_recomputes(studied(main, thread(*ranges, tid=9)))
        assert (found.count, found.bytes, found.exposed_ms) == (1, size, None)


@pytest.mark.parametrize(
    ("beside", "alone_us"),
    [
        ((), 40),
        # From 1000 to 1040 the collective runs.
        ((gemm(900, 50),), 40),
        ((gemm(900, 130),), 10),
        ((gemm(1010, 5),), 35),
        ((gemm(1010, 15), gemm(1015, 15, stream=8)), 20),
        ((gemm(990, 100),), 0),
        # What only copies, or communicates itself, hides nothing.
        ((op("aten::copy_", launch("Memcpy", 40, at=1000, category="gpu_memcpy")),), 40),
        ((op("aten::x", launch("ncclDevKernel_AllReduce", 40, stream=11, at=1000)),), 40),
    ],
)
def test_time_beside_which_nothing_computes(beside: tuple[Call, ...], alone_us: float) -> None:
    found = repeated(gather(at=1000), beside=beside)
    assert found.exposed_ms == pytest.approx(alone_us / 1000)


def test_two_at_once_count_once() -> None:
    assert repeated(gather(at=1000), gather(at=1020)).exposed_ms == pytest.approx(0.06)


def test_the_step_in_the_middle_counts() -> None:
    made = []
    for number, us in enumerate((10.0, 20.0, 90.0)):
        forward = run(1000 * number)
        again = [*run(1000 * number + 50)[:2], gather(us=us), *run(1000 * number + 60)[2:]]
        made.append(training_step(number, *forward, *gradients(forward, again)))
    found = of_recomputes(studied(thread(*made)))
    assert (found.count, found.bytes) == (1, 16000)
    assert found.exposed_ms == pytest.approx(0.02)


def test_the_price_states_them() -> None:
    cost = present(price(repeating(gather(at=1000), beside=(gemm(1010, 30),)), ()))
    assert cost.repeated_collectives_ms == pytest.approx(0.04)
    assert cost.repeated_collectives_count == 1
    assert cost.repeated_collectives_bytes == 16000
    assert cost.repeated_collectives_exposed_ms == pytest.approx(0.01)


def test_without_collectives_there_is_nothing_to_state() -> None:
    cost = present(price(studied(thread(checkpointed_step(0))), ()))
    assert cost.repeated_collectives_ms is cost.repeated_collectives_count is None


def test_the_record_of_a_wait_is_no_collective() -> None:
    """NCCL gives it the name of the record of the collective itself."""
    wait = op("record_param_comms", Call("cudaStreamWaitEvent", "cuda_runtime"))
    direct = op("record_param_comms", annotation("nccl:all_to_all"))
    launching = op("record_param_comms", launch("ncclKernel_SendRecv"))
    facts = repeating(gather(), wait, direct, launching)
    found = facts.collectives
    assert len(found.rows) == len(found.repeated) == 3


def test_an_unfinished_step_does_not_count() -> None:
    forward = run(0)
    whole = training_step(0, *forward, *gradients(forward, [*run(50), gather()]))
    facts = studied(thread(whole, training_step(1, gather(), *run(100))))
    assert facts.complete_count == 1
    assert len(facts.collectives.rows) == 1


def test_a_published_trace_of_eight_gpus() -> None:
    """Nothing is repeated in it; what all its collectives come to was read from its arguments."""
    facts = study(load(PUBLIC / "mi300x-resnet-checkpointed.json.gz"))
    collectives = facts.collectives
    none = of_recomputes(facts)
    assert (none.count, none.bytes, none.exposed_ms) == (0, 0, 0)
    found = add_up(facts, collectives.rows)
    assert found.count == 4  # and two waits
    assert found.bytes == (2873320 + 8816192 + 9600) * 2 + 20 * 8
    assert found.exposed_ms == pytest.approx(_exposed_by_sweep(facts))


def _exposed_by_sweep(facts: RecomputeFacts) -> float:
    """Median over the steps, counted from edge to edge of the kernels, by their names alone."""
    kernels, calls, trace = facts.kernels, facts.calls, facts.trace
    times = []
    for at in facts.steps:
        edges = []
        for place, event in enumerate(kernels.event.tolist()):
            talks = trace.names[trace.name[event]].startswith("nccl")
            launch = int(kernels.launch[place])
            begin = int(calls.start[launch]) if launch >= 0 else -1
            if (talks and not at.start <= begin < at.end) or trace.kind[event] != Kind.KERNEL:
                continue
            edges += [(int(kernels.start[place]), 1, talks), (int(kernels.end[place]), -1, talks)]
        edges.sort(key=lambda edge: edge[0])
        now, talking, computing, alone = 0, 0, 0, 0
        for time, change, talks in edges:
            alone += time - now if talking and not computing else 0
            talking, computing, now = (
                talking + change * talks,
                computing + change * (not talks),
                time,
            )
        times.append(alone / 1e6)
    return median(times)
