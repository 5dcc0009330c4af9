"""Many ranks, wherever they are read: the same result, and none lost without a word."""

import gzip
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

import recompute_scan as rs
from recompute_scan.analysis import pipeline
from recompute_scan.analysis.headline import headline
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.analysis.ranks import Piece
from recompute_scan.errors import InputError
from recompute_scan.result import to_json
from recompute_scan.workers import AUTOMATIC, HERE, Workers
from tests.clusters import local_cluster
from tests.recompute.training import checkpointed_step, plain_step
from tests.report import pages
from tests.trace_builder import as_bytes, document, thread

RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, of which the third recomputes nothing, and a fifth file that is no trace."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(RANKS):
        calls = plain_step(0) if rank == 2 else checkpointed_step(0)
        data = as_bytes(document(thread(calls), distributedInfo={"rank": rank}))
        (folder / f"rank{rank}.json").write_bytes(data)
    (folder / f"rank{RANKS}.json").write_text("no trace")
    return folder


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    with local_cluster() as address:
        yield address


def test_workers_give_the_same_result(folder: Path, dask: str) -> None:
    lines: list[str] = []
    here = analyse([folder])
    assert [rank.verdict for rank in here.ranks] == ["full", "full", "none", "full"]
    assert any(f"rank{RANKS}.json" in warning for warning in here.warnings)
    for workers in (Workers(2), Workers(dask=dask)):
        assert to_json(analyse([folder], lines.append, workers=workers)) == to_json(here)
    assert lines.count("read 5 of 5 traces") == 2


def test_the_python_interface_has_workers_too(folder: Path) -> None:
    assert rs.analyze(folder, workers=2).result == rs.analyze(folder).result


def test_small_traces_are_read_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a process was started for traces of a few kB")

    monkeypatch.setattr(pipeline, "run_each", refused)
    assert to_json(analyse([folder], workers=AUTOMATIC)) == to_json(analyse([folder]))


def test_large_traces_are_read_by_every_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Workers] = []

    def here(function: object, jobs: list[object], workers: Workers, _: object) -> list[object]:
        asked.append(workers)
        assert callable(function)
        return [function(job) for job in jobs]

    monkeypatch.setattr(pipeline, "run_each", here)
    monkeypatch.setattr(pipeline, "usable_cores", lambda: 3)
    monkeypatch.setattr(pipeline, "_BYTES_A_WORKER", 1000)
    data = as_bytes(document(thread(checkpointed_step(0))))
    for rank in range(RANKS):
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(data))
    analyse([tmp_path], workers=AUTOMATIC)
    assert asked == [Workers(3)]


def die_on_the_second(job: pipeline._Job, **_: object) -> Piece | InputError:
    if job.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return pipeline._answer(job, pipeline._quiet)


def test_a_killed_worker_costs_one_rank_and_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name by which the workers find the function in their own interpreter.
    monkeypatch.setattr(pipeline, "partial", lambda *_, **__: die_on_the_second)
    result = analyse([folder], workers=Workers(2))
    assert [rank.rank for rank in result.ranks] == [0, 2, 3]
    (said,) = [warning for warning in result.warnings if "rank1.json" in warning]
    assert "its worker process died" in said


def test_here_each_trace_is_named_as_it_is_read(folder: Path) -> None:
    lines: list[str] = []
    analyse([folder], lines.append, workers=HERE)
    assert [line for line in lines if line.startswith("reading")] == [
        f"reading rank{number}.json" for number in range(RANKS + 1)
    ]


def test_the_headline_says_of_how_many_ranks_it_is_true() -> None:
    said = pages.ranks(8).headline
    assert said.startswith("Checkpointing is doubled on 4 of 8 ranks: on rank 0, every block")
    alike = structs.replace(pages.ranks(8), ranks=pages.ranks(8).ranks[:4])
    assert headline(alike).startswith("Checkpointing is doubled: every block")
