"""What one process is told of a run, another reads as it was meant."""

from pathlib import Path

import pytest

from recompute_scan.cost.flops import Machine
from recompute_scan.record.finish import Handed
from recompute_scan.record.options import RemovalOptions, RunOptions, decode, encode
from recompute_scan.result.run_record import NextCommand

REMOVAL = RemovalOptions("m", "train.py:3", "reentrant", depth=2, modules=("layers.0",))


@pytest.mark.parametrize(
    "options",
    [
        RunOptions("train.py", False, (), Path("/out")),
        RunOptions("pkg", True, ("--name", "é '\n"), Path("/ö"), device="cuda", ranks="0,8-15"),
        RunOptions("train.py", False, ("\udcff",), Path("/o\udcff"), removals=(REMOVAL,)),
    ],
)
def test_what_is_decoded_is_what_was_encoded(options: RunOptions) -> None:
    assert decode(encode(options), RunOptions) == options


def test_what_is_handed_on_arrives_whole() -> None:
    options = RunOptions("train.py", False, (), Path("/o\udcff"), keep_going=True)
    command = NextCommand("compare", "recompute-scan compare 'a b' c")
    handed = Handed(options, Machine(312.0, 80 * 2**30), (command,))
    assert decode(encode(handed), Handed) == handed


@pytest.mark.parametrize("wrong", ['"steps": "5"', '"device": "tpu"', '"args": 1'])
def test_a_field_of_another_type_is_refused(wrong: str) -> None:
    good = encode(RunOptions("train.py", False, (), Path("/out")))
    with pytest.raises(ValueError, match=r"Expected|Invalid"):
        decode(good[:-1] + ", " + wrong + "}", RunOptions)
