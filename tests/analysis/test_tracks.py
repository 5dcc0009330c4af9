"""Traces with tracks of what was found, and the plain count in SQL."""

import gzip
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.analysis.tracks import PROCESS, add_tracks
from recompute_scan.cli import main
from recompute_scan.errors import UsageError
from recompute_scan.recompute.study import study
from recompute_scan.trace import load
from tests.sources.nsys_builder import Export

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "traces"
MODULE = (ROOT / "docs" / "perfetto" / "recompute_scan.sql").read_text()
TWICE = TRACES / "plain_twice" / "trace-rank0.json.gz"


def added(path: Path) -> tuple[dict[str, list[dict[str, Any]]], bytes]:
    """The slices on each of our tracks, by its title, and the file's bytes."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    ours = [e for e in json.loads(text)["traceEvents"] if e.get("pid") == PROCESS]
    titles = {e["tid"]: e["args"]["name"] for e in ours if e["name"] == "thread_name"}
    tracks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in ours:
        if event["ph"] == "X":
            tracks[titles[event["tid"]].partition(":")[0]].append(event)
    return tracks, text


def test_every_op_is_on_the_track_of_what_it_is(tmp_path: Path) -> None:
    target = tmp_path / "out.json.gz"
    add_tracks([str(TWICE)], target, force=False)
    tracks, _ = added(target)
    facts = study(load(TWICE))
    again = [
        facts.calls.names[code]
        for each in facts.alignment.recomputes
        for code in facts.calls.name[each.again[each.ran]]
    ]
    shown = [e["name"] for e in (*tracks["recompute"], *tracks["redundant"])]
    assert Counter(shown) == Counter(again)
    assert len(tracks["redundant"]) == len(facts.counts.redundant_rows)
    assert len(tracks["forward ops with a backward"]) == int(facts.counts.counted.sum())
    assert len(tracks["blocks of the forward pass"]) == len(facts.blocks)


def test_the_trace_itself_is_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    add_tracks([str(TWICE)], target, force=False)
    original = gzip.decompress(TWICE.read_bytes())
    _, text = added(target)
    end = original.index(b"{", original.index(b'"traceEvents"'))
    assert text.endswith(original[end:])
    first, second = analyse([TWICE]), analyse([target])
    assert (first.verdict, first.recompute_per_backward) == (
        second.verdict,
        second.recompute_per_backward,
    )


@pytest.mark.parametrize("name", ["plain_none", "doubled_llama_fsdp", "public/v100-torchrec"])
def test_slices_of_one_track_nest(tmp_path: Path, name: str) -> None:
    path = TRACES / name / "trace-rank0.json.gz"
    path = path if path.exists() else TRACES / f"{name}.json.gz"
    target = tmp_path / "out.json"
    add_tracks([str(path)], target, force=False)
    for events in added(target)[0].values():
        by_track = defaultdict(list)
        for event in events:
            span = (round(event["ts"] * 1000), -round(event["dur"] * 1000))
            by_track[event["tid"]].append(span)
        for spans in by_track.values():
            ends: list[int] = []
            for start, minus in sorted(spans):
                while ends and ends[-1] <= start:
                    ends.pop()
                assert not ends or start - minus <= ends[-1] + 1
                ends.append(start - minus)


def test_names_are_quoted(tmp_path: Path) -> None:
    text = gzip.decompress(TWICE.read_bytes()).replace(
        b'"aten::addmm"', rb'"aten::addmm</script>\"\\ \u0000"'
    )
    path, target = tmp_path / "hostile.json", tmp_path / "out.json"
    path.write_bytes(text)
    add_tracks([str(path)], target, force=False)
    added(target)  # it is JSON


def test_the_command_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "out.json.gz"
    command = ["analyze", str(TWICE), "--perfetto", str(target)]
    assert main(command) == 0
    assert added(target)[0]["redundant"]
    assert main(command) == 2  # it is there


def test_what_cannot_have_tracks_is_said(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.add("NVTX_EVENTS", [export.range("aten::mm, seq = 1, op_id = 1", 0, 10)])
    two = [str(TWICE), str(TRACES / "plain_once")]
    for given in ([str(export.path)], two):
        with pytest.raises(UsageError, match="E229"):
            add_tracks(given, tmp_path / "out.json", force=False)
    assert not (tmp_path / "out.json").exists()


# The plain count in SQL


def sqlite_with(events: Iterable[dict[str, Any]]) -> sqlite3.Connection:
    """A table `slice` as Perfetto makes it: slices of one track nest by time."""
    connection = sqlite3.connect(":memory:")
    args: list[dict[str, Any]] = []
    rows: list[tuple[Any, ...]] = []
    tracks: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            tracks[event.get("pid"), event.get("tid")].append(event)
    for track, mine in enumerate(tracks.values()):
        stack: list[tuple[float, int]] = []
        for event in sorted(mine, key=lambda e: (e["ts"], -e.get("dur", 0))):
            end = event["ts"] + event.get("dur", 0)
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            number = len(rows)
            parent = stack[-1][1] if stack else None
            rows.append((number, track, event["name"], event.get("cat"), parent, len(args)))
            args.append(event.get("args") or {})
            stack.append((end, number))
    connection.execute(
        "CREATE TABLE slice (id PRIMARY KEY, track_id, name, category, parent_id, arg_set_id)"
    )
    connection.executemany("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.create_function(
        "extract_arg", 2, lambda row, key: args[row].get(key.removeprefix("args."))
    )
    connection.executescript(MODULE.replace("CREATE PERFETTO", "CREATE"))
    return connection


@pytest.mark.parametrize(
    "name",
    [
        *("plain_none/trace-rank0", "plain_once/trace-rank0", "plain_twice/trace-rank0"),
        *("doubled_llama_fsdp/trace-rank0", "repaired_llama_fsdp/trace-rank0"),
        *("public/mi300x-resnet-checkpointed", "public/v100-torchrec"),
        *("versions/2.14.1/r_in_n", "versions/2.14.1/n_outside"),
    ],
)
def test_the_module_counts_what_the_plain_count_counts(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    counts = sqlite_with(document["traceEvents"]).execute("SELECT * FROM recompute_scan_counts")
    found = {name: (outside, inside) for name, outside, inside in counts}
    expected = {
        tally.name: (tally.outside, tally.inside) for tally in study(load(path)).plain.tallies
    }
    assert found == expected
    assert found
