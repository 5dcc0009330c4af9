"""Files that are no trace: each is called by its name, with what to do instead."""

import gzip
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan.errors import InputError
from recompute_scan.trace import find, load


def refused(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load(path)
    return caught.value


# The first bytes of real files; of xplane.pb and the event file, of their published formats.
BYTES = {
    "Nsight Systems": b"NVIDIA Tegra Profiler Report 2025@1@3@140-251335620677v0.\n\x0bLocal",
    "Nsight Compute": b"NVR\0\2\0\0\0\x08\x07\xcc\0\0\x08\0\x10",
    "pickle": pickle.dumps({"segments": [], "device_traces": []}),
    "TensorBoard": struct.pack("<Q", 24) + b"abcd\x09" + bytes(8) + b"\x1a\x0dbrain.Event:2abcd",
    "JAX": b"\x0a\xb4\x03\x08\x01\x12\x0e/host:metadata" + bytes(300),
    "Perfetto": b"\x0a\x14\xe2\x03\x11\x08\x01\x1a\x0d\x08\x07\x32\x09python.py",
    "Parquet": b"PAR1\x15\4\x15" + bytes(30),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(30),
    "flame graph": b"train.py(3): main;linear.py(125): forward 1204\nmain;step 33\n",
    "table of times": b" Time (%)  Total Time (ns)  Instances   Avg (ns)\n 31.2  1203 4\n",
}
DOCUMENTS: dict[str, Any] = {
    "ExecutionTraceObserver": {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []},
    "memory snapshot": {"segments": [], "device_traces": []},
    "rocprofv3": {"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}, "buffer_records": {}}]},
    "speedscope": {"$schema": "https://www.speedscope.app/file-format-schema.json"},
}


@pytest.mark.parametrize("called", BYTES)
def test_a_file_that_is_no_json_is_called_by_its_name(tmp_path: Path, called: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(BYTES[called])
    error = refused(path)
    assert error.code == "E302"
    assert called in (error.why or "")
    assert error.hint


def test_a_perfetto_trace_is_refused_with_how_to_export_json(tmp_path: Path) -> None:
    for name, write in (("a.pftrace", bytes), ("b.pftrace.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(write(BYTES["Perfetto"]))
        assert 'export_chrome_trace("trace.json.gz")' in (refused(path).hint or "")
    with pytest.raises(InputError, match=r"\.pftrace"):
        find([tmp_path])


@pytest.mark.parametrize("text", ["\n hello", "\nPath", "\n@b", "\n\t@x", "\néb@"])
def test_text_behind_a_line_break_is_no_perfetto_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert "Perfetto" not in (refused(path).why or "")


@pytest.mark.parametrize("called", DOCUMENTS)
def test_json_that_is_no_trace_is_called_by_its_name(tmp_path: Path, called: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(DOCUMENTS[called]))
    error = refused(path)
    assert error.code == "E303"
    assert called in (error.why or "")


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("V8.GCScavenger", "V8"),
        ("Choreographer#doFrame 12", "Android"),
        ("Total ExecuteCompiler", "clang"),
        ("PjitFunction(step)", "JAX"),
        ("work", "no event is an operator"),
    ],
)
def test_events_of_another_program_in_the_same_format(
    tmp_path: Path, name: str, whose: str
) -> None:
    event = {"ph": "X", "cat": "toplevel", "name": name, "pid": 1, "tid": 1, "ts": 5, "dur": 3}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event] * 3}))
    error = refused(path)
    assert error.code == "E303"
    assert whose in (error.why or "")


def test_archives_that_hold_no_trace(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    assert "numpy" in (refused(tmp_path / "arrays.npz").why or "")
    for member, called in (("model/data.pkl", "torch.save"), ("a.sqlite", "inside an archive")):
        path = tmp_path / "archive.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, b"")
        assert called in (refused(path).why or "")
