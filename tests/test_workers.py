"""The same answers from every place that jobs can run in; a worker's death costs one job."""

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recompute_scan.errors import InputError, MissingExtra, UsageError
from recompute_scan.workers import HERE, Lost, Workers, run_each
from tests.clusters import local_cluster


def square(number: int) -> int:
    return number * number


def slow_first(number: int) -> int:
    time.sleep(0.2 if number == 0 else 0)
    return number


def refuse(number: int) -> int:
    raise InputError("E301", f"no {number}", why="because", hint="leave it")


def die_on_two(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_once(marker: str) -> str:
    path = Path(marker)
    if path.suffix == ".once" and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_cluster() as address:
        yield address


@pytest.mark.parametrize("workers", [HERE, Workers(2), Workers(50)])
def test_answers_stand_in_the_order_of_the_jobs(workers: Workers) -> None:
    done: list[int] = []
    assert run_each(slow_first, range(5), workers, done.append) == [0, 1, 2, 3, 4]
    assert done == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [HERE, Workers(2)])
def test_an_error_of_the_function_comes_out_whole(workers: Workers) -> None:
    with pytest.raises(InputError) as caught:
        run_each(refuse, [1], workers)
    assert str(caught.value) == "no 1 [E301]\nwhy: because\ntry: leave it"


def test_a_worker_that_dies_takes_no_other_job_with_it() -> None:
    answers = run_each(die_on_two, range(5), Workers(2))
    lost = answers.pop(2)
    assert answers == [0, 1, 3, 4]
    assert isinstance(lost, Lost)
    assert lost.job == 2
    assert lost.why


def test_a_lost_job_is_tried_again(tmp_path: Path) -> None:
    jobs = [str(tmp_path / name) for name in ("a", "b.once", "c")]
    assert run_each(die_once, jobs, Workers(2)) == ["a", "b.once", "c"]


def test_a_cluster_gives_the_same(cluster: str) -> None:
    assert run_each(square, range(6), Workers(dask=cluster)) == [0, 1, 4, 9, 16, 25]


def test_a_cluster_s_worker_that_dies_is_said(cluster: str) -> None:
    answers = run_each(die_on_two, range(4), Workers(dask=cluster))
    lost = answers.pop(2)
    assert answers == [0, 1, 3]
    assert isinstance(lost, Lost)
    assert "die_on_two" in lost.why


def test_a_scheduler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recompute_scan.workers._DASK_TIMEOUT_S", 0.5)
    with pytest.raises(UsageError, match="does not answer"):
        run_each(square, [1], Workers(dask="tcp://127.0.0.1:9"))


@pytest.mark.parametrize(
    "error",
    [
        InputError("E301", "what", why="why", hint="hint"),
        UsageError("E207", "what"),
        MissingExtra("torch", "torch", "Recording"),
    ],
)
def test_errors_travel_between_processes(error: UsageError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), there.code, there.args) == (str(error), error.code, error.args)
