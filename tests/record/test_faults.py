"""What breaks jobs: what was recorded before is kept, and somebody reports it."""

import os

import pytest

from tests.record.faults import EARLY, FAULTS, break_job

# Some of the whole table, which `python -m benchmarks faults` prints.
CHOSEN = (
    "kill -9 of a rank, trace written",
    "the same, ranks started with spawn",
    "Ctrl-C to the whole job",
    "the disk is full, stacks don't fit",
    "the script runs another program with exec",
    "an import hook of the script raises",
)
CASES = {one.name: one for one in (*FAULTS, *EARLY)}
QUICKLY = ("interrupt, timed", "terminate, profiled", "end, timed")


@pytest.mark.parametrize(
    "name",
    [
        *QUICKLY,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*CHOSEN, *(one.name for one in EARLY if one.name not in QUICKLY))
        ),
    ],
)
def test_what_was_recorded_is_kept_and_told(name: str) -> None:
    if CASES[name].mount is not None and os.geteuid() != 0:
        pytest.skip("a mount of its own needs root")
    wrong, _ = break_job(CASES[name])
    assert not wrong
