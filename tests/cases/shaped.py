"""The trace that a GPU would have left of a recorded step, made from a recording of the ``rig``.

Operators, nodes, threads, their numbers and where each kernel was launched are real
(``tests/cases/device.py``); what cannot run there is recorded on the CPU, and its backward pass
moved to a thread of its own (``tests/cases/moved.py``). Kernels are added: names as GPUs have them,
grids and blocks, one or more streams, the device's clock behind the host's. Times of kernels depend
on the operator's shapes alone, so that a recompute takes as long as the first run.

Knows nothing of the analyser. What the step is worth without the redundant work is known from the
twin: the recording of the repaired case in the same shape.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .case import STEPS
from .device import LAUNCH
from .kernel_names import Event, Library, Vendor, kernels_of

US_LAUNCH = 3.0
LAG = 4.0
GAP = 0.8
# From the end of the last kernel to that of the call that waits for it.
NOTICED = 5.0
COMPUTE, NCCL = 7, 20
_STEP = "ProfilerStep#"


@dataclass(frozen=True)
class Shape:
    """How the device and the recording are.

    Attributes:
        name: Of the column in the table.
        kernel_us: What an ordinary kernel takes; much makes the device the limit, little the host.
        vendor: Whose names runtime calls and kernels bear.
        attention: Which attention kernels run.
        library: Whose norms and activations run.
        kept: What the recording holds: all, or no operators, or kernels alone; or one launch a
            step, of a CUDA graph that replays it, or of one that replays all but the backward pass.
        written: As Kineto writes it, or as an export of Nsight Systems.
        synchronised: Whether the host waits for the device after each step.
        communication: Whether gradients are reduced on a stream of their own.
        streams: Compute streams that the kernels of backward passes are on, by their operators.
        marked: Whether steps have ranges.
        early: The part of a kernel that is left when the next one of its stream begins.
        ranks: GPUs, each with a trace of its own.
    """

    name: str
    kernel_us: float = 400.0
    vendor: Vendor = "cuda"
    attention: str = "flash_2"
    library: Library = "torch"
    kept: Literal["all", "launches", "kernels", "graph", "graph-forward"] = "all"
    written: Literal["kineto", "nsight"] = "kineto"
    synchronised: bool = True
    communication: bool = False
    streams: int = 1
    marked: bool = True
    early: float = 0.0
    ranks: int = 1

    @property
    def tells_operators(self) -> bool:
        """Whether operators are in the recording."""
        return self.kept == "all"


SHAPES = (
    Shape("device-bound", kernel_us=3000.0),
    Shape("mixed"),
    Shape("launch-bound", kernel_us=4.0),
    Shape("steps-overlap", synchronised=False, attention="flash_3"),
    Shape("overlapping", early=0.2),
    Shape("nccl", communication=True, attention="cudnn"),
    Shape("ranks", communication=True, ranks=2),
    Shape("two-streams", streams=2, attention="efficient"),
    Shape("nvte", attention="transformer_engine", library="transformer_engine"),
    Shape("triton", attention="triton", library="triton"),
    Shape("rocm", vendor="rocm", attention="aotriton"),
    Shape("nsight", written="nsight"),
    Shape("launches", kept="launches"),
    Shape("nsight-cuda", kept="launches", written="nsight", marked=False),
    Shape("graph", kept="graph"),
    Shape("graph-forward", kept="graph-forward"),
    Shape("kernels", kept="kernels"),
    Shape("kernels-unsynced", kept="kernels", synchronised=False, attention="flash_3"),
    Shape("kernels-ck", kept="kernels", vendor="rocm", attention="composable_kernel"),
)


@dataclass
class Shaped:
    """A document in Kineto's form, and what its maker knows of it.

    Attributes:
        document: The trace.
        step_us: What a step took, host and device, a mean.
    """

    document: Event
    step_us: float


@dataclass
class _Device:
    """The kernels of one device, each on the first moment at which its stream is free."""

    shape: Shape
    free: dict[int, float] = field(default_factory=dict)
    kernels: list[Event] = field(default_factory=list)
    correlation: int = 100

    @property
    def done(self) -> float:
        """When the last kernel ends."""
        return max((k["ts"] + k["dur"] for k in self.kernels), default=0.0)

    def stream(self, backward: bool, kernel: str) -> int:
        """The stream of a kernel: as in programs, that of its operator, whatever ran before it."""
        streams = self.shape.streams if backward else 1
        base = COMPUTE if self.shape.vendor == "cuda" else 0
        return base + zlib.crc32(kernel.encode()) % streams

    def launch(self, name: str, us: float, at: float, stream: int, args: Event) -> Event:
        """A kernel launched at ``at``; what links the launch to it."""
        self.correlation += 1
        linked = {"correlation": self.correlation}
        start = max(at + LAG, self.free.get(stream, 0.0) + GAP)
        self.free[stream] = start + us * (1 - self.shape.early)
        self.kernels.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start}
            | {"dur": us, "args": {"device": 0, "stream": stream, **args, **linked}}
        )
        return linked


def shaped(recording: Event, shape: Shape, rank: int = 0) -> Shaped:
    """The recording of a case with its launches, as a GPU of that rank leaves it."""
    slower = replace(shape, kernel_us=shape.kernel_us * (1 + 0.05 * rank))
    device = _Device(slower)
    written, launches = _run(recording, slower, device)
    marks = [event for event in written if event["name"].startswith(_STEP)]
    begun, ended = min(event["ts"] for event in written), max(map(_end, written))
    took = (max(ended, device.done) - begun) / STEPS
    kept = written + launches
    if shape.kept == "launches":
        kept = (marks if shape.marked else []) + launches
    elif shape.kept == "kernels":
        kept = []
    elif shape.kept in ("graph", "graph-forward"):
        eager = [each for each in launches if each["tid"] not in {mark["tid"] for mark in marks}]
        eager = eager if shape.kept == "graph-forward" else []
        captured = [each for each in launches if each not in eager]
        kept = marks + eager + list(_replays(marks, captured, device.kernels))
    _number_anew(kept)
    cuda = shape.vendor == "cuda"
    about = {"id": 0, "name": "NVIDIA H100 80GB HBM3" if cuda else "AMD Instinct MI300X"}
    document = {"schemaVersion": 1, "deviceProperties": [about | {"numSms": 132}]}
    if shape.ranks > 1:
        group = {"backend": "nccl", "rank": rank, "world_size": shape.ranks}
        document["distributedInfo"] = group
    return Shaped(document | {"traceEvents": kept + device.kernels}, took)


def as_bytes(made: Shaped) -> bytes:
    """The document as a file holds it."""
    return json.dumps(made.document).encode()


def _run(recording: Event, shape: Shape, device: _Device) -> tuple[list[Event], list[Event]]:
    """What the host did, moved by what it waited, and its launches; the device has the kernels."""
    written: list[Event] = []
    launches: list[Event] = []
    shift = 0.0
    stacks: dict[object, list[Event]] = {}
    running: list[tuple[float, Event]] = []
    for event in _of_the_host(recording):
        # What follows a step waits for the device, where its end does.
        while running and event["ts"] >= running[0][0]:
            end, step = running.pop(0)
            wait = _waited(step, end + shift, shape, device, written)
            step["dur"] += wait
            shift += wait
        stack = stacks.setdefault(event["tid"], [])
        while stack and event["ts"] >= _end(stack[-1]):
            stack.pop()
        if event["name"] == LAUNCH:
            launches += _launched(event, stack, shift, shape, device)
            continue
        stack.append(event)
        moved = {**event, "ts": event["ts"] + shift, "name": _renamed(event["name"])}
        if event["name"].startswith(_STEP):
            running.append((_end(event), moved))
        written.append(moved)
    for end, step in running:
        step["dur"] += _waited(step, end + shift, shape, device, written)
    return written, launches


def _of_the_host(recording: Event) -> list[Event]:
    given = [event for event in recording["traceEvents"] if event.get("ph") == "X"]
    events = [event for event in given if event.get("cat") in ("cpu_op", "user_annotation")]
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _launched(
    event: Event, stack: Sequence[Event], shift: float, shape: Shape, device: _Device
) -> Iterator[Event]:
    """The launches of the operator that is running."""
    running = next((each for each in reversed(stack) if each["cat"] == "cpu_op"), None)
    operator = event.get("operator", running)
    backward = any("evaluate_function" in each["name"] for each in stack)
    begun = event["ts"] + shift
    kernels = list(
        kernels_of(operator, shape.kernel_us, shape.vendor, shape.attention, shape.library)
    )
    took = min(US_LAUNCH, event["dur"] / (len(kernels) + 1))
    for place, (name, us, args) in enumerate(kernels):
        at = begun + place * took
        linked = device.launch(name, us, at, device.stream(backward, name), args)
        yield _runtime("cudaLaunchKernel", shape, event, at, 0.9 * took, linked)
    if shape.communication and any("AccumulateGrad" in each["name"] for each in stack):
        at = begun + 0.8 * event["dur"]
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        linked = device.launch(name, shape.kernel_us, at, NCCL, {})
        took = min(1.0, 0.1 * event["dur"])
        yield _runtime("cudaLaunchKernelExC", shape, event, at, took, linked)


def _waited(step: Event, end: float, shape: Shape, device: _Device, written: list[Event]) -> float:
    """How long the host waits for the device at the end of a step, µs."""
    wait = device.done + NOTICED - end
    if not shape.synchronised or wait <= 0:
        return 0.0
    written.append(_runtime("cudaDeviceSynchronize", shape, step, end - 1.0, wait + 0.5, {}))
    return wait


def _replays(
    steps: Sequence[Event], launches: Sequence[Event], kernels: Sequence[Event]
) -> Iterator[Event]:
    """One launch a step, which all kernels of the step come from."""
    at = {launch["args"]["correlation"]: launch["ts"] for launch in launches}
    for number, step in enumerate(steps):
        graph = {"correlation": number + 1}
        yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": step["pid"],
               "tid": step["tid"], "ts": step["ts"] + 1.0, "dur": 20.0,
               "args": {"cbid": 311, **graph}}  # fmt: skip
        nodes = (
            k for k in kernels if step["ts"] <= at.get(k["args"]["correlation"], 0) < _end(step)
        )
        for node, kernel in enumerate(list(nodes)):
            del at[kernel["args"]["correlation"]]
            kernel["args"] |= {"graph id": 1, "graph node id": node} | graph


def _number_anew(events: Sequence[Event]) -> None:
    numbered = [event for event in events if "Ev Idx" in event.get("args", {})]
    for number, event in enumerate(
        sorted(numbered, key=lambda event: int(event["args"]["Ev Idx"]))
    ):
        event["args"] = {**event["args"], "Ev Idx": number}


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def _runtime(name: str, shape: Shape, where: Event, ts: float, dur: float, args: Event) -> Event:
    if shape.vendor == "rocm":
        name = {"cudaLaunchKernel": "hipExtModuleLaunchKernel"}.get(
            name, name.replace("cuda", "hip")
        )
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": where["pid"],
            "tid": where["tid"], "ts": ts, "dur": dur, "args": {"cbid": 211, **args}}  # fmt: skip


def _renamed(name: str) -> str:
    """Operators that only CPUs have, as a GPU's are called."""
    for ours, theirs in (
        ("_flash_attention_for_cpu", "_flash_attention"),
        ("FlashAttentionForCpu", "FlashAttention"),
        ("mkldnn_convolution", "cudnn_convolution"),
        ("convolution_overrideable", "cudnn_convolution"),
        ("ConvolutionOverrideable", "Convolution"),
    ):
        name = name.replace(ours, theirs)
    return name
