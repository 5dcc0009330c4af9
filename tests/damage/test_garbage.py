"""Bytes that only look like events are passed over in time in proportion to their number."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute_scan.trace import Limits
from recompute_scan.trace.kineto import schema
from tests.effort import examples

PIECES = [
    "{",
    "}",
    "{}",
    "{{}",
    '{"',
    '"}',
    '{\\"',
    "[{",
    "},{",
    '{"a":"b}',
    '{"ph":"X"},{"',
    "\\",
    ",",
]


def work(data: bytes) -> tuple[int, int]:
    """Bytes that were looked at for the ends of events, and bytes that were mended."""
    looked_at: list[int] = []
    mended: list[int] = []
    end_of, mend = schema.object_end, schema.mend

    def counted_end(data: bytes, start: int = 0, most: int = 1 << 20) -> int:
        end = end_of(data, start, most)
        looked_at.append(end - start if end > 0 else min(most, len(data) - start))
        return end

    def counted_mend(data: bytes, *rest: Any, **more: Any) -> Any:
        mended.append(len(data))
        return mend(data, *rest, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schema, "object_end", counted_end)
        patched.setattr(schema, "mend", counted_mend)
        schema.Mender("trace.json", Limits(), {}).mended(data)
    return sum(looked_at), sum(mended)


@pytest.mark.parametrize("piece", PIECES)
def test_the_same_over_and_over(piece: str) -> None:
    data = (piece * 40_000)[:40_000].encode()
    looked_at, mended = work(data)
    assert looked_at <= 10 * len(data)
    assert mended <= 70 * len(data)


@settings(max_examples=examples(100), deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=2, max_size=6))
def test_any_pattern(pieces: list[str]) -> None:
    data = ("".join(pieces) * 8000)[:8000].encode()
    looked_at, mended = work(data)
    assert looked_at <= 10 * len(data)
    assert mended <= 70 * len(data)


def test_sound_events_among_garbage_are_found() -> None:
    event = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1,"dur":2}'
    health: dict[str, int] = {}
    pieces = (b"{{} {}, " * 3, event, b", {{ [}, ", event, b" junk ", event)
    found = schema.Mender("trace.json", Limits(), health).mended(b"".join(pieces))
    assert [one.name for one in found if one.ph] == ["aten::mm"] * 3
    # An unclosed brace three times, another, and the junk; `{}` is an event without anything.
    assert health == {"events_dropped": 5}
