"""Every trace, bundled: the same answer before and after, sizes, and no canary.

Each trace is bundled twice, plain and strict, and both archives are analyzed anew. Of each, a copy
with canaries in every field goes the same way, and is searched for them afterwards.

  python -m benchmarks share                    all cases and all traces of the repository
  python -m benchmarks share --cases none       the traces only
  python -m benchmarks share FILE…              these traces as well

The status is 1 where an answer differs or a canary comes out.
"""

import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from tests.cases.case import record
from tests.cases.groups import GROUPS
from tests.share.canaries import NAMED, WORD, as_json, found_in, planted

from benchmarks._frame import TRACES, Table, benchmark, some
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.bundle import pack
from recompute_scan.bundle.pack import differences
from recompute_scan.errors import InputError


@benchmark
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path, exists=True))
@some("--cases", [*GROUPS, "none"], default=GROUPS, text="Groups of cases.")
def main(traces: Sequence[Path], cases: Sequence[str]) -> int:
    different = canaries = total = 0
    columns = {"trace": "<44", "verdict": "<13", "in": ">11,", "plain": ">11,", "strict": ">11,"}
    table = Table({**columns, "same": "<4", "canaries": "<8"})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in _sources(cases, traces, folder):
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
            same = "NO" if told else "yes"
            table.row(source.name, before.verdict, _size(source), *sizes, same, len(left))
            for line in (*told, *left):
                print(f"    {line}")
    print(f"{total} traces: {different} answers differ, canaries found: {canaries}")
    return 1 if different or canaries else 0


def _sources(groups: Sequence[str], more: Sequence[Path], folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in TRACES.iterdir() if (path / "run-rank0.json").exists())
    yield from sorted((TRACES / "public").glob("*.json.gz"))
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
    return sum(file.stat().st_size for file in (source.iterdir() if source.is_dir() else [source]))
