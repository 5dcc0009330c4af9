"""Two processes read what one reads: columns, codes, counters and errors, to the bit."""

from __future__ import annotations

import gzip
import io
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recompute_scan.errors import InputError
from recompute_scan.trace import Limits, load
from recompute_scan.trace.kineto import stripes, together
from recompute_scan.trace.kineto.second import share
from recompute_scan.trace.kineto.stripes import ODD, ReadingPlan
from tests.cases.recorded import recorded
from tests.effort import examples

from .make_corpus import FOLDER
from .test_streaming import comparable, events, written

PLAIN = sorted(path for path in FOLDER.iterdir() if path.suffix == ".json")
ALONE = 1 << 60


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is large, on a machine with two processors."""
    monkeypatch.setattr(together, "STRIPE", 700)
    monkeypatch.setattr(together, "usable_cores", lambda: 2)
    monkeypatch.setattr(stripes, "_OVERHANG", 4096)
    monkeypatch.setattr(stripes, "CHUNK", 400)


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process's work done in this one, which is faster."""
    monkeypatch.setattr(together, "_start", done_here)


def done_here(plan: ReadingPlan) -> Any:
    output = io.BytesIO()
    with io.FileIO(plan.path) as file, suppress(*ODD):
        share(plan, file, output)
    output.seek(0)
    return SimpleNamespace(
        stdout=output, stdin=None, kill=lambda: None, wait=lambda: None, returncode=0
    )


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were read together, each time."""
    found: list[int] = []
    real = together.read_together

    def watched(path: Path, first: int, *rest: Any) -> int:
        end = real(path, first, *rest)
        found.append(end - first)
        return end

    monkeypatch.setattr(together, "read_together", watched)
    return found


def outcome(path: Path, from_bytes: int, python: bool, limits: Limits) -> Any:
    before = together.FROM_BYTES
    together.FROM_BYTES = from_bytes
    try:
        return comparable(load(path, python=python, limits=limits))
    except InputError as error:
        return error.code
    finally:
        together.FROM_BYTES = before


def same_as_alone(path: Path, python: bool = False, limits: Limits | None = None) -> Any:
    limits = limits or Limits()
    alone = outcome(path, ALONE, python, limits)
    assert outcome(path, 0, python, limits) == alone
    return alone


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A real trace, several hundred stripes long."""
    path, _ = recorded("n_in_r")
    plain = tmp_path / "trace.json"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    return plain


@pytest.mark.parametrize("python", [True, False])
def test_a_second_process_changes_nothing(trace: Path, python: bool, shared: list[int]) -> None:
    same_as_alone(trace, python)
    # Nearly all of it was read that way, by a process of its own.
    assert shared[0] > 0.9 * trace.stat().st_size


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_a_damaged_file_is_read_as_by_one_process(path: Path) -> None:
    same_as_alone(path, python=True)


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("per_mille", range(5, 1000, 45))
@pytest.mark.parametrize("damage", [b"", b'"', b"\\", b"\xff", b"\0", b"{", b"},", b'"ts": "x",'])
def test_damage_anywhere_is_read_as_by_one_process(
    trace: Path, per_mille: int, damage: bytes
) -> None:
    data = trace.read_bytes()[:60_000]
    at = len(data) * per_mille // 1000
    trace.write_bytes(data[:at] + damage + (data[at:] if damage else b""))
    same_as_alone(trace)


@pytest.mark.usefixtures("in_one_process")
@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    listed=st.lists(events, min_size=10, max_size=60),
    style=st.sampled_from(["compact", "dense", "indent2", "kineto"]),
    python=st.booleans(),
)
def test_any_events_are_read_as_by_one_process(
    listed: list[dict[str, Any]], style: str, python: bool, tmp_path: Path
) -> None:
    path = tmp_path / "any.json"
    path.write_bytes(written({"traceEvents": listed, "distributedInfo": {"rank": 1}}, style))
    same_as_alone(path, python)


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("limits", [Limits(events=700), Limits(distinct=40)])
def test_limits_hold_for_both(trace: Path, limits: Limits) -> None:
    assert same_as_alone(trace, limits=limits) in ("E313", "E314")


@pytest.mark.parametrize("interpreter", ["/no/such/python", "/bin/false", "/bin/cat"])
def test_without_a_second_process_one_reads_all(
    trace: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    same_as_alone(trace)


def test_a_second_process_that_dies_costs_nothing_but_time(
    trace: Path, monkeypatch: pytest.MonkeyPatch, shared: list[int]
) -> None:
    def cut(plan: ReadingPlan) -> Any:
        second = done_here(plan)
        second.stdout = io.BytesIO(second.stdout.read()[:5000])
        return second

    monkeypatch.setattr(together, "_start", cut)
    same_as_alone(trace)
    assert 0 < shared[0] < 0.9 * trace.stat().st_size


def test_modules_of_the_current_folder_are_not_run(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: list[int]
) -> None:
    for name in ("msgspec", "struct", "recompute_scan"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    same_as_alone(trace)
    assert shared[0] > 0.9 * trace.stat().st_size
    assert not (tmp_path / "ran").exists()


def test_small_files_and_single_processors_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert together.worth_it(together.FROM_BYTES)
    assert not together.worth_it(together.FROM_BYTES - 1)
    monkeypatch.setattr(together, "usable_cores", lambda: 1)
    assert not together.worth_it(together.FROM_BYTES)


def test_a_compressed_file_is_read_by_one_process(
    trace: Path, shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = trace.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes(), 1))
    monkeypatch.setattr(together, "FROM_BYTES", 0)
    load(packed)
    assert shared == []
