"""How a run ended, from what its ranks left: who failed, who was killed, who only followed."""

from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis.ranks import ends_in
from recompute_scan.crash import Crash, Frame, Raised, RankEnd
from recompute_scan.diagnose.outcome import crash_of, findings_of
from recompute_scan.result.run_record import (
    RunInfo,
    accept_so_far,
    run_info_name,
    run_records_in,
    so_far_name,
    stacks_text_name,
    write_run_info,
    write_so_far,
)
from tests.record.runs import run_info

STACK = (Frame("train.py", 3, "main"),)
CLOSED = Raised("RuntimeError", "Connection closed by peer [127.0.0.1]:7")
STACKS_TEXT = """\
Current thread 0x00007f (most recent call first):
  File "train.py", line 3 in main
"""


def account(rank: int, **others: Any) -> RunInfo:
    return run_info(rank, world_size=2, **others)


def killed(rank: int, steps: int = 6) -> RunInfo:
    end = RankEnd(rank=rank, ending="killed", steps=steps)
    return account(rank, status="failed", exit_status=137, end=end)


def raised(rank: int, *errors: Raised) -> RunInfo:
    end = RankEnd(rank=rank, ending="raised", at=1.0, errors=errors, stack=STACK)
    return account(rank, status="failed", exit_status=1, end=end)


def crash(folder: Path) -> Crash:
    ends = ends_in([folder])
    assert ends.failed
    return crash_of(ends.ranks)


def test_an_run_record_so_far_counts_where_no_other_came(tmp_path: Path) -> None:
    write_so_far(tmp_path, killed(0))
    write_so_far(tmp_path, killed(1))
    write_run_info(tmp_path, account(0))
    assert not (tmp_path / so_far_name(0)).exists()
    assert [one.rank for one in run_records_in(tmp_path)] == [0]
    accept_so_far(tmp_path)
    assert [(one.rank, one.exit_status) for one in run_records_in(tmp_path)] == [(0, 0), (1, 137)]
    write_run_info(tmp_path, account(1))  # it was only slow
    assert run_records_in(tmp_path)[1].exit_status == 0


def test_who_was_killed_comes_before_those_that_lost_it(tmp_path: Path) -> None:
    write_run_info(tmp_path, raised(0, CLOSED))
    write_run_info(tmp_path, killed(1))
    found = crash(tmp_path)
    assert (found.kind, found.rank) == ("killed", 1)
    assert found.headline.startswith("Rank 1 ended without a message after 6 steps")
    assert findings_of(found.ranks) == ()


@pytest.mark.parametrize("left", [True, False])
def test_of_those_a_launcher_ended_there_are_stacks(tmp_path: Path, *, left: bool) -> None:
    write_run_info(tmp_path, killed(0))
    (tmp_path / stacks_text_name(0)).write_text(STACKS_TEXT)
    if left:
        write_run_info(tmp_path, killed(1))
    found = crash(tmp_path)
    assert (found.kind, found.rank) == ("killed", 1)
    assert [end.place for end in found.ranks] == ["train.py:3", None]


def test_all_ended_from_outside(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_run_info(tmp_path, killed(rank))
        (tmp_path / stacks_text_name(rank)).write_text(STACKS_TEXT)
    found = crash(tmp_path)
    assert (found.kind, found.rank) == ("killed", None)
    assert found.headline == "The run was ended from outside after 6 steps."


def test_an_own_failure_comes_before_a_death_that_it_caused(tmp_path: Path) -> None:
    write_run_info(tmp_path, raised(0, Raised("ValueError", "no")))
    write_run_info(tmp_path, killed(1))
    assert (crash(tmp_path).kind, crash(tmp_path).rank) == ("raised", 0)


def test_who_ended_before_is_told(tmp_path: Path) -> None:
    write_run_info(tmp_path, raised(0, CLOSED))
    write_run_info(tmp_path, account(1))
    assert crash(tmp_path).headline.endswith("Before that, rank 1 had ended.")


@pytest.mark.parametrize(("error", "failed"), [(CLOSED, False), (Raised("OSError", "x"), True)])
def test_an_interrupt_is_no_failure_and_hides_none(
    tmp_path: Path, error: Raised, *, failed: bool
) -> None:
    write_run_info(tmp_path, raised(0, error))
    write_run_info(tmp_path, account(1, status="failed", exit_status=130))
    assert ends_in([tmp_path]).failed == failed


def test_a_rank_elsewhere_is_no_failure(tmp_path: Path) -> None:
    write_run_info(tmp_path, account(0))
    assert not ends_in([tmp_path]).failed
    assert not (tmp_path / run_info_name(1)).exists()
