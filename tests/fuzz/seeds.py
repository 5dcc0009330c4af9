"""Small inputs to begin with, one list for each target: sound ones, and the damaged corpus."""

import gzip
import io
import json
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from recompute_scan.analysis.pipeline import result_of
from recompute_scan.check.policy import Baseline
from recompute_scan.guarding.judge import Stored
from recompute_scan.result import Result, to_json
from recompute_scan.result.fidelity import Sampled
from recompute_scan.result.run_record import Rehearsal, RunInfo, encode_run_info
from tests.fuzz.filled import filled
from tests.sources import nsys_builder
from tests.sources.test_snapshots import generated
from tests.trace.kineto_reading import parse

ROOT = Path(__file__).resolve().parents[2]
# Larger files of the damaged corpus test limits, which have tests of their own.
_LARGEST = 6000
_ENGINE = "autograd::engine::evaluate_function: "


def training(steps: int = 2, layers: int = 2, recomputes: int = 1, *, own: bool = False) -> bytes:
    """A trace of a reentrant checkpoint around each layer, as Kineto would write it.

    With ``own`` the checkpoint is a function that copies its input, goes backward through its run
    twice, and holds on to its gradient.
    """
    name = "_CheckpointFunction" if own else "CheckpointFunction"
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
        for _ in range(1 + own):
            node("AddmmBackward0", first, lambda: call("aten::mm"))

    def copies() -> None:
        if own:
            call("aten::clone")

    def adds() -> None:
        if own:
            add = "torch::autograd::AccumulateGrad"
            call(_ENGINE + add, lambda: call(add, lambda: call("aten::copy_")))

    def step() -> None:
        first = number[0]
        for layer in range(layers):
            call(name, copies, unnumbered, sequence=first + layer)
            number[0] = first + layer + 1
        for layer in reversed(range(layers)):
            node(f"{name}Backward", first + layer, copies, lambda: recomputed(recomputes))
            adds()
        call("Optimizer.step#SGD.step", lambda: call("aten::add_"), cat="user_annotation")

    for index in range(steps):
        call(f"ProfilerStep#{index}", step, cat="user_annotation")
    return json.dumps({"traceEvents": events}).encode()


def sound_traces() -> list[bytes]:
    """Whole traces of a few kilobytes."""
    return [
        *(training(), training(1, 1), training(1, recomputes=2), training(layers=1)),
        *(training(own=True), training(1, recomputes=2, own=True)),
    ]


def traces() -> list[bytes]:
    """These, and the damaged ones that are small."""
    corpus = sorted((ROOT / "tests" / "damage" / "corpus").glob("*"))
    small = [file.read_bytes() for file in corpus if file.stat().st_size < _LARGEST]
    return [*sound_traces(), *small]


def results() -> list[bytes]:
    """Results as `analyze` prints them, and one with everything that can be in it."""
    printed = [to_json(result_of(parse(data, "seed"))).encode() for data in traces()[:3]]
    return [*printed, filled(Result)]


def baselines() -> list[bytes]:
    """A baseline as `check` writes it."""
    return [filled(Baseline)]


def run_records() -> list[bytes]:
    """Run records, with the settings that were found, and one with everything."""
    recorded = sorted((ROOT / "traces").glob("*/run-rank0.json"))
    bare = RunInfo(0, 1, "complete", 0, "cpu", 1, (1.5, 1.75), 2, "trace-rank0.json.gz", None)
    return [encode_run_info(bare), *(file.read_bytes() for file in recorded), filled(RunInfo)]


def guards() -> list[bytes]:
    """What a guard keeps from one training to the next."""
    return [filled(Stored), b'{"modules": {}, "format": "recompute-scan-guard/1"}']


def rehearsals() -> list[bytes]:
    """What a rank leaves for a plan."""
    return [filled(Rehearsal)]


def lint_inputs() -> list[bytes]:
    """Scripts, configurations and launch commands that `lint` reads."""
    return [
        *configurations(),
        b"model.gradient_checkpointing_enable()  # noqa: RS605 - kept\nfor b in model.layers:\n"
        b"    checkpoint_wrapper(b)\n    apply_activation_checkpointing(model, check_fn=f)\n",
        b"torchrun --nproc-per-node 2 train.py --gradient_checkpointing true --fsdp full_shard \\\n"
        b"  --fsdp_config '{\"activation_checkpointing\": true}'\n",
        b'{"fsdp_config": {"fsdp_activation_checkpointing": true}, "gradient_checkpointing": true}',
        b"[tool.recompute-scan.lint]\nignore = ['RS601']\nexclude = ['x/*']\n",
    ]


def projects() -> list[bytes]:
    """Settings of projects, sound ones and some that are none."""
    return [
        b'[tool.recompute-scan.check]\nfail-on = ["doubled", "RS005"]\nmax-recompute = 1.5\n'
        b'max-cost = ["RS005=2", 5]\nbaseline = "base.json"\n',
        b'[tool.recompute-scan.lint]\nselect = ["RS6"]\nignore = ["RS602"]\nexclude = ["a/*"]\n',
        b"tool = 1 # recompute-scan\n",
        b"tool.recompute-scan.check.max-recompute = nan\n",
    ]


def requirements() -> list[bytes]:
    """Pins as people write them."""
    return [
        b"transformers==4.45.2\ntorch>=2.1\n",
        b"transformers>=4.40,<5 ; python_version >= '3.10'\n-r other.txt\n",
        b'[project]\ndependencies = ["transformers[torch] ~= 4.50"]\n',
        b"transformers===5.0.0rc1\n# transformers==4.0\ngit+https://example/transformers@v4\n",
    ]


def launch_scripts() -> list[bytes]:
    """Launch scripts of shells."""
    return [
        b"#!/bin/bash\nARGS=(--fsdp full_shard --gradient_checkpointing true)\n"
        b'torchrun --nproc-per-node 8 train.py "${ARGS[@]}" \\\n  --bf16 true\n',
        b"export A='x y'\naccelerate launch --config_file fsdp.yaml train.py $A ${B:-c} $(date)\n",
        b"cat <<EOF\ndeepspeed train.py --deepspeed ds.json\nEOF\nfor i in 1 2; do :; done\n",
    ]


def notebooks() -> list[bytes]:
    """Notebooks."""
    cell: dict[str, object] = {
        "cell_type": "code",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    source = ["model.gradient_checkpointing_enable()\n", "%time trainer.train()\n"]
    book = {
        "cells": [cell | {"source": source}],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return [json.dumps(book).encode(), json.dumps(book | {"traceEvents": []}).encode()]


def link_targets() -> list[bytes]:
    """Where links lead, one a line."""
    return [
        b"/etc/passwd\n../../etc/passwd\ntrace-rank0.json\n.\n..\n",
        b"/dev/zero\n/dev/tty\n/proc/self/mem\n/proc/kmsg\n/dev/stdin\n/proc/self/fd/0\n",
        b"run-rank1.json\nrun-rank0.json\n0.py\n" + b"a/" * 300 + b"\n",
    ]


def redirects() -> list[bytes]:
    """An address, and where its server sends its readers."""
    first = b"https://user:secret@host.example/x?sig=secret\n"
    targets = (
        *(b"/x", b"//other.example/x", b"https://host.example/x", b"http://host.example/x"),
        *(b"https://host.example@other.example/x", b"https:other.example", b"\\\\other.example"),
        *(b"https://host.example:443/x", b"file:///etc/passwd", b"?x", b"#x", b""),
        *(b"https://host.example%2eother.example/", b"https://[::1]/", b"https://HOST.example./"),
    )
    return [first + target for target in targets]


def compiler_logs() -> list[bytes]:
    """The compiler's log of a graph with its backward, with and without a recompute."""
    head = 'V0101 00:00:00.000000 1 torch/x.py:1] {"aot_%s_graph": {}, "frame_id": 0, '
    head += '"frame_compile_id": 0, "attempt": 0}\n\tclass G(torch.nn.Module):\n'
    head += '\t    def forward(self, a: "f32[4]", tangents_1: "f32[4]"):\n'
    line = '\t        mm_%d: "f32[4]" = torch.ops.aten.mm.default(a, a)\n'
    both = head % "forward" + line % 1 + "\t        return (mm_1, a)\n"
    again = head % "backward" + line % 1 + line % 2 + "\t        return (mm_2,)\n"
    return [(both + again).encode(), (both + head % "backward" + line % 2).encode()]


def nsys_exports() -> list[bytes]:
    """Databases of Nsight Systems, of whole steps."""
    exports: list[bytes] = []
    for data in traces()[:2]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.sqlite")
            nsys_builder.from_trace(parse(data, "seed"), path, by_id=bool(exports))
            exports.append(path.read_bytes())
    return exports


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


def snapshots() -> list[bytes]:
    """Memory snapshots as torch pickles them, of each protocol, with much and with nothing."""
    return [
        *(pickle.dumps(generated(n, 4 * n)[0], protocol) for n, protocol in enumerate((2, 4, 5))),
        pickle.dumps({"segments": [], "device_traces": []}),
        pickle.dumps([{"total_size": 8, "blocks": [{"size": 8, "state": "active_allocated"}]}]),
    ]
