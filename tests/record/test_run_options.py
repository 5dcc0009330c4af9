"""What one process is told of a run, another reads as it was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from recompute_scan.record.run_options import Removal, RunOptions, decode_options, encode_options

REMOVAL = Removal("m", "train.py:3", "reentrant", depth=2, modules=("layers.0",))


@pytest.mark.parametrize(
    "options",
    [
        RunOptions("train.py", False, (), Path("/out")),
        RunOptions("pkg", True, ("--name", "é '\n"), Path("/ö"), device="cuda", ranks="0,8-15"),
        RunOptions("train.py", False, ("\udcff",), Path("/o\udcff"), removals=(REMOVAL,)),
    ],
)
def test_what_is_decoded_is_what_was_encoded(options: RunOptions) -> None:
    assert decode_options(encode_options(options)) == options


@pytest.mark.parametrize("wrong", ['"steps": "5"', '"device": "tpu"', '"args": 1'])
def test_a_field_of_another_type_is_refused(wrong: str) -> None:
    good = encode_options(RunOptions("train.py", False, (), Path("/out")))
    with pytest.raises(ValueError, match=r"Expected|Invalid"):
        decode_options(good[:-1] + ", " + wrong + "}")
