"""A good trace cut at every hundredth of its length: a verdict as soon as one step is whole."""

import gzip
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError
from recompute_scan.trace import load
from tests.cases.recorded import recorded

CASE = "n_in_r"


@dataclass(frozen=True)
class Whole:
    """The whole trace's bytes, where its first step ends in ns, and what it says."""

    text: bytes
    packed: bytes
    first_step_ends: int
    names: tuple[str, ...]
    events: int


@cache
def whole() -> Whole:
    path, _ = recorded(CASE)
    trace = load(path)
    step = next(
        row for row in range(len(trace)) if trace.names[trace.name[row]].startswith("ProfilerStep#")
    )
    packed = path.read_bytes()
    return Whole(
        text=gzip.decompress(packed),
        packed=packed,
        first_step_ends=int(trace.ts[step] + trace.dur[step]),
        names=trace.names,
        events=len(trace),
    )


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_every_cut_gives_a_verdict_from_the_first_whole_step_on(
    tmp_path: Path, compressed: bool, every: int
) -> None:
    data = whole().packed if compressed else whole().text
    file = tmp_path / ("cut.json.gz" if compressed else "cut.json")
    before = 0
    steps = 0
    for percent in range(1, 100, every):
        file.write_bytes(data[: len(data) * percent // 100])
        try:
            trace = load(file)
        except InputError as error:
            assert error.code in {"E302", "E304", "E307"}
            assert before == 0, "a longer piece cannot hold less"
            continue
        assert len(trace) >= before
        assert set(trace.names) <= set(whole().names)
        before = len(trace)
        assert trace.health.get("cut_short") == 1
        assert set(trace.health) <= {"cut_short", "archive_damaged", "metadata_unreadable"}
        result = analyse([file])
        assert result.health["cut_short"] == 1
        if trace.cut_at is None or trace.cut_at >= whole().first_step_ends:
            assert result.verdict == "doubled", f"cut at {percent} %"
            steps += 1
    assert steps > 50 / every
    assert before > 0.9 * whole().events


def test_the_cut_is_told_as_a_time_of_the_last_call(tmp_path: Path) -> None:
    file = tmp_path / "half.json"
    file.write_bytes(whole().text[: len(whole().text) // 2])
    trace = load(file)
    assert trace.cut_at == trace.ts[-1]
