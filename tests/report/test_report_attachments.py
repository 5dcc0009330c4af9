"""What leaves the page is read back by other programs, and can do nothing in them."""

import csv
import io
import json

import pytest

from recompute_scan.report.templating import cell, proof_trace, regions_csv
from recompute_scan.result import Proof
from tests.report.sample_results import HOSTILE, doubled, hostile, partial


def test_the_table_holds_a_row_for_each_block() -> None:
    result = doubled()
    rows = list(csv.DictReader(io.StringIO(regions_csv(result))))
    assert [row["module"] for row in rows] == [region.module for region in result.regions]
    assert [float(row["recompute_runs_per_backward"]) for row in rows] == [2.0] * 8
    assert rows[0]["checkpoints"] == "non-reentrant train.py:31 > reentrant train.py:24"


def test_what_is_not_known_is_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(regions_csv(partial()))))
    assert {row["module"] for row in rows} == {""}


@pytest.mark.parametrize("name", [*HOSTILE, "=1+1", "+x", "-x", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(name: str) -> None:
    rows = list(csv.reader(io.StringIO(regions_csv(hostile(name)))))
    assert len({len(row) for row in rows}) == 1
    for row in rows[1:]:
        assert not any(value.startswith(tuple("=+-@\t\r\n")) for value in row)
        assert not any(ord(char) < 32 for value in row for char in value)


def test_numbers_stay_numbers() -> None:
    assert (cell(-1.5), cell(3), cell(None)) == (-1.5, 3, "")


def test_the_excerpt_is_a_trace() -> None:
    proof = doubled().proof
    assert isinstance(proof, Proof)
    events = json.loads(proof_trace(proof))["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in drawn] == [
        (op.name, op.start_us, op.duration_us) for lane in proof.lanes for op in lane.ops
    ]
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert list(names.values()) == [lane.label for lane in proof.lanes]
