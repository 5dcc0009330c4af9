"""A trace and its run record, built anew from fields that are safe to publish.

Nothing is taken out of a file here. The input are the columns that the analysis reads. The output
are columns and a run record, made of numbers that were counted anew and of names that passed
:class:`~recompute_scan.bundle.names.Names`: a field that is not listed here does not exist in the
archive. The archive holds the rows that prove the verdict, as Kineto's JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from recompute_scan.analysis.tracks import us
from recompute_scan.bundle.names import Names
from recompute_scan.frameworks.registry import PACKAGES, find_mechanism
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import Role
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result.run_record import RunInfo, SwitchedOn
from recompute_scan.trace import Kind, Trace
from recompute_scan.trace.calls import StepSpan
from recompute_scan.trace.columns import KIND_NAMES, Bool, Int32, Int64

# Categories that go into an archive, as torch writes them today.
CATEGORIES = {
    Kind.OP: "cpu_op",
    Kind.ANNOTATION: "user_annotation",
    Kind.RUNTIME: "cuda_runtime",
    Kind.KERNEL: "kernel",
    Kind.COPY: "gpu_memcpy",
}
_ON_DEVICE = (Kind.KERNEL, Kind.COPY)
_HOST_PROCESS, _DEVICE_PROCESS = 1, 1000

# Types as torch's profiler names them.
_TYPES = frozenset(
    "|float|double|int|long int|long|short int|short|unsigned char|signed char|char|bool|c10::Half"
    "|c10::BFloat16|c10::complex<float>|c10::complex<double>|c10::complex<c10::Half>"
    "|c10::Float8_e4m3fn|c10::Float8_e5m2|c10::Float8_e4m3fnuz|c10::Float8_e5m2fnuz"
    "|c10::Float8_e8m0fnu|c10::Float4_e2m1fn_x2|c10::qint8|c10::quint8|c10::qint32|unsigned short"
    "|unsigned int|unsigned long|Scalar|ScalarList|TensorList|GenericList|Tensor|Bool|Int|Double"
    "|Device|String|None|Tuple|Dict|List|Generator|Stream|Object|SymInt|ComplexDouble|Float".split(
        "|"
    )
)
_LONGEST_SHAPE = 64
# How a convolution steps: a number, a truth value, or a short list of these.
_SETTING = re.compile(r"(\d{1,4}|True|False|\[((\d{1,4}|True|False)(, )?){0,8}\])?")

_VERSION = re.compile(
    r"\d{1,5}(\.\d{1,5}){0,3}((a|b|rc|dev|post|\.dev|\.post)\d{1,8})?"
    r"(\+(cpu|cu\d{2,4}|rocm\d(\.\d){1,2}|xpu))?"
)
_PACKAGES = frozenset({"python", "torch", "cuda", "nccl", "flash-attn", *PACKAGES})
_WORDS: dict[str, frozenset[str]] = {
    "platform": frozenset(
        f"{system} {machine}"
        for system in ("Linux", "Darwin", "Windows")
        for machine in ("x86_64", "aarch64", "arm64", "AMD64", "ppc64le")
    ),
    "device": frozenset({"cpu", "cuda"}),
    "torch_compile": frozenset({"used", "not used"}),
    "backend": frozenset({"nccl", "gloo", "mpi", "ucc", "cpu:gloo,cuda:nccl", "undefined"}),
}
# Fields of a run record that go in as they are.
_KEPT = (
    "rank world_size status exit_status device warmup_steps timed_steps_ms profiled_steps"
).split()
_NUMBERS = frozenset({"world_size", "local_world_size", "threads"})
_GPU = re.compile(
    r"NVIDIA|AMD|Intel|Tesla|Quadro|GeForce|RTX|GTX|TITAN|Instinct|Radeon|Graphics|Ada|Generation"
    r"|Data|Center|GPU|Max|SXM\d?|PCIe|NVL|OAM|Ti|SUPER|Super|Laptop|Pro|PRO|XTX?|Blackwell|Xp|V"
    r"|[A-Z]{1,2}\d{1,4}[A-Z]{0,2}|MI\d{1,3}[AX]{0,2}|GH200|GB\d{3}|\d{3,4}|\d{1,3} ?GB|HBM\de?"
)


def clean_trace(trace: Trace, names: Names) -> Trace:
    """The same trace to the analysis: its rows in their order, and nothing else.

    Times begin at 0; processes, threads, streams, launches and autograd's numbers are counted
    anew, in their order.
    """
    kept = np.flatnonzero(np.isin(trace.kind, tuple(CATEGORIES)))
    kind = trace.kind[kept]
    names.reserve(trace.names)
    name, texts = _names(trace, kept, names)
    ts = trace.ts[kept]
    dims, signatures = _signatures(trace.dims[kept], trace.signatures)
    thread, threads = _threads(trace.thread[kept], kind)
    return Trace(
        name=name,
        kind=kind,
        thread=thread,
        ts=ts - (ts.min() if len(ts) else 0),
        dur=trace.dur[kept],
        sequence=_counted_anew(trace.sequence[kept]),
        correlation=_counted_anew(trace.correlation[kept]),
        stream=_counted_anew(trace.stream[kept]).astype(np.int32),
        made_by=None if trace.made_by is None else _counted_anew(trace.made_by[kept]),
        dims=dims,
        names=texts,
        threads=threads,
        signatures=signatures,
        rank=trace.rank,
        metadata=_metadata(trace.metadata),
    )


def clean_run_record(info: RunInfo, trace: str) -> RunInfo:
    """The run record of a run, without the script, its lines and its output.

    Args:
        info: The run record.
        trace: Name of its trace in the archive.
    """
    messages = {
        "complete": None,
        "ended-early": "The script ended before every wanted step was recorded.",
        "failed": "The script failed.",
    }
    return RunInfo(
        **{name: getattr(info, name) for name in _KEPT},
        trace=trace,
        stacks=None,
        message=messages[info.status],
        environment=clean_environment(info.environment),
        switched_on=tuple(
            SwitchedOn(one.mechanism, "")
            for one in info.switched_on
            if find_mechanism(one.mechanism)
        ),
    )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Versions and devices; a setting that is not listed stays out, and so does an odd value."""
    return {
        name: shown for name, value in environment.items() if (shown := _environment(name, value))
    }


def device_name(name: str) -> str:
    """The parts of a device's name that vendors use."""
    return " ".join(part for part in re.split(r"[\s\-_]+", name[:200]) if _GPU.fullmatch(part))


def _environment(name: str, value: str) -> str:
    if name in _PACKAGES:
        version = value if _VERSION.fullmatch(value) else value.partition("+")[0]
        return version if _VERSION.fullmatch(version) else ""
    if name in _NUMBERS:
        return value if value.isascii() and value.isdigit() and len(value) < 8 else ""
    if name == "device_name":
        return device_name(value)
    return value if value in _WORDS.get(name, ()) else ""


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    devices = metadata.get("deviceProperties")
    if isinstance(devices, list):
        found["deviceProperties"] = [
            {"id": number, "name": device_name(name) if isinstance(name, str) else ""}
            for number, device in enumerate(devices[:1024])
            if isinstance(device, dict)
            for name in [device.get("name")]
        ]
    distributed = metadata.get("distributedInfo")
    if isinstance(distributed, dict):
        backend, size = distributed.get("backend"), distributed.get("world_size")
        found["distributedInfo"] = {
            **({"backend": backend} if backend in _WORDS["backend"] else {}),
            **({"world_size": size} if _is_small(size) else {}),
        }
    for name in ("cuda_runtime_version", "hip_runtime_version"):
        if _is_small(metadata.get(name)):
            found[name] = metadata[name]
    return found


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _names(trace: Trace, kept: Int64, names: Names) -> tuple[Int32, tuple[str, ...]]:
    pairs = trace.name[kept].astype(np.int64) * len(KIND_NAMES) + trace.kind[kept]
    # In the order in which they first appear, so that aliases follow the file.
    unique, first, place = np.unique(pairs, return_index=True, return_inverse=True)
    codes: dict[str, int] = {}
    code = np.zeros(len(unique), np.int32)
    for at in np.argsort(first):
        pair = int(unique[at])
        shown = names.event(trace.names[pair // len(KIND_NAMES)], pair % len(KIND_NAMES))
        code[at] = codes.setdefault(shown, len(codes))
    return code[place], tuple(codes)


def _counted_anew(numbers: Any) -> Int64:
    """Ranks instead of the numbers, in the same order; a number below 0 is unknown."""
    known = numbers >= 0
    anew = np.full(len(numbers), -1, np.int64)
    anew[known] = np.unique(numbers[known], return_inverse=True)[1]
    return anew


def _threads(codes: Int32, kind: Any) -> tuple[Int32, tuple[tuple[str, str], ...]]:
    """Threads numbered as they appear, the device's apart from the host's."""
    unique, first, place = np.unique(codes, return_index=True, return_inverse=True)
    anew = np.zeros(len(unique), np.int32)
    threads = []
    for number, at in enumerate(np.argsort(first)):
        device = int(kind[first[at]]) in _ON_DEVICE
        threads.append((str(_DEVICE_PROCESS if device else _HOST_PROCESS), str(number + 1)))
        anew[at] = number
    return anew[place], tuple(threads)


def _signatures(codes: Int32, signatures: Sequence[str]) -> tuple[Int32, tuple[str, ...]]:
    unique, place = np.unique(codes, return_inverse=True)
    anew: dict[str, int] = {"": 0}
    types: dict[str, str] = {}
    code = np.array(
        [anew.setdefault(_signature(signatures[at], types), len(anew)) for at in unique], np.int32
    )
    return code[place] if len(code) else codes, tuple(anew)


def _signature(text: str, types: dict[str, str]) -> str:
    """Shapes, types and a convolution's settings written anew: only what torch knows."""
    if not text:
        return ""
    dims: list[Any] | None = None
    kinds: list[str] | None = None
    values: list[str] | None = None
    decoder = json.JSONDecoder()
    at = 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            at += len(text[at:]) - len(text[at:].lstrip())
            if kinds is not None:
                values = [item if _SETTING.fullmatch(item) else "" for item in value]
            elif any(isinstance(item, str) for item in value):
                kinds = [_type(item, types) for item in value]
            else:
                dims = [_shape(item) for item in value]
    except (ValueError, TypeError, RecursionError):
        # Equal ones stay equal, and others different; their text stays out.
        kinds = [types.setdefault(text, f"unknown{len(types) + 1}")]
        dims = values = None
    return json.dumps([dims, kinds, values], separators=(",", ":"))


def _type(item: Any, types: dict[str, str]) -> str:
    text = item if isinstance(item, str) else ""
    return text if text in _TYPES else types.setdefault(text, f"unknown{len(types) + 1}")


def _shape(item: Any) -> Any:
    if isinstance(item, list):
        return [_shape(part) for part in item[:_LONGEST_SHAPE]]
    return item if isinstance(item, int) and not isinstance(item, bool) else -1


_AT_ONCE = 20_000


class Cut(Struct, frozen=True):
    """How much of each trace goes in.

    Attributes:
        steps: Number of complete steps; ``None`` for the whole recording.
        inner: Whether operators that others called go in.
        blocks: Number of blocks with their recomputes; ``None`` for all that the steps hold.
        share: Share of the recording's time, for one without a complete step.
        all_ranks: Whether every rank's trace goes in, or only the one that the verdict is of.
    """

    steps: int | None
    inner: bool = True
    blocks: int | None = None
    share: float = 1.0
    all_ranks: bool = True

    def dropped(self, complete: int, ranks: int) -> list[str]:
        """The parts left out, one phrase each; ``complete`` steps and ``ranks`` were there."""
        found = []
        if self.steps is not None and self.steps < complete:
            found.append(f"{complete - self.steps} of {complete} complete steps")
        if not self.all_ranks and ranks > 1:
            found.append(f"the traces of {ranks - 1} of {ranks} ranks")
        if not self.inner:
            found.append("operators called by other operators")
        if self.share < 1:
            found.append(f"all but the first {self.share:.2%} of the recording")
        if self.blocks is not None:
            found.append(f"all but {self.blocks} of the blocks and what belongs to them")
        return found


def smaller_and_smaller(complete: int, blocks: int, ranks: int) -> Iterator[Cut]:
    """Cuts to try one after the other until one fits.

    Args:
        complete: Most complete steps of any trace.
        blocks: Blocks in one step.
        ranks: Number of traces.
    """
    if not complete:
        yield Cut(None)
        for halvings in range(1, 20):
            yield Cut(None, share=0.5**halvings)
            yield Cut(None, share=0.5**halvings, all_ranks=False)
        return
    steps = complete
    while steps:
        yield Cut(steps)
        steps //= 2
    if ranks > 1:
        yield Cut(1, all_ranks=False)
    yield Cut(1, inner=False, all_ranks=False)
    while blocks > 1:
        blocks //= 2
        yield Cut(1, inner=False, blocks=blocks, all_ranks=False)


def rows_of(facts: RecomputeFacts, cut: Cut) -> Int64:
    """Rows of the trace that go in, in file order."""
    if cut.steps is None or not facts.complete.any():
        start = facts.trace.ts
        end = start.min() + cut.share * (start.max() - start.min())
        rows: Int64 = np.flatnonzero(start <= end)
        return rows
    spans = _spans(facts, cut.steps)
    begin, end = spans[0].start, spans[-1].end
    calls, kernels = facts.calls, facts.kernels
    host = (calls.start >= begin) & (calls.start < end)
    if cut.blocks is not None:
        host &= _belonging(facts, cut.blocks, begin, end)
    if not cut.inner:
        host &= _outline(facts)
    launched = kernels.launch >= 0
    mine = launched & host[kernels.launch]
    if cut.blocks is None:
        # Kernels that still ran when the first step began kept the device busy in it.
        running = (kernels.end > begin) & (kernels.start < end)
        mine |= running
        host[kernels.launch[running & launched]] = True
    return np.sort(np.concatenate((calls.event[host], kernels.event[mine])))


def _spans(facts: RecomputeFacts, most: int) -> list[StepSpan]:
    """From the first to the last of ``most`` complete steps, the middle ones."""
    complete = np.flatnonzero(facts.complete)
    first = max(0, (len(complete) - most) // 2)
    chosen = complete[first : first + most]
    return list(facts.steps[int(chosen[0]) : int(chosen[-1]) + 1])


def _outline(facts: RecomputeFacts) -> Bool:
    """The calls that decide on roles, counts and times, without the calls inside them."""
    calls, structure = facts.calls, facts.structure
    keep: Bool = structure.role != Role.INNER
    launches = np.zeros(len(calls), np.bool_)
    launches[facts.kernels.launch[facts.kernels.launch >= 0]] = True
    attention = np.array(
        [vocabulary.family_of(name)[1] == "attention" for name in calls.names], np.bool_
    )
    # An operator without a number has the number of the first operator inside it.
    top = np.maximum(structure.top, 0)
    lends = (calls.sequence >= 0) & (structure.top >= 0) & (calls.sequence[top] < 0)
    within = calls.kind == Kind.OP
    keep |= launches | (within & (attention[calls.name] | lends))
    return keep


def _belonging(facts: RecomputeFacts, blocks: int, begin: int, end: int) -> Bool:
    """Calls of some blocks: forward, recomputes, backward, and all that these are in."""
    calls, structure, counts = facts.calls, facts.structure, facts.counts
    layers = facts.layers
    most = max((counts.highest(layer[0].places) for layer in layers), default=0.0)
    worst = [layer for layer in layers if counts.highest(layer[0].places) == most]
    first = max(0, (len(worst) - blocks) // 2)
    forward = np.concatenate(
        [counts.rows[block.places] for layer in worst[first : first + blocks] for block in layer]
        or [counts.rows[:0]]
    )
    here = (calls.start[forward] >= begin) & (calls.start[forward] < end)
    forward = forward[here]
    chosen = np.zeros(len(calls), np.bool_)
    chosen[forward] = True
    numbers = structure.number[forward]
    numbers = numbers[numbers >= 0]
    for recompute in facts.alignment.recomputes:
        again = recompute.again[np.isin(recompute.original, forward)]
        chosen[again] = True
    engines = structure.rows(Role.BACKWARD)
    chosen[engines[np.isin(structure.number[engines], numbers)]] = True
    inside = facts.calls.within(np.flatnonzero(chosen))
    for row in np.flatnonzero(chosen):
        above = int(calls.parent[row])
        while above >= 0 and not inside[above]:
            inside[above] = True
            above = int(calls.parent[above])
    return inside


def trace_json(trace: Trace, rows: Int64) -> Iterator[bytes]:
    """The document in pieces. Times are µs from the first row's start, exact to the ns.

    Args:
        trace: As :func:`recompute_scan.bundle.redact.clean_trace` makes it.
        rows: The rows to write, in order.
    """
    yield (json.dumps(_head(trace))[:-1] + ', "traceEvents": [\n').encode()
    yield ",\n".join(_process_rows(trace, rows)).encode()
    names = [json.dumps(name) for name in trace.names]
    args = [_shapes(text) for text in trace.signatures]
    places = [f'"pid":{pid},"tid":{tid}' for pid, tid in trace.threads]
    start = int(trace.ts[rows].min()) if len(rows) else 0
    made_by = np.full(len(trace), -1) if trace.made_by is None else trace.made_by
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        columns = (
            trace.kind[part], trace.name[part], trace.thread[part], trace.ts[part] - start,
            trace.dur[part], trace.sequence[part], trace.correlation[part], trace.stream[part],
            made_by[part], trace.dims[part],
        )  # fmt: skip
        lines = []
        for kind, name, thread, ts, dur, sequence, correlation, stream, maker, dims in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            fields = args[dims]
            if sequence >= 0:
                fields += f',"Sequence number":{sequence}'
            if correlation >= 0:
                fields += f',"correlation":{correlation}'
            if stream >= 0:
                fields += f',"stream":{stream}'
            if maker >= 0:
                fields += f',"Fwd thread id":{maker + 1}'
            lines.append(
                f'{{"ph":"X","cat":"{_CATEGORY[kind]}","name":{names[name]},{places[thread]},'
                f'"ts":{us(ts)},"dur":{us(dur)},"args":{{{fields[1:]}}}}}'
            )
        yield (",\n" + ",\n".join(lines)).encode()
    yield b"\n]}\n"


_CATEGORY = {int(kind): text for kind, text in CATEGORIES.items()}


def _head(trace: Trace) -> dict[str, Any]:
    head: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", **trace.metadata}
    if trace.rank is not None:
        head["distributedInfo"] = {**head.get("distributedInfo", {}), "rank": trace.rank}
    return head


def _process_rows(trace: Trace, rows: Int64) -> Iterator[str]:
    """The titles of tracks in viewers."""
    shown = set()
    for code in np.unique(trace.thread[rows]).tolist():
        pid, tid = trace.threads[code]
        mine = trace.kind[rows][trace.thread[rows] == code]
        device = int(mine[0]) in (Kind.KERNEL, Kind.COPY)
        if pid not in shown:
            shown.add(pid)
            yield _meta("process_name", pid, 0, "device" if device else "host")
        yield _meta("thread_name", pid, int(tid), f"{'queue' if device else 'thread'} {tid}")
    if not shown:
        yield _meta("process_name", "1", 0, "host")


def _meta(name: str, pid: str, tid: int, text: str) -> str:
    event = {"ph": "M", "name": name, "pid": int(pid), "tid": tid, "ts": 0, "args": {"name": text}}
    return json.dumps(event, separators=(",", ":"))


def _shapes(signature: str) -> str:
    if not signature:
        return ""
    dims, kinds, values = json.loads(signature)
    fields = (("Input Dims", dims), ("Input type", kinds), ("Concrete Inputs", values))
    return "".join(
        f',"{field}":{json.dumps(value, separators=(",", ":"))}'
        for field, value in fields
        if value is not None
    )
