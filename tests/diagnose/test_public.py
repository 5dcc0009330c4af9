"""Logs of public threads: never a wrong cause, and nine of ten that are ours recognised."""

import re

import pytest

from recompute_scan.diagnose.outcome import HANGS, IN_RUNS, SIGNATURES
from tests.diagnose.public import HALVES, PublicLog, public_logs, scores, written_logs

PUBLIC = public_logs()
LOGS = [*PUBLIC, *written_logs()]
CAUSES = {f"{one.code}-{one.cause_name}" for one in (*SIGNATURES, *IN_RUNS, *HANGS)}


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.thread)
def test_no_log_gets_a_wrong_cause_and_evidence_names_lines_of_it(log: PublicLog) -> None:
    found = log.found()
    assert log.outcome() != "wrong", (log.label, found.cause, found.hints)
    if found.cause is not None:
        evidence = "\n".join(found.cause.evidence)
        named = [int(number) for number in re.findall(r"^line (\d+)", evidence, re.MULTILINE)]
        assert named
        assert all(1 <= number <= log.text.count("\n") for number in named)


@pytest.mark.parametrize("half", HALVES)
def test_nine_of_ten_that_show_their_cause_are_recognised(half: str) -> None:
    (score,) = (one for one in scores(LOGS) if (one.half, one.group) == (half, "ours"))
    least = {"built on": 50, "kept aside": 50, "limits": 10, "limits, aside": 10}
    assert score.logs >= least.get(half, 20)
    assert score.outcomes["right"] >= 0.9 * score.logs, score


def test_there_are_enough_and_each_once() -> None:
    assert len(PUBLIC) >= 200
    assert len({log.thread for log in LOGS}) == len(LOGS)
    assert sum(log.label == "none" and not log.weaker for log in PUBLIC) >= 80
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", log.thread) for log in PUBLIC)
    for log in LOGS:
        assert log.basis
        assert log.text.strip()
        assert {log.label, *log.weaker} - {"none"} <= CAUSES, log.thread
