"""From files to the one result: ranks, run records beside traces, warnings and health."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError
from recompute_scan.report.render import render_html
from recompute_scan.result import to_json
from recompute_scan.result.run_record import RunInfo, Source, encode_run_info, write_run_info
from tests.present import present
from tests.recompute.training import (
    checkpointed_step,
    marked_step,
    plain_step,
    run,
    training_step,
)
from tests.record.runs import run_info
from tests.result_schema import validate
from tests.trace_builder import Call, launch, node, op, step, write

TWICE = dict.fromkeys(range(3), 2)


def account(**changed: Any) -> RunInfo:
    return run_info(timed_steps_ms=(2.0, 4.0, 3.0), trace="trace-rank0.json", **changed)


@pytest.mark.parametrize(
    ("call", "verdict", "highest"),
    [
        (plain_step(0), "none", 0.0),
        (checkpointed_step(0), "full", 1.0),
        (checkpointed_step(0, recomputes=TWICE), "doubled", 2.0),
        (step(0, *run(0)), "inconclusive", None),
        (step(0, launch("gemm")), "inconclusive", None),
    ],
)
def test_every_verdict_makes_a_whole_document(
    tmp_path: Path, call: Call, verdict: str, highest: float | None
) -> None:
    result = analyse([write(tmp_path / "trace.json", call)])
    assert (result.verdict, result.recompute_per_backward) == (verdict, highest)
    assert (result.reason is None) == (verdict != "inconclusive")
    assert result.headline
    validate(json.loads(to_json(result)))


def test_steps_of_the_result(tmp_path: Path) -> None:
    calls = (checkpointed_step(4, recomputes=TWICE), plain_step(5), training_step(6, *run(6000)))
    steps = analyse([write(tmp_path / "trace.json", *calls)]).steps
    assert [one.index for one in steps] == [4, 5, 6]
    assert [one.complete for one in steps] == [True, True, False]
    assert [one.forward_ops for one in steps] == [12, 12, 4]
    assert [one.recomputed_ops for one in steps] == [24, 0, 0]
    assert [one.micro_batches for one in steps] == [1, 1, 0]


def test_the_worst_rank_stands_for_the_run(tmp_path: Path) -> None:
    for rank, call in enumerate(
        (plain_step(0), checkpointed_step(0, recomputes=TWICE), plain_step(0))
    ):
        write(tmp_path / f"trace-{rank}.json", call, distributedInfo={"rank": rank})
    result = analyse([tmp_path])
    assert result.verdict == "doubled"
    assert [(rank.rank, rank.verdict) for rank in result.ranks] == [
        (0, "none"),
        (1, "doubled"),
        (2, "none"),
    ]
    assert any("ranks differ (doubled, none)" in warning for warning in result.warnings)


def test_ranks_without_a_number_are_counted_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / name, plain_step(0)) for name in ("b.json", "a.json")]
    ranks = analyse(files).ranks
    assert [(rank.rank, rank.trace) for rank in ranks] == [(0, "b.json"), (1, "a.json")]


def test_a_broken_rank_is_left_out_and_said(tmp_path: Path) -> None:
    good = write(tmp_path / "trace-0.json", checkpointed_step(0))
    bad = tmp_path / "trace-1.json"
    bad.write_text("cut off")
    result = analyse([good, bad])
    assert result.verdict == "full"
    assert len(result.ranks) == 1
    assert any(str(bad) in warning for warning in result.warnings)


def test_when_nothing_can_be_read_the_first_error_is_raised(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("no")
    with pytest.raises(InputError) as caught:
        analyse([tmp_path])
    assert "a.json" in caught.value.what


def test_the_runs_run_record_is_read_beside_its_trace(tmp_path: Path) -> None:
    source = Source(3, "wrap(model)", 3, 3, False, True)
    write(tmp_path / "trace-rank0.json", marked_step(0, recomputes=2))
    write_run_info(
        tmp_path,
        account(
            sources={"train.py:31": source},
            environment={"torch": "2.13.0"},
            warnings=("Look out.",),
            message="The script ended early.",
        ),
    )
    result = analyse([tmp_path])
    assert result.evidence_level == "annotated"
    assert (present(result.cost).step_source, present(result.cost).step_ms) == ("timed", 3.0)
    assert result.environment["torch"] == "2.13.0"
    assert set(result.warnings) >= {"Look out.", "The script ended early."}
    assert result.regions[0].checkpoints[0].source == "wrap(model)"


@pytest.mark.parametrize("change", [None, {"rank": -1}, {"rank": 10**30}, {"world_size": 10**30}])
def test_a_broken_run_record_is_said(change: dict[str, int] | None, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace-rank0.json", plain_step(0))
    record = json.loads(encode_run_info(run_info(0))) | change if change else {}
    (tmp_path / "run-rank0.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="E306"):
        analyse([trace])


def test_an_run_record_of_another_name_is_no_run_record(tmp_path: Path) -> None:
    write_run_info(tmp_path, account())
    result = analyse([write(tmp_path / "copy.json", plain_step(0))])
    assert present(result.cost).step_source == "trace"


def test_marks_that_disagree_are_said_and_lower_the_confidence(tmp_path: Path) -> None:
    # Marked as one recompute, and recomputed twice: the second outside any mark.
    calls = marked_step(0, recomputes=2, marked=1)
    result = analyse([write(tmp_path / "trace.json", calls)])
    assert result.confidence == "medium"
    assert any("disagree" in warning for warning in result.warnings)
    assert result.recompute_per_backward == 2.0


def test_kernels_without_launch_are_counted_and_said(tmp_path: Path) -> None:
    file = write(tmp_path / "trace.json", step(0, op("aten::mm", launch("a")), launch("b")))
    written = json.loads(file.read_text())
    launches = [e for e in written["traceEvents"] if e["cat"] == "cuda_runtime"]
    written["traceEvents"].remove(launches[0])
    file.write_text(json.dumps(written))
    result = analyse([file])
    assert result.health["kernels_without_launch"] == 1
    assert any("1 of 2 device activities" in warning for warning in result.warnings)


def test_health_counts_only_what_happened(tmp_path: Path) -> None:
    result = analyse([write(tmp_path / "trace.json", checkpointed_step(0))])
    assert set(result.health) == {"events"}


def test_the_person_is_told_what_is_read(tmp_path: Path) -> None:
    said: list[str] = []
    analyse([write(tmp_path / "trace.json", plain_step(0))], said.append)
    assert said == ["reading trace.json"]


def test_a_file_name_that_is_no_utf_8_can_be_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"trace-\xff.json")
    try:
        file = write(tmp_path / name, plain_step(0))
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    written = to_json(analyse([file]))
    assert json.loads(written)["ranks"][0]["trace"] == "trace-?.json"


@pytest.mark.parametrize(
    "name", ["half \ud83d", "<script>alert(1)</script>", "\x1b[31m red", "\x00"]
)
def test_hostile_names_reach_the_document_as_text(tmp_path: Path, name: str) -> None:
    forward = [op(name, op("aten::mm"), seq=i, dims=[[i]]) for i in range(4)]
    again = [op(name, op("aten::mm"), seq=50 + i, dims=[[i]]) for i in range(4)]
    backward = [node("MyBackward0", op("aten::mm"), seq=i) for i in (2, 1, 0)]
    first = node("MyBackward0", *again, op("aten::mm"), seq=3)
    calls = training_step(0, *forward, first, *backward)
    result = analyse([write(tmp_path / "trace.json", calls)])
    assert result.verdict == "full"
    validate(json.loads(to_json(result)))
    page = render_html(result)
    assert page.encode()
    assert "<script>alert(1)" not in page
