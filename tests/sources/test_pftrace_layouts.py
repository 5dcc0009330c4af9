"""Packets and their fields, found many at once, are those that a plain parser finds one by one."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from recompute_scan.errors import InputError
from recompute_scan.trace.perfetto import messages, packets
from recompute_scan.trace.perfetto.messages import gather_nested
from recompute_scan.trace.perfetto.wire import PADDING, Bytes
from tests.effort import examples
from tests.sources import pftrace_builder as build
from tests.sources.test_pftrace import document, read_bytes

_EVENT = 11
_NUMBERS = (7, 200, 70_000, 10**18, 2**63 + 5, 0)
_MANY = 400


def parsed(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a sound message: number, and a value or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at += 1
            if data[at - 1] < 128:
                return value
            shift += 7

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7) or varint()
        yield tag >> 3, data[at : at + size]
        at += size


def _message(chance: random.Random, depth: int = 1) -> bytes:
    parts = []
    for _ in range(chance.randrange(6)):
        kind = chance.randrange(6 if depth else 4)
        field = chance.choice((1, 8, 10, 13, 53, 1000))
        if kind < 2:
            parts.append(build.number(field, chance.choice(_NUMBERS)))
        elif kind == 2:
            parts.append(build.piece(field, bytes(chance.choice((0, 3, 130)))))
        elif kind == 3:
            parts.append(build.double(9, 0.5) + build.varint(14 << 3 | 5) + struct.pack("<f", 1))
        else:
            parts.append(build.piece(_EVENT, _message(chance, depth - 1)))
    return b"".join(parts)


def _signed(number: int) -> int:
    return number - 2**64 if number >> 63 else number


@pytest.mark.parametrize("seed", range(examples(40)))
def test_fields_are_those_of_a_plain_parser(seed: int) -> None:
    chance = random.Random(seed)
    few = [_message(chance) for _ in range(chance.choice((2, 6, 30)))]
    chosen = [chance.choice(few) for _ in range(_MANY)]
    data = Bytes(b"".join(chosen) + bytes(PADDING))
    ends = np.cumsum([len(each) for each in chosen])
    broken = [0]
    outer, inner = gather_nested(data, np.append(0, ends[:-1]), ends, broken, _EVENT)
    assert broken == [0]
    fields = [list(parsed(each)) for each in chosen]
    inside = [[value for number, value in each if number == _EVENT] for each in fields]
    events = [
        [*parsed(each[-1])] if each and isinstance(each[-1], bytes) else [] for each in inside
    ]
    assert inner.messages == sum(map(bool, inside))
    for gathered, expected in ((outer, fields), (inner, events)):
        for number in (1, 8, 10, 13, 53, 1000):
            last = [
                [_signed(v) for n, v in each if n == number and isinstance(v, int)][-1:] or [-9]
                for each in expected
            ]
            assert gathered.numbers(number, _MANY, -9).tolist() == [value for (value,) in last]
            texts = sorted(
                (row, value)
                for row, each in enumerate(expected)
                for n, value in each
                if n == number and isinstance(value, bytes)
            )
            spans = gathered.pick(number).each()
            assert sorted((row, data.raw[start:end]) for row, start, end in spans) == texts


@pytest.mark.parametrize("seed", range(examples(40)))
def test_borders_are_those_of_a_plain_parser(seed: int) -> None:
    """Packets that have their time first are guessed; so is much that is none."""
    chance = random.Random(seed)
    inside = (b"", b"\n\2@\0", b"\n\x80\1@", b"\n\1@" * 90, bytes(20_000))
    whole = [
        build.packet(
            chance.choice((build.number(8, chance.choice(_NUMBERS)), build.number(10, 1), b""))
            + build.piece(9, chance.choice(inside))
        )
        for _ in range(12)
    ]
    often = chance.choice((1, 8, 60))
    chosen = [each for _ in range(60) for each in [chance.choice(whole)] * often]
    raw = b"".join(chosen)
    cut = raw[: len(raw) - chance.choice((0, 1, len(chosen[-1]) - 1))]
    ends = np.cumsum([len(each) for each in chosen])
    expected = np.append(0, ends[:-1])[ends <= len(cut)].tolist()
    tag, start, rest, sound = packets._split(Bytes(cut + bytes(PADDING)))
    assert (tag.tolist(), sound) == (expected, True)
    assert rest == (ends[len(expected) - 1] if expected else 0)
    found = zip(start.tolist(), [*expected[1:], rest], strict=True)
    bodies = [value for _, value in parsed(raw[:rest])]
    assert [raw[begin:end] for begin, end in found] == bodies


def test_layouts_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged traces too are read as by walking alone."""
    chance = random.Random(5)
    recorded = document("public/h100-nanogpt-compiled")
    events = [event for event in recorded["traceEvents"] if event.get("ph") == "X"]
    sound = build.pftrace({**recorded, "traceEvents": events[4000:4150]}, packed=False)
    for _ in range(examples(250)):
        data = bytearray(sound)
        for _ in range(chance.choice((1, 2, 8))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        answers: list[list[object]] = []
        for fewest in (1, 10**9):
            monkeypatch.setattr(messages, "_FEWEST", fewest)
            try:
                trace = read_bytes(bytes(data), health={})
            except InputError as error:
                answers.append([error.code])
            else:
                columns = (trace.name, trace.kind, trace.ts, trace.dur, trace.correlation)
                answers.append([str(trace.health), *(column.tolist() for column in columns)])
        assert answers[0] == answers[1]
