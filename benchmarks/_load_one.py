"""Load one trace one way and say what it took: one fresh process per measurement.

    python benchmarks/_load_one.py WAY TRACE

Prints a line of JSON: seconds and CPU seconds of the load alone (imports done before), peak
memory of the process and of its children together in MB, the same before
the load, and how many events came out. Runs in any interpreter that has what the way needs.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import children, peak_mb  # type: ignore[import-not-found]

# A thread pool that nobody uses costs CPU time by waiting.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_CHUNK = 1 << 18
# Returns how many events there are, and what must stay alive until memory was read.
Load = Callable[[], tuple[int | None, Any]]


def ours(path: Path, **how: bool) -> Load:
    """Our own reader."""
    load = importlib.import_module("recompute_scan.trace").load

    def run() -> tuple[int, Any]:
        trace = load(path, **how)
        return len(trace), trace

    return run


def ours_with_frames(path: Path) -> Load:
    """Our own reader, Python frames kept."""
    return ours(path, python=True)


def analyze(path: Path) -> Load:
    """The whole command."""
    main = importlib.import_module("recompute_scan.cli").main

    def run() -> tuple[None, Any]:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            status = main(["analyze", str(path), "--format", "json"])
        if status:
            raise SystemExit(status)
        return None, None

    return run


def hta(backend: str) -> Callable[[Path], Load]:
    """One of Holistic Trace Analysis' readers, by its own name."""

    def prepare(path: Path) -> Load:
        parser = importlib.import_module("hta.common.trace_parser")
        config = importlib.import_module("hta.configs.parser_config")
        chosen = config.ParserConfig.get_default_cfg()
        chosen.parser_backend = config.ParserBackend(backend)
        if backend != "json":
            importlib.import_module("ijson")

        def run() -> tuple[int, Any]:
            loaded = parser.parse_trace_dataframe(str(path), chosen)
            return len(loaded[1]), loaded

        return run

    return prepare


def orjson(path: Path) -> Load:
    """Plain decoding to dictionaries."""
    loads = importlib.import_module("orjson").loads

    def run() -> tuple[int, Any]:
        document = loads(_content(path))
        return len(document["traceEvents"]), document

    return run


def reading(path: Path) -> Load:
    """A limit: the bytes of the file, 256 KB at a time, and nothing done with them."""
    return _emptying(lambda: path.open("rb", buffering=0))


def inflating(path: Path) -> Load:
    """A limit: a gzip file through isal."""
    igzip = importlib.import_module("isal.igzip")
    return _emptying(lambda: igzip.open(path, "rb"))


def _emptying(opened: Callable[[], Any]) -> Load:
    def run() -> tuple[None, Any]:
        buffer = bytearray(_CHUNK)
        with opened() as file:
            while file.readinto(buffer):
                pass
        return None, None

    return run


def skipping(path: Path) -> Load:
    """A limit: msgspec over the whole document, with every value checked and passed over."""
    msgspec = importlib.import_module("msgspec")
    decode = msgspec.json.Decoder(msgspec.defstruct("Nothing", [])).decode

    def run() -> tuple[None, Any]:
        return None, decode(_content(path))

    return run


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


WAYS: dict[str, Callable[[Path], Load]] = {
    "ours": ours,
    "ours-with-frames": ours_with_frames,
    "analyze": analyze,
    "hta-json": hta("json"),
    "hta-ijson": hta("ijson"),
    "hta-ijson_batched": hta("ijson_batched"),
    "hta-ijson_batch_and_compress": hta("ijson_batch_and_compress"),
    "orjson": orjson,
    "reading": reading,
    "inflating": inflating,
    "skipping": skipping,
}


def main() -> None:
    """Measure the way and the trace named on the command line."""
    name, path = sys.argv[1:]
    run = WAYS[name](Path(path))
    imported = _peak_mb()
    cpu, began = _cpu_seconds(), time.perf_counter()
    with Children() as below:
        events, kept = run()
    seconds, used = time.perf_counter() - began, _cpu_seconds() - cpu
    told = {
        "seconds": seconds,
        "cpu": used,
        "mb": _peak_mb() + below.peak_mb,
        "imported_mb": imported,
        "events": events,
    }
    print(json.dumps(told))
    del kept


class Children(threading.Thread):
    """Looks at this process's children now and then (on Linux; elsewhere it sees none).

    Attributes:
        peak_mb: Sum of the peaks of all children seen.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._peaks: dict[int, float] = {}
        self._done = threading.Event()

    @property
    def peak_mb(self) -> float:
        return sum(self._peaks.values())

    def __enter__(self) -> Children:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        mine = Path("/proc/self/cmdline")
        while not self._done.wait(0.05):
            for child in children(os.getpid()):
                with suppress(OSError):
                    # Between its birth and its first command it is a copy of this process.
                    if Path(f"/proc/{child}/cmdline").read_bytes() != mine.read_bytes():
                        self._peaks[child] = max(self._peaks.get(child, 0.0), peak_mb(child))


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _peak_mb() -> float:
    # What the system accounts to a process holds its parent's memory, from before it began.
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return peak_mb(os.getpid()) or used


if __name__ == "__main__":
    main()
