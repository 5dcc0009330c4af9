"""Small inputs to begin with, one list for each target: sound ones, and the damaged corpus."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from recompute_scan.analysis.answer import result_of
from recompute_scan.check.baseline import baseline_json
from recompute_scan.faithful import Sampled
from recompute_scan.result import to_json
from recompute_scan.run_info import RunInfo, encode_run_info
from recompute_scan.trace.kineto.parse import parse
from tests.sources import pftrace_builder

ROOT = Path(__file__).resolve().parents[2]
# Larger files of the damaged corpus test limits, which have tests of their own.
_LARGEST = 6000
_ENGINE = "autograd::engine::evaluate_function: "


def training(steps: int = 2, layers: int = 2, recomputes: int = 1) -> bytes:
    """A trace of a reentrant checkpoint around each layer, as Kineto would write it."""
    events: list[dict[str, Any]] = []
    clock = [0.0]
    number = [100]

    def call(name: str, *inside: Any, sequence: int | None = None, cat: str = "cpu_op") -> None:
        event: dict[str, Any] = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7}
        event["ts"] = clock[0] = clock[0] + 1.125
        event["args"] = {"Ev Idx": len(events), "Input Dims": [[4, 4]]}
        if sequence is not None:
            event["args"]["Sequence number"] = sequence
        events.append(event)
        for each in inside:
            each()
        clock[0] += 1.125
        event["dur"] = clock[0] - event["ts"]

    def linear() -> None:
        call("aten::linear", lambda: call("aten::addmm", sequence=number[0]))
        number[0] += 1

    def unnumbered() -> None:  # without gradients
        call("aten::linear", lambda: call("aten::addmm"))

    def node(name: str, sequence: int, *inside: Any) -> None:
        call(_ENGINE + name, lambda: call(name, *inside, sequence=sequence), sequence=sequence)

    def recomputed(level: int) -> None:
        first = number[0]
        linear()
        if level > 1:
            recomputed(level - 1)
        node("AddmmBackward0", first, lambda: call("aten::mm"))

    def step() -> None:
        first = number[0]
        for layer in range(layers):
            call("CheckpointFunction", unnumbered, sequence=first + layer)
            number[0] = first + layer + 1
        for layer in reversed(range(layers)):
            node("CheckpointFunctionBackward", first + layer, lambda: recomputed(recomputes))
        call("Optimizer.step#SGD.step", lambda: call("aten::add_"), cat="user_annotation")

    for index in range(steps):
        call(f"ProfilerStep#{index}", step, cat="user_annotation")
    return json.dumps({"traceEvents": events}).encode()


def traces() -> list[bytes]:
    """Whole traces, and the damaged ones that are small."""
    corpus = sorted((ROOT / "tests" / "damage" / "corpus").glob("*"))
    small = [file.read_bytes() for file in corpus if file.stat().st_size < _LARGEST]
    return [training(), training(1, 1), training(1, recomputes=2), training(layers=1), *small]


def perfetto_traces() -> list[bytes]:
    """The same recordings as packets, one with a GPU's work in either of its forms."""
    documents = [json.loads(data) for data in traces()[:3]]
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 5}}
    kernel = {"cat": "kernel", "name": "gemm", "args": {"correlation": 5, "stream": 7, "device": 0}}
    timed = {"ph": "X", "pid": 7, "tid": 7, "ts": 3.0, "dur": 1.0}
    device = {"traceEvents": [*documents[1]["traceEvents"], timed | launch, timed | kernel]}
    forms = [pftrace_builder.Writer(device, stages=stages).write() for stages in (True, False)]
    return [*(pftrace_builder.Writer(document).write() for document in documents), *forms]


def results() -> list[bytes]:
    """Results as `analyze` prints them."""
    return [to_json(result_of(parse(data, "seed"))).encode() for data in traces()[:3]]


def baselines() -> list[bytes]:
    """Baselines as `check` writes them."""
    return [baseline_json(result_of(parse(data, "seed"))).encode() for data in traces()[:3]]


def run_records() -> list[bytes]:
    """Run records, with the settings that were found."""
    recorded = sorted((ROOT / "traces").glob("*/run-rank0.json"))
    bare = RunInfo(0, 1, "complete", 0, "cpu", 1, (1.5, 1.75), 2, "trace-rank0.json.gz", None)
    return [encode_run_info(bare), *(file.read_bytes() for file in recorded)]


def gradients() -> list[bytes]:
    """Gradients of two runs, as `run --verify` keeps them, with a line between."""
    sampled = (
        Sampled("layers.0.weight", False, 17, (1.0, -2.5, 1e-9), 1e-7),
        Sampled("layers.0.norm.running_mean", True, 5, (0.25,), 0.0),
        Sampled("layers.1.weight", False),
    )
    one = msgspec.json.encode(sampled)
    return [one + b"\n" + one, one + b"\n" + msgspec.json.encode(sampled[:1])]


def configurations() -> list[bytes]:
    """Configuration files and code that switch checkpointing on."""
    return [
        b"trainer:\n  fp16: false\n  gradient_checkpointing: true\n",
        b'{"gradient_checkpointing": "true", "use_reentrant": false}\n',
        b"[model]\n# gradient_checkpointing = 0\ngradient_checkpointing = 1\n",
        b"args = TrainingArguments(output_dir='x', gradient_checkpointing=config['gc'].on)\n",
        b"model.set(**{'gradient_checkpointing': flags.recompute and not (a.b or c[0])})\n",
        b"class Mine(TrainingArguments):\n    gradient_checkpointing: bool = True\n",
    ]


def code() -> list[bytes]:
    """Statements with checkpoints, behind the numbers of their lines."""
    return [
        b"7 8 8 alone\nfor x in y:\n    checkpoint(block, x, use_reentrant=False)\n",
        b"1 1 1\nout = checkpoint(self.block[0], x, mask=m, determinism_check='none')",
        b"3 3 5\nargs = TrainingArguments(\n    gradient_checkpointing=True,\n)",
        b"3 3 3\nmodel.enable({'use_reentrant': True, **more}, *others)  # and so on",
        b"3 3 3\nx = checkpoint((lambda a: a + 1), x)\n",
    ]


def archives() -> list[bytes]:
    """Archives of traces with their run records, as `bundle` writes them."""
    packed = []
    for trace in traces()[:3]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("trace-rank0.json.gz", gzip.compress(trace, mtime=0))
            archive.writestr("run-rank0.json", run_records()[0])
        packed.append(buffer.getvalue())
    return packed


def logs() -> list[bytes]:
    """Logs of runs that failed, one or more for each known cause."""
    line = b'  File "train.py", line 7, in <module>\n    loss.backward()\n'
    head = b"Traceback (most recent call last):\n"
    known = sorted((ROOT / "tests" / "diagnose" / "corpus" / "known").glob("*.log"))
    small = [file.read_bytes() for file in known if file.stat().st_size < _LARGEST]
    return [
        *small,
        head + line + b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        b"[rank1]: " + head + b"[rank1]: " + line + b"[rank1]: RuntimeError: NCCL timeout\n",
        head + line + b"\nDuring handling of the above exception, another exception occurred:\n\n"
        b"torch.utils.checkpoint.CheckpointError: A different number of tensors was saved\n",
    ]
