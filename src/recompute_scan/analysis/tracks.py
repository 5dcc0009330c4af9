"""A trace with tracks of ours in it, for Perfetto and other viewers of Chrome's format.

The bytes of the trace stay as they are; the tracks come before its first event. Each operator that
the match found is a slice: of the forward pass, of a recompute, or of a redundant one, with the
block that it belongs to. Names were written by others and are quoted as JSON quotes them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np

from recompute_scan import trace
from recompute_scan.errors import UsageError
from recompute_scan.files import opened, written
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace.columns import DEFAULT_LIMITS, Int64, Limits
from recompute_scan.trace.kineto.decode import Window
from recompute_scan.trace.kineto.reader import CHUNK, find_head
from recompute_scan.trace.streams import inflate

# A separate process in the viewer. Processes of the trace are numbers.
PROCESS = "recompute-scan"
FORWARD, RECOMPUTE, REDUNDANT, BLOCKS = "forward", "recompute", "redundant", "blocks"
_TITLES = {
    BLOCKS: "blocks of the forward pass",
    FORWARD: "forward ops with a backward",
    RECOMPUTE: "recompute: the first time again",
    REDUNDANT: "redundant: every time after the first",
}
_PIECE = 1 << 20


def add_tracks(
    addresses: Sequence[str], target: Path, *, force: bool, limits: Limits = DEFAULT_LIMITS
) -> None:
    """The same for the one trace that the addresses stand for.

    Raises:
        UsageError: They stand for several traces, for one inside an archive, or for one that is
            not on this machine (``E229``), or see :func:`write_tracks`.
    """
    found = trace.find(addresses, limits)
    path = found[0]
    if len(found) > 1 or isinstance(path, str) or not path.is_file():
        raise UsageError(
            "E229",
            "Tracks can only be added to one trace, which must be a separate local file.",
            why=f"{len(found)} traces were given" if len(found) > 1 else f"{path} is none",
            hint="name the file of one rank",
        )
    facts = study(trace.load(path, limits=limits))
    write_tracks(path, facts, target, force=force, limits=limits)


def write_tracks(
    path: Path,
    facts: RecomputeFacts,
    target: Path,
    *,
    force: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Write the trace with what was found in it; in gzip where the name ends in ``.gz``.

    Raises:
        UsageError: The trace is no JSON (``E229``), or the file cannot be written (``E208``,
            ``E209``).
    """
    with opened(path, buffering=0) as file, written(target, force=force) as partial:
        stream, _ = inflate(file, str(path), limits, {})
        window = Window(stream, CHUNK, str(path), limits)
        window.fill()
        head = find_head(window)
        if head is None:
            raise UsageError(
                "E229",
                f"{path} is not JSON, so no tracks can be added to it.",
                hint="tracks can be added to .json, .json.gz and .json.zst",
            )
        compressed = target.suffix == ".gz"
        with gzip.open(partial, "wb", 6) if compressed else partial.open("wb") as out:
            sink = cast("IO[bytes]", out)
            sink.write(head.text)
            sink.writelines(line + b",\n" for line in events(facts))
            window.drop(head.first)
            sink.write(window.rest())
            buffer = bytearray(_PIECE)
            with memoryview(buffer) as view:
                while number := stream.readinto(view):
                    sink.write(view[:number])


def events(facts: RecomputeFacts) -> Iterator[bytes]:
    """The events of our tracks, one JSON object each."""
    calls, counts = facts.calls, facts.counts
    block_of = _blocks(facts)
    rows = counts.rows[counts.counted]
    shown = [(FORWARD, rows, block_of[counts.counted])]
    place = np.full(len(calls), -1, np.int64)
    place[counts.rows] = np.arange(len(counts.rows))
    redundant = np.zeros(len(calls), np.bool_)
    redundant[counts.redundant_rows] = True
    for each in facts.alignment.recomputes:
        again, original = each.again[each.ran], each.original[each.ran]
        blocks = block_of[place[original]]
        for which, kind in ((redundant[again], REDUNDANT), (~redundant[again], RECOMPUTE)):
            shown.append((kind, again[which], blocks[which]))
    # A track for each kind and thread, since slices of one track must nest.
    tracks: dict[tuple[str, int], int] = {}
    for kind, name, thread, start, duration, number in _slices(facts, shown):
        track = tracks.get((kind, thread))
        if track is None:
            track = tracks[kind, thread] = len(tracks) + 1
            about = {"ph": "M", "pid": PROCESS, "tid": track, "ts": 0}
            if track == 1:
                yield _json({**about, "name": "process_name", "args": {"name": PROCESS}})
            yield _json({**about, "name": "thread_name", "args": {"name": _TITLES[kind]}})
        event = {"ph": "X", "cat": PROCESS, "name": name, "pid": PROCESS, "tid": track}
        text = _json({**event, "args": {"block": number} if number >= 0 else {}})
        # Times are written digit by digit: a double would lose the nanoseconds of 1970's clock.
        yield text[:-1] + f',"ts":{us(start)},"dur":{us(duration)}}}'.encode()


def _slices(
    facts: RecomputeFacts, shown: Sequence[tuple[str, Int64, Int64]]
) -> Iterator[tuple[str, str, int, int, int, int]]:
    """Kind, name, thread, start, duration and block of each slice."""
    calls, rows = facts.calls, facts.counts.rows
    for number, layer in enumerate(facts.layers):
        for block in layer:
            first, last = rows[block.places.start], rows[block.places.stop - 1]
            if calls.thread[first] == calls.thread[last]:
                span = int(calls.start[first]), int(calls.end[last] - calls.start[first])
                yield BLOCKS, f"block {number}", int(calls.thread[first]), *span, number
    for kind, operators, blocks in shown:
        for row, number in zip(operators.tolist(), blocks.tolist(), strict=True):
            span = int(calls.start[row]), int(calls.duration[row])
            yield kind, calls.called(row), int(calls.thread[row]), *span, number


def _blocks(facts: RecomputeFacts) -> Int64:
    """The number of each forward op's block, -1 for none."""
    found = np.full(len(facts.counts.rows), -1, np.int64)
    for number, layer in enumerate(facts.layers):
        for block in layer:
            found[block.places] = number
    return found


def us(ns: int) -> str:
    """The µs of a time in ns, exact: ``1.005``."""
    whole, rest = divmod(ns, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
