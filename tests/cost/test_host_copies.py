"""Copies between host and device: counted by plain loops over the JSON, by loops that were recorded
and counted what they copied, and in traces whose copies are known by construction.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recompute_scan.analysis.answer import result_of
from recompute_scan.cost.host_copies import host_copies
from recompute_scan.recompute.facts import study
from recompute_scan.result import HostCopies, HostCopy
from recompute_scan.trace import Trace, load
from recompute_scan.trace.nsys.export import load_nsys
from tests.cases import device as rig
from tests.recompute.test_device_thread import run
from tests.sources.nsys_builder import SCHEMA, Export
from tests.trace.kineto_reading import parse
from tests.trace_builder import (
    Call,
    Thread,
    as_bytes,
    document,
    launch,
    node,
    op,
    optimizer,
    step,
    thread,
)

PUBLIC = Path(__file__).parents[2] / "traces" / "public"
MIB = 1024**2

needs_rig = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < rig.FEWEST,
    reason="torch takes no backend in Python before 2.13",
)


# Loops that counted what they copied.

LOOPS = {
    "plain": "none",
    "saved_on_cpu": "seen",
    "saved_around_checkpoint": "seen",
    "accumulated": "seen",
    "stashed": "seen",
    "offloaded_checkpoints": "seen",
    "batch_uploaded": "none",
    "watched": "none",
    "offloaded_optimizer": "none",
    "offloaded_weights": "none",
    "swapped_blocks": "untold",
    "weights_and_activations": "seen",
    "outputs_kept": "untold",
}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    run("-m", "tests.cost.offloads", folder)
    return folder


@needs_rig
@pytest.mark.parametrize(("name", "offload"), LOOPS.items())
def test_a_recorded_loop_copied_what_it_counted(loops: Path, name: str, offload: str) -> None:
    copied = json.loads((loops / f"{name}.copied.json").read_text())
    found = host_copies(study(load(loops / f"{name}.json.gz")))
    assert found is not None
    assert found.steps == 3
    assert counted(found) == copied
    assert found.offload == offload
    there, back = (
        copied.get(f"{where} bytes", 0) for where in ("to-host forward", "to-device backward")
    )
    if offload == "seen":
        loaded_again = copied.get("to-device forward bytes", 0)
        assert found.offloaded_bytes == min(there, back - loaded_again)
    else:
        assert found.offloaded_bytes is None
    assert (found.reason is None) == (offload != "untold")


def counted(found: HostCopies) -> dict[str, float]:
    """Numbers and bytes by direction and phase."""
    sums: Counter[str] = Counter()
    for one in found.copies:
        assert one.bytes is not None
        sums[f"{one.direction} {one.phase} count"] += one.count  # type: ignore[assignment]
        sums[f"{one.direction} {one.phase} bytes"] += one.bytes  # type: ignore[assignment]
    return dict(sums)


# Other people's traces.

STEPS = {
    "a100-recommender-torch1.13": 6,
    "a100-resnet-ddp": 3,
    "cpu-only-gloo-rank34": None,
    "h100-nanogpt-compiled": 4,
    "mi300x-resnet-checkpointed": 3,
    "mi300x-resnet18-ddp": 5,
    "rtx2080ti-linear-no-steps": 40,
    "v100-megatron-tp2-rank0": 1,
    "v100-megatron-tp2-rank1": 1,
    "v100-resnet-ddp-rounded-times": 5,
    "v100-resnet50-torch1.8": 6,
    "v100-resnet50-torch1.9": 6,
    "v100-torchrec": 3,
}
# No step holds a backward pass.
INFERENCE = ("a100-segment-anything-inference", "h100-qwen-inference")


def events_of(name: str) -> list[dict[str, Any]]:
    read = json.loads(gzip.decompress((PUBLIC / f"{name}.json.gz").read_bytes()))
    found: list[dict[str, Any]] = read["traceEvents"] if isinstance(read, dict) else read
    return [event for event in found if event.get("ph") == "X"]


def plain_rows(name: str, *, by_step: bool) -> dict[tuple[str, str], list[float]]:
    """Number, bytes, time and time without a kernel beside (µs), by direction and memory."""
    events = events_of(name)
    marks = [e for e in events if str(e["name"]).startswith("ProfilerStep#")]
    asked = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if str(e.get("cat")) in ("cuda_runtime", "Runtime", "cuda_driver")
        and "correlation" in e.get("args", {})
    }
    kernels: dict[Any, list[tuple[float, float]]] = {}
    for e in events:
        if e.get("cat") in ("kernel", "Kernel"):
            kernels.setdefault(e["pid"], []).append((float(e["ts"]), float(e["ts"]) + e["dur"]))
    rows: dict[tuple[str, str], list[float]] = {}
    for e in events:
        said = str(e["name"])
        if e.get("cat") not in ("gpu_memcpy", "Memcpy") or said[:11] not in (
            "Memcpy HtoD",
            "Memcpy DtoH",
        ):
            continue
        begun = asked.get(e["args"]["correlation"], float(e["ts"]))
        if by_step and not any(m["ts"] <= begun < m["ts"] + m["dur"] for m in marks):
            continue
        memory = "pinned" if "Pinned" in said else "pageable"
        row = rows.setdefault((said[7:11], memory), [0, 0, 0, 0])
        start, end = float(e["ts"]), float(e["ts"]) + e["dur"]
        row[0] += 1
        row[1] += e["args"]["bytes"]
        row[2] += e["dur"]
        row[3] += without(start, end, kernels.get(e["pid"], []))
    return rows


def without(start: float, end: float, others: list[tuple[float, float]]) -> float:
    """How much of an interval none of the others covers, piece by piece."""
    left = [(start, end)]
    for begin, finish in others:
        left = [
            piece
            for one in left
            for piece in ((one[0], min(one[1], begin)), (max(one[0], finish), one[1]))
            if piece[0] < piece[1]
        ]
    return sum(last - first for first, last in left)


@pytest.mark.parametrize("name", [*STEPS, *INFERENCE])
def test_public_traces_by_a_plain_loop(name: str) -> None:
    found = host_copies(study(load(PUBLIC / f"{name}.json.gz")))
    if name == "cpu-only-gloo-rank34":
        assert found is None
        return
    assert found is not None
    told = name in STEPS
    assert found.steps == (STEPS[name] if told else 0)
    assert found.offload == ("none" if told else "untold")
    short = {"to-host": "DtoH", "to-device": "HtoD"}
    rows: dict[tuple[str, str], list[float]] = {}
    for one in found.copies:
        row = rows.setdefault((short[one.direction], one.memory), [0, 0, 0, 0])
        for place, value in enumerate((one.count, one.bytes, one.time_ms, one.alone_ms)):
            assert value is not None
            row[place] += value * max(1, found.steps) * (1000 if place > 1 else 1)
    expected = plain_rows(name, by_step=told)
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        assert row == pytest.approx(expected[key], rel=1e-6, abs=0.01), key


# By construction.


def copy(
    direction: str,
    size: int | None,
    us: float = 10.0,
    *,
    memory: str = "Pinned",
    stream: int = 20,
    at: float | None = None,
) -> Call:
    """An operator that copies between host and device."""
    name = {"out": f"Memcpy DtoH (Device -> {memory})", "in": f"Memcpy HtoD ({memory} -> Device)"}
    return copying(name[direction], size, us, stream=stream, at=at)


def copying(name: str, size: int | None, us: float = 10.0, **where: Any) -> Call:
    call = launch(name, us, category="gpu_memcpy", **where)
    return op("aten::copy_", replace(call, name="cudaMemcpyAsync", args={"moves": size}))


def trained(
    forward: tuple[Call, ...] = (),
    backward: tuple[Call, ...] = (),
    *,
    before: tuple[Call, ...] = (),
    update: tuple[Call, ...] = (),
    number: int = 0,
) -> Call:
    """A step of one linear layer, with copies in each of its phases."""
    first = 10 * number
    return step(
        number,
        *before,
        op("aten::linear", launch("gemm", 5.0), seq=first),
        *forward,
        op("aten::gelu", launch("gelu", 5.0), seq=first + 1),
        node("GeluBackward0", op("aten::gelu_backward", launch("gelu_b", 5.0)), seq=first + 1),
        *backward,
        node("AddmmBackward0", op("aten::mm", launch("gemm", 5.0)), seq=first),
        optimizer(op("aten::add_", launch("add", 5.0)), *update),
        us=1000,
    )


def made(*steps: Call, change: Any = lambda event: None) -> HostCopies:
    """What is found in these steps; ``change`` is given each copy's event."""
    found = host_copies(study(written(thread(*steps), change=change)))
    assert found is not None
    return found


def written(*threads: Thread, change: Any = lambda event: None) -> Trace:
    doc = document(*threads)
    sizes = {
        event["args"]["correlation"]: event["args"].pop("moves")
        for event in doc["traceEvents"]
        if "moves" in event["args"]
    }
    for event in doc["traceEvents"]:
        size = sizes.get(event["args"].get("correlation"))
        if event["cat"] == "gpu_memcpy" and size is not None:
            event["args"]["bytes"] = size
        if event["cat"] == "gpu_memcpy":
            change(event)
    return parse(as_bytes(doc), "copies")


def test_each_phase_has_its_own_copies() -> None:
    found = made(
        trained(
            forward=(copy("out", 4 * MIB),),
            backward=(copy("in", 4 * MIB),),
            before=(copy("in", 100, memory="Pageable", stream=7),),
            update=(copy("out", 8),),
        )
    )
    assert {
        (one.direction, one.memory, one.phase, one.count, one.bytes, one.own_stream)
        for one in found.copies
    } == {
        ("to-host", "pinned", "forward", 1, 4 * MIB, True),
        ("to-device", "pinned", "backward", 1, 4 * MIB, True),
        ("to-device", "pageable", "rest", 1, 100, False),
        ("to-host", "pinned", "rest", 1, 8, True),
    }
    assert (found.offload, found.offloaded_bytes) == ("seen", 4 * MIB)


def test_figures_are_means_over_the_steps() -> None:
    found = made(
        trained(forward=(copy("out", 4 * MIB),), backward=(copy("in", 4 * MIB),)),
        trained(number=1),
    )
    assert found.steps == 2
    assert {(one.count, one.bytes, one.time_ms) for one in found.copies} == {(0.5, 2 * MIB, 0.005)}
    assert found.offloaded_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("sent", "returned", "offload"),
    [
        # Less than the allocator's smallest piece of a device's memory frees nothing.
        ((2 * MIB,), (2 * MIB,), "seen"),
        ((2 * MIB - 1,), (2 * MIB - 1,), "none"),
        ((2 * MIB - 1,), (), "none"),
        ((MIB, MIB), (MIB, MIB), "seen"),
        ((MIB, MIB), (MIB,), "untold"),
        # Half of what left has to come back.
        ((2 * MIB, 2 * MIB), (2 * MIB,), "seen"),
        ((2 * MIB, 2 * MIB + 1), (2 * MIB,), "untold"),
        ((2 * MIB, 2 * MIB + 1), (2 * MIB + 1,), "seen"),
        ((4 * MIB,), (), "untold"),
        # As many bytes, and other pieces.
        ((4 * MIB,), (3 * MIB, MIB), "untold"),
        # The same piece twice is not two.
        ((3 * MIB,), (3 * MIB, 3 * MIB), "seen"),
        ((3 * MIB, 3 * MIB, 3 * MIB), (3 * MIB,), "untold"),
        ((), (9 * MIB,), "none"),
    ],
)
def test_what_left_comes_back_in_the_same_pieces(
    sent: tuple[int, ...], returned: tuple[int, ...], offload: str
) -> None:
    forward = tuple(copy("out", size) for size in sent)
    backward = tuple(copy("in", size) for size in returned)
    assert made(trained(forward, backward)).offload == offload


def test_what_comes_in_during_the_forward_pass_too_is_weights() -> None:
    swapped = (copy("out", 4 * MIB), copy("in", 4 * MIB))
    assert made(trained(swapped, swapped)).offload == "untold"
    both = (copy("in", 4 * MIB), copy("in", 4 * MIB))
    assert made(trained(swapped, both)).offload == "seen"


def test_another_step_gives_nothing_back() -> None:
    found = made(
        trained((copy("out", 4 * MIB),)),
        trained(backward=(copy("in", 4 * MIB),), number=1),
    )
    assert found.offload == "untold"
    assert found.reason == (
        "In the forward passes of a step 2.0 MiB go to the host, and 0 B of it come back in the "
        "backward passes in pieces of the same sizes."
    )


def test_copies_without_bytes_tell_nothing() -> None:
    found = made(trained((copy("out", None),), (copy("in", None),)))
    assert [one.bytes for one in found.copies] == [None, None]
    assert (found.offload, found.offloaded_bytes) == ("untold", None)
    assert found.reason == "The trace does not say how many bytes copies move."
    # What comes in need not be known.
    assert made(trained(backward=(copy("in", None),))).offload == "none"


def test_copies_without_a_direction_tell_nothing() -> None:
    found = made(trained((copying("Memcpy", 4 * MIB),)))
    assert (found.copies, found.offload) == ((), "untold")
    assert found.reason == "Copies do not say where they come from and where they go."


@pytest.mark.parametrize(("size", "offload"), [(2 * MIB, "untold"), (2 * MIB - 1, "none")])
def test_copies_whose_launch_is_lost_have_no_phase(size: int, offload: str) -> None:
    found = made(
        trained((copy("out", size),)),
        change=lambda event: event["args"].update(correlation=10**6),
    )
    assert [one.phase for one in found.copies] == ["unknown"]
    assert found.offload == offload


def test_without_a_backward_pass_the_whole_recording_counts() -> None:
    forward = step(0, op("aten::linear", launch("gemm")), copy("out", 4 * MIB, at=5000.0), us=100)
    found = made(forward, step(1, copy("out", 4 * MIB), us=100))
    assert (found.steps, found.alone_pct, found.offload) == (0, None, "untold")
    assert found.copies == (
        HostCopy("to-host", "pinned", "unknown", 2, 8 * MIB, 0.02, 0.02, own_stream=True),
    )


def test_an_update_inside_the_backward_pass_is_the_rest() -> None:
    between = optimizer(op("aten::add_"), copy("out", 4 * MIB))
    found = made(trained(backward=(between, copy("in", 4 * MIB))))
    assert [one.phase for one in found.copies] == ["rest", "backward"]


@pytest.mark.parametrize(
    ("begin", "us", "alone_us"),
    [
        (0.0, 50.0, 50.0),  # before the kernel
        (90.0, 20.0, 10.0),
        (100.0, 100.0, 0.0),
        (50.0, 200.0, 100.0),  # around it
        (200.0, 10.0, 10.0),  # touches it
    ],
)
def test_time_that_no_kernel_runs_beside(begin: float, us: float, alone_us: float) -> None:
    body = trained((copy("out", 4 * MIB, us, at=5000 + begin),))
    beside = op("aten::mm", launch("gemm", 100.0, at=5100.0, stream=8))
    found = made(replace(body, inside=(*body.inside, beside)))
    (one,) = found.copies
    assert one.time_ms == pytest.approx(us / 1000)
    assert one.alone_ms == pytest.approx(alone_us / 1000)
    assert found.alone_ms == pytest.approx(alone_us / 1000)
    assert found.alone_pct == pytest.approx(100 * alone_us / 1000)


def test_two_copies_at_once_hold_up_a_step_once() -> None:
    found = made(
        trained(
            (copy("out", MIB, 100.0, at=5000.0),), (copy("in", MIB, 100.0, stream=21, at=5050.0),)
        )
    )
    assert [one.alone_ms for one in found.copies] == pytest.approx([0.1, 0.1])
    assert found.alone_ms == pytest.approx(0.15)


def test_another_devices_kernels_are_not_beside() -> None:
    def elsewhere(event: dict[str, Any]) -> None:
        event["pid"] = 1

    body = trained((copy("out", 4 * MIB, 100.0, at=5000.0),))
    beside = op("aten::mm", launch("gemm", 200.0, at=4950.0, stream=8))
    steps = replace(body, inside=(*body.inside, beside))
    assert made(steps).alone_ms == 0
    assert made(steps, change=elsewhere).alone_ms == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "direction", "memory"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "to-host", "pinned"),
        ("Memcpy DtoH (Device -> Pageable)", "to-host", "pageable"),
        ("Memcpy HtoD (Pageable -> Device)", "to-device", "pageable"),
        ("Memcpy HtoD (Host -> Device)", "to-device", "unknown"),  # ROCm
        ("CopyDeviceToHost", "to-host", "unknown"),  # ROCm, earlier
        ("CopyHostToDevice", "to-device", "unknown"),
        ("Memcpy M2D (MEMORY(Unknown) -> DEVICE)", "to-device", "unknown"),  # XPU
        ("Memcpy D2M (DEVICE -> MEMORY(Unknown))", "to-host", "unknown"),
        ("Memcpy HtoD", "to-device", "unknown"),  # Nsight Systems, without kinds of memory
        ("Memcpy DtoD (Device -> Device)", None, None),
        ("CopyDeviceToDevice", None, None),
        ("Memcpy PtoP (Device -> Device)", None, None),
        ("Memset (Device)", None, None),
        ("Memcpy HtoD<script>\x1b[31m", "to-device", "unknown"),
        ("Memcpy HtoDevice", None, None),
    ],
)
def test_names_of_copies(name: str, direction: str | None, memory: str | None) -> None:
    found = made(trained((copying(name, 10),)))
    assert [(one.direction, one.memory) for one in found.copies] == (
        [(direction, memory)] if direction else []
    )


@pytest.mark.parametrize("size", [-5, "12", 1.5, None, [1], 2**70, True, "x"])
def test_odd_bytes_cost_nothing_else(size: Any) -> None:
    def set_size(event: dict[str, Any]) -> None:
        event["args"]["bytes"] = size

    found = made(trained((copy("out", 1),)), change=set_size)
    assert [one.count for one in found.copies] == [1]
    assert found.copies[0].bytes == (12 if size == "12" else 1 if size is True else None)


def test_bytes_of_what_is_no_copy_are_passed_over() -> None:
    doc = document(thread(trained((copy("out", 4 * MIB),))))
    for event in doc["traceEvents"]:
        event["args"].pop("moves", None)
        event["args"]["bytes"] = 2**40 if event["cat"] != "gpu_memcpy" else 7
    trace = parse(as_bytes(doc), "copies")
    assert sorted(set(trace.bytes.tolist())) == [-1, 7]


def test_no_kernels_no_copies() -> None:
    assert (
        host_copies(study(parse(as_bytes(document(thread(step(0, op("aten::mm"))))), "x"))) is None
    )


def test_nsights_kinds_of_memory(tmp_path: Path) -> None:
    """Numbered from 0 there, unlike in CUPTI; an export without them tells the direction alone."""
    kinds = SCHEMA.replace("copyKind INTEGER NOT NULL", "copyKind INTEGER, srcKind, dstKind")
    for name, schema in (("kinds", kinds), ("none", SCHEMA)):
        export = Export(tmp_path / f"{name}.sqlite", schema)
        rows: list[dict[str, Any]] = []
        for kind, source, target in ((1, 0, 2), (1, 1, 2), (2, 2, 1), (2, 2, 7), (8, 2, 2)):
            row = export.copy(kind, 10 * len(rows), 10 * len(rows) + 5) | {"bytes": 2**40}
            told = {"srcKind": source, "dstKind": target} if name == "kinds" else {}
            rows.append(row | told)
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", rows)
        export.add("CUPTI_ACTIVITY_KIND_KERNEL", [export.kernel("gemm", 100, 200)])
        trace = load_nsys(export.path)
        copied = [trace.names[code] for code in trace.name[trace.bytes >= 0]]
        assert set(trace.bytes[trace.bytes >= 0].tolist()) == {2**40}
        memories = [
            "Pageable -> Device", "Pinned -> Device", "Device -> Pinned", "Device -> Unknown",
            "Device -> Device",
        ]  # fmt: skip
        ways = ["HtoD", "HtoD", "DtoH", "DtoH", "DtoD"]
        assert copied == (
            [f"Memcpy {way} ({memory})" for way, memory in zip(ways, memories, strict=True)]
            if name == "kinds"
            else [f"Memcpy {way}" for way in ways]
        )
        found = host_copies(study(trace))
        assert found is not None
        assert (found.steps, found.offload) == (0, "untold")
        assert sum(one.count for one in found.copies) == 4


def test_the_result_has_them() -> None:
    trace = written(thread(trained((copy("out", 4 * MIB),), (copy("in", 4 * MIB),))))
    result = result_of(trace)
    assert result.host_copies == host_copies(study(trace))
