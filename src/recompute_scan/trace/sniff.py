"""The kind of a file by its first bytes, and the reason why a file is no trace or has no event."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from recompute_scan.errors import InputError
from recompute_scan.files import opened
from recompute_scan.trace.columns import Limits, refuse
from recompute_scan.trace.kineto.schema import (
    UNREADABLE,
    decode_document,
    decode_events,
    measure_nesting,
    mend_text,
)

_LOOKED_AT = 4096
_TORCH = "give a trace that torch.profiler's export_chrome_trace wrote (.json, .json.gz, .json.zst)"
_SAME_RUN = f"{_TORCH}, from the same run"
_PROTOBUF = "Perfetto's protobuf (.pftrace), which is not read"
_AS_JSON = 'export the recording as JSON: prof.export_chrome_trace("trace.json.gz")'
# How torch/_logging/_internal.py names its structured log, which TORCH_TRACE asks for.
_GRAPHS = re.compile(r"dedicated_log_torch_trace_.*\.log\Z")
_BESIDE_A_TRACE = (
    "copy it into the folder of a profiler trace of the same run: its graphs are read with that"
)


class Look(NamedTuple):
    """The kind of a file, and what to try; an empty hint where nothing special helps."""

    what: str
    hint: str = ""


_BYTES = tuple(
    (pattern, Look(*look))
    for pattern, *look in (
        (rb"\A\Z", "the file is empty"),
        (rb"\A\s+\Z", "it begins with nothing but blanks"),
        (
            rb"\A(?:\[rank\d+\]:)?V\d{4} [\d:.]+ \d+ [^\n]{1,512}?\] \{",
            "it is torch's structured log (TORCH_TRACE): the compiler's graphs, and no step",
            _BESIDE_A_TRACE,
        ),
        (
            rb"\ANVIDIA Tegra Profiler Report",
            "it is a report of Nsight Systems, which only nsys itself can read",
            "nsys export --type sqlite REPORT, then give the .sqlite file",
        ),
        (
            rb"\ANVR\0",
            "it is a report of Nsight Compute: single kernels, without the step around them",
            _SAME_RUN,
        ),
        (
            rb"\A\x80[\x02-\x05]",
            "it is a Python pickle, perhaps a memory snapshot",
            "a snapshot has allocations and no operators; " + _SAME_RUN,
        ),
        (
            rb"\A.{8,64}brain\.Event:",
            "it is an event file of TensorBoard: curves and values",
            "the trace is another file, in the folder given to tensorboard_trace_handler "
            "(*.pt.trace.json)",
        ),
        (
            rb"\A\x0a.{1,64}/(?:host|device):",
            "it is a profile of JAX or TensorFlow (xplane.pb)",
            "their programs have no torch checkpoints to count; " + _TORCH,
        ),
        (
            # Length and first tag of a packet: one of two bytes, or one that no text has there.
            rb"\A\x0a(?:[\x80-\xff]{0,2}[\0-\x7f](?:[\xe2\xaa\x92\xda\x9a\x8a\xd0]\x03"
            rb"|[\x8a\x82\xca\x9a\xa2]\x02)"
            rb"|(?:[\x01-\x08\x0e-\x1f]|[\x80-\xff][\0-\x7f])[@PhZb])",
            f"it is {_PROTOBUF}",
            _AS_JSON,
        ),
        (rb"\APK\x03\x04", "it is a zip archive inside another file"),
        (rb"\ASQLite format 3\0", "it is an SQLite database"),
        (rb"\APAR1", "it is a Parquet file", _TORCH),
        (rb"\AARROW1|\A\xff\xff\xff\xff.\0\0\0", "it is an Arrow file", _TORCH),
        (rb"\A\x89HDF\r\n", "it is an HDF5 file", _TORCH),
        (rb"\A\x93NUMPY", "it is a NumPy array", _TORCH),
        (rb"\APERFILE2", "it is a Linux perf recording", _SAME_RUN),
        (rb"\Amemray", "it is a memray recording: allocations, not operators", _SAME_RUN),
        (rb"\A\x89PNG|\A\xff\xd8\xff", "it is an image"),
        (rb"\A%PDF", "it is a PDF document"),
        (rb"\A\s*<(?:!DOCTYPE|html|\?xml|svg)", "it is a web page, perhaps of a failed download"),
        (rb"\Aversion https://git-lfs", "it is a Git LFS pointer; fetch the file itself"),
        (rb"\A\xff\xfe|\A\xfe\xff", "it is UTF-16 text"),
        (rb"\A\x28\xb5\x2f\xfd|\A\x1f\x8b", "it is compressed more than twice"),
        (rb"\A[^{\[]*\0", "it is binary data"),
        (
            rb"\A[^\n{\[;]+;[^\n]* \d+\n",
            "it is text for a flame graph, such as export_stacks writes",
            "stacks without times cannot show what ran again; " + _SAME_RUN,
        ),
        (
            rb"\A[^\n]{0,200}(?:Total Time \(ns\)|Self CPU %)",
            "it is a table of times, without the order of calls",
            _SAME_RUN,
        ),
    )
)
_JSON = tuple(
    (pattern, Look(*look))
    for pattern, *look in (
        (rb'"schema"\s*:\s*"recompute-scan/', "it is a result of recompute-scan, for `report`"),
        (
            rb'"schema"\s*:\s*"recompute-scan-run/',
            "it is the run record of `run`, not a trace",
        ),
        (rb'"nbformat"', "it is a notebook"),
        (rb'"segments"|"device_traces"', "it is a memory snapshot", _SAME_RUN),
        (
            rb'"schema"\s*:\s*"[\d.]+-chakra',
            "it is an execution trace (ExecutionTraceObserver): operators without times",
            _SAME_RUN,
        ),
        (
            rb'\A\s*\{\s*"rocprofiler-sdk',
            "it is rocprofv3's JSON, which is not read: kernels without operators",
            "record a step with torch.profiler, which works on ROCm too, and give the trace that "
            "export_chrome_trace writes",
        ),
        (rb"speedscope\.app/file-format", "it is a profile for speedscope", _SAME_RUN),
        (
            rb'"nodes"\s*:.*"callFrame"|"cpu_profile"',
            "it is a CPU profile of V8 (Node.js, Chrome)",
            _TORCH,
        ),
    )
)
# Events of other programs in Chrome's format, by their names.
_PROGRAMS = (
    (r"V8\.|RunTask$|FunctionCall$|ThreadControllerImpl|BlinkGC", "Chrome's, or V8's"),
    (r"Choreographer|binder |Binder |surfaceflinger|doFrame|sched_|VSYNC", "Android's"),
    (r"Total ExecuteCompiler|ParseClass$|InstantiateFunction$", "clang's (-ftime-trace)"),
    (r"\$?\w+\.py:\d+ |PjitFunction|TfrtCpuExecutable|XlaModule|jit_", "JAX's"),
    (r"backend_compile|_compile\.|dynamo", "the compiler's own (torch.compile)"),
)
# Files in archives without traces.
_MEMBERS = (
    (".npy", "it is numpy's archive of arrays (.npz)"),
    ("data.pkl", "it is a file of torch.save: tensors, a model or a checkpoint"),
    (".nsys-rep", "the reports of Nsight Systems in it are for nsys: export them to SQLite first"),
    (".sqlite", "databases cannot be read inside an archive: take them out of it"),
)
_LOG = re.compile(
    rb"^(?:Traceback \(most recent call last\):|\[?(?:default|rank)\d+\]?:"
    rb"|[\w.]*(?:Error|Warning): |\[?[IWEF]\d{4} )",
    re.MULTILINE,
)
_LOOKS_LIKE_A_LOG = Look("it is the log of a program", "`recompute-scan explain` reads logs")


# Nsight Systems' files that only its own programs read.
REPORT_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")


def is_sqlite(head: bytes) -> bool:
    """Whether a file that begins with these bytes (16 or more of them) is an SQLite database."""
    return head.startswith(b"SQLite format 3\0")


def refuse_report(path: Path) -> InputError:
    """``E323``: Nsight Systems' own report, with the command that makes it readable."""
    return InputError(
        "E323",
        f"{path} is an Nsight Systems report, which only nsys itself can read.",
        hint=f"nsys export --type sqlite {path.name}, then give the .sqlite file",
    )


# How a pickle of protocol 2 to 5 begins.
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


def look_at_bytes(data: bytes) -> Look | None:
    """The kind of a file that is no JSON; ``None`` where unknown."""
    front = data[:_LOOKED_AT]
    return _match(_BYTES, front) or (_LOOKS_LIKE_A_LOG if _LOG.search(front) else None)


def look_at_json(data: bytes) -> Look | None:
    """The kind of JSON that is no trace; ``None`` where unknown."""
    return _match(_JSON, data[:_LOOKED_AT])


def look_at_names(names: Iterable[str]) -> str | None:
    """The program that wrote these events, where torch did not; ``None`` where unknown."""
    counts = Counter(
        what for name in names for pattern, what in _PROGRAMS if re.match(pattern, name)
    )
    return counts.most_common(1)[0][0] if counts else None


def look_at_folder(names: Iterable[str]) -> Look | None:
    """The kind of a folder without a trace."""
    found = list(names)
    if any(name.endswith((".pftrace", ".pftrace.gz")) for name in found):
        return Look(f"it has files in {_PROTOBUF}", _AS_JSON)
    if any(_GRAPHS.match(name) for name in found):
        return Look("torch's logs in it (TORCH_TRACE) have graphs and no step", _BESIDE_A_TRACE)
    return None


def look_at_members(names: Iterable[str]) -> str | None:
    """The kind of an archive without a trace."""
    found = list(names)
    return next((what for end, what in _MEMBERS if any(n.endswith(end) for n in found)), None)


def is_snapshot(path: Path) -> bool:
    """Does the file begin as a pickle does, and is it called one? Not one that cannot be read."""
    try:
        if path.suffix != ".pickle" or not path.is_file():
            return False
        with opened(path) as file:
            return file.read(2) in _PICKLES
    except OSError:
        return False


def snapshots_in(folder: Path) -> list[Path]:
    """The files of a folder that may be snapshots, in order of their names."""
    try:
        return sorted(path for path in folder.iterdir() if is_snapshot(path))
    except OSError:
        return []


def _match(looks: tuple[tuple[bytes, Look], ...], front: bytes) -> Look | None:
    # Compiled where they are needed, which takes 3 ms: hardly any file is asked.
    found = (look for pattern, look in looks if re.search(pattern, front, re.DOTALL))
    return next(found, None)


_WRITER = "torch.profiler's export_chrome_trace"


def no_json(source: str, data: bytes, why: str) -> InputError:
    """``E302``: the file is no JSON at all; ``why``, where its first bytes show nothing better."""
    hint = f"give a trace that {_WRITER} wrote (.json, .json.gz, .json.zst or .zip)"
    look = look_at_bytes(data) or Look(why)
    return InputError("E302", f"{source} is not JSON.", why=look.what, hint=look.hint or hint)


def no_trace(source: str, data: bytes, why: str) -> InputError:
    """``E303``: the file is JSON, but no trace."""
    look = look_at_json(data) or Look(why)
    return InputError(
        "E303",
        f"{source} is JSON, but not a profiler trace.",
        why=look.what,
        hint=look.hint or f"give a trace that {_WRITER} wrote",
    )


def no_events(source: str) -> InputError:
    """``E304``: a trace without a single event."""
    return InputError(
        "E304",
        f"{source} holds no events.",
        why="the profiler wrote an empty cycle, or recording stopped before it began",
        hint="record a whole step: set the schedule's repeat to 1, or run more steps",
    )


def broken_archive(source: str, why: str = "the compressed data is damaged or cut") -> InputError:
    """``E307``: compressed data without one readable event."""
    return InputError(
        "E307",
        f"{source} is compressed, but cannot be inflated.",
        why=why,
        hint="copy the file again; it may have been cut short",
    )


# Deep nesting shows at once.
_SEARCHED = 1 << 20


def nothing_kept(source: str, health: Mapping[str, int]) -> InputError:
    """Why not one event was kept of a file that has a first one."""
    if health.get("archive_damaged"):
        return broken_archive(source)
    if health.get("cut_short"):
        return no_json(source, b"{", "it is cut before its first event ends")
    if health.get("events_dropped"):
        return no_json(source, b"{", "not one of its events can be read")
    return no_events(source)


def without_events(
    source: str, data: bytes, whole: bool, limits: Limits, health: Mapping[str, int]
) -> InputError:
    """Why there is nothing to read in a file without a first event.

    ``whole``: its beginning in ``data`` is all of it.
    """
    if health.get("archive_damaged"):
        return broken_archive(source)
    if measure_nesting(data[:_SEARCHED], limits.depth + 1) > limits.depth:
        return refuse("E312", source, limits.depth)
    if not whole:
        if data.lstrip()[:1] not in (b"{", b"[", b'"'):
            return no_json(source, data, "it does not begin as JSON does")
        return no_trace(source, data, "it does not begin as a trace does")
    said = ""
    for attempt in (data, mend_text(data)):
        try:
            if attempt.lstrip().startswith(b"["):
                decode_events(attempt)
            elif decode_document(attempt).traceEvents is None:
                return no_trace(source, data, 'it has no "traceEvents"')
            return no_events(source)
        except msgspec.ValidationError as error:
            return no_trace(source, data, str(error))
        except UNREADABLE as error:
            said = said or str(error)
    return no_json(source, data, said)
