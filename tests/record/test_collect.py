"""What ranks on other file systems recorded comes to rank 0, through the store and nothing else."""

import json
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from recompute_scan.record import launch
from recompute_scan.result.run_record import read_run_info, run_info_name, write_run_info
from tests.record.runs import run_info

TRACE = bytes(range(256)) * 9000  # more than one piece


ACCOUNT = run_info(1, world_size=2)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of two nodes; the second holds what rank 1 left."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (second / "trace-rank1.json.gz").write_bytes(TRACE)
    return first, second


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_a_private_folder_is_sent(nodes: tuple[Path, Path]) -> None:
    first, second = nodes
    store = HashStore()
    launch.mark_folder(first, store, 0)
    launch.send(second, store, ACCOUNT)
    assert launch.receive(first, store, 2) == ()
    assert (first / "trace-rank1.json.gz").read_bytes() == TRACE
    assert read_run_info(first / run_info_name(1)) == ACCOUNT
    assert visible(first) == ["run-rank1.json", "trace-rank1.json.gz"]


def test_a_shared_folder_is_not(nodes: tuple[Path, Path]) -> None:
    _, second = nodes
    store = HashStore()
    launch.mark_folder(second, store, 0)
    launch.send(second, store, ACCOUNT)
    assert json.loads(store.get("rank1")) == {"files": [], "left": None}
    write_run_info(second, ACCOUNT)
    assert launch.receive(second, store, 2) == ()


def test_what_is_too_large_is_said_to_lie_where_it_is(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    monkeypatch.setattr(launch, "MOST_BYTES", len(TRACE) - 1)
    store = HashStore()
    launch.mark_folder(first, store, 0)
    launch.send(second, store, ACCOUNT)
    (said,) = launch.receive(first, store, 2)
    assert "rank 1" in said
    assert f":{second}: copy them into {first}" in said
    assert visible(first) == ["run-rank1.json"]


def test_names_that_are_no_rank_s_files_are_not_written(nodes: tuple[Path, Path]) -> None:
    first, _ = nodes
    store = HashStore()
    store.set("rank1/../x/0", "no")
    store.set("rank1", json.dumps({"files": [["../x", 1]], "left": None}))
    assert launch.receive(first, store, 2) == ()
    assert not (first.parent / "x").exists()


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_TIMEOUT_S", 0.2)
    assert launch.receive(nodes[0], HashStore(), 2) == ()
