"""Bundle every trace there is, and compare the answer before and after: ``make share-check``.

    python benchmarks/share.py                    all cases and all traces of the repository
    python benchmarks/share.py --cases none       the traces only
    python benchmarks/share.py FILE…              these traces as well

Each trace is bundled twice, plain and strict, and both archives are analysed anew. Of each, a
copy with canaries in every field goes the same way, and is searched for them afterwards.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.bundle import pack
from recompute_scan.bundle.same import differences
from recompute_scan.errors import InputError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import GROUPS
from tests.cases.case import record
from tests.share.canaries import NAMED, WORD, as_json, found_in, planted

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Print the table; the status is 1 when an answer differs or a canary comes out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--cases", nargs="*", choices=[*GROUPS, "none"], default=list(GROUPS))
    options = parser.parse_args()
    different = canaries = total = 0
    print(f"{'trace':44} {'verdict':13} {'in':>11} {'plain':>11} {'strict':>11} same canaries")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in _sources(options.cases, options.traces, folder):
            before = analyse([source])
            sizes = []
            told: list[str] = []
            for strict in (False, True):
                archive = folder / "share.zip"
                contents = pack([source], archive, strict=strict)
                sizes.append(archive.stat().st_size)
                told += differences(before, analyse([archive]))
                told += contents.dropped
            left = _canaries(source, folder)
            total += 1
            different += bool(told)
            canaries += len(left)
            print(
                f"{source.name:44} {before.verdict:13} {_size(source):>11,} {sizes[0]:>11,} "
                f"{sizes[1]:>11,} {'NO' if told else 'yes':4} {len(left)}",
                flush=True,
            )
            for line in (*told, *left):
                print(f"    {line}")
    print(f"{total} traces: {different} answers differ, canaries found: {canaries}")
    return 1 if different or canaries else 0


def _sources(groups: list[str], more: list[Path], folder: Path) -> Iterator[Path]:
    traces = ROOT / "traces"
    yield from sorted(path for path in traces.iterdir() if (path / "run-rank0.json").exists())
    yield from sorted((traces / "public").glob("*.json.gz"))
    yield from more
    for group in groups:
        for case in GROUPS.get(group, ()):
            trace = folder / f"{case.name}.json.gz"
            record(case, trace)
            yield trace
            trace.unlink()


def _canaries(source: Path, folder: Path) -> list[str]:
    """Where canaries come out of a bundle of the same trace with canaries in it."""
    trace = source / "trace-rank0.json.gz" if source.is_dir() else source
    found = []
    for strict in (False, True):
        document = json.loads(gzip.decompress(trace.read_bytes()))
        document = planted(document, names=WORD if strict else NAMED)
        planted_trace = folder / "planted.json"
        planted_trace.write_bytes(as_json(document))
        archive = folder / "planted.zip"
        try:
            pack([planted_trace], archive, strict=strict)
        except InputError as error:
            found.append(f"not bundled: {error.what}")
        else:
            found += found_in(archive)
        planted_trace.unlink()
    return found


def _size(source: Path) -> int:
    if source.is_dir():
        return sum(file.stat().st_size for file in source.iterdir())
    return source.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
