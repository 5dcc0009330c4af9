"""The commands that a report ends with can be run as they are."""

from pathlib import Path

import pytest

from recompute_scan.cli.run import commands_after
from recompute_scan.result.run_record import NextCommand


@pytest.mark.parametrize(
    ("words", "output", "again"),
    [
        ("run x.py", None, "run -o out-after x.py"),
        ("run --steps 2 x.py -o y", None, "run -o out-after --steps 2 x.py -o y"),
        ("run -o out x.py -o out", "out", "run -o out-after x.py -o out"),
        ("run --output out --steps 2 x.py", "out", "run --output out-after --steps 2 x.py"),
        ("run --output=out/ x.py", "out", "run --output=out-after x.py"),
        ("run -oout x.py", "out", "run -oout-after x.py"),
        ("run -o out -- torchrun x.py", "out", "run -o out-after -- torchrun x.py"),
    ],
)
def test_the_recording_before_the_fix_stays(
    inside: Path, words: str, output: str | None, again: str
) -> None:
    asked = None if output is None else Path(output)
    found = commands_after(words.split(), asked, inside / "out", verify=False)
    assert found == (
        NextCommand("see", "recompute-scan fix out"),
        NextCommand("apply", "recompute-scan fix out --apply"),
        NextCommand("record", f"recompute-scan {again}"),
        NextCommand("compare", "recompute-scan compare out out-after"),
    )


def test_what_can_be_started_again(tmp_path: Path) -> None:
    words = ["run", "--steps", "2", "a b.py", "--lr", "3"]
    found = commands_after(words, None, tmp_path / "out", verify=True, script="a b.py")
    known = {one.purpose: one.text for one in found}
    assert known["measure"] == "recompute-scan run --verify --steps 2 'a b.py' --lr 3"
    command = "recompute-scan run --verify --without-checkpointing --steps 2 'a b.py' --lr 3"
    assert known["compare-gradients"] == command
    assert known["plan"] == "recompute-scan plan 'a b.py' --lr 3"


def test_a_module_is_planned_as_one(tmp_path: Path) -> None:
    words = ["run", "-m", "pkg.train", "x"]
    found = commands_after(
        words, None, tmp_path / "out", verify=True, script="pkg.train", is_module=True
    )
    assert found[-1].text == "recompute-scan plan -m pkg.train x"


def test_a_folder_elsewhere_is_named_whole(tmp_path: Path) -> None:
    *_, compared = commands_after(["run", "x.py"], None, tmp_path / "out", verify=False)
    assert compared.text == f"recompute-scan compare {tmp_path}/out {tmp_path}/out-after"


def test_the_recording_after_the_fix_is_not_measured_again(tmp_path: Path) -> None:
    words = "run --verify --without-checkpointing x.py --verify".split()
    *_, again, _ = commands_after(words, None, tmp_path / "out", verify=False, script="x.py")
    assert again.text == f"recompute-scan run -o {tmp_path}/out-after x.py --verify"
