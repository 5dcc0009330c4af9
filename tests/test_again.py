"""The commands that a report ends with can be run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from recompute_scan.cli.next_commands import commands_after
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    output: str | None,
    again: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = None if output is None else Path(output)
    found = commands_after(words.split(), asked, tmp_path / "out", verify=False)
    assert found == (
        NextCommand("record", f"recompute-scan {again}"),
        NextCommand("compare", "recompute-scan compare out out-after"),
    )


def test_what_can_be_measured_comes_first(tmp_path: Path) -> None:
    first, second, *_ = commands_after(["run", "a b.py"], None, tmp_path / "out", verify=True)
    assert first == NextCommand("measure", "recompute-scan run --verify 'a b.py'")
    command = "recompute-scan run --verify --without-checkpointing 'a b.py'"
    assert second == NextCommand("compare-gradients", command)


def test_a_folder_elsewhere_is_named_whole(tmp_path: Path) -> None:
    *_, compared = commands_after(["run", "x.py"], None, tmp_path / "out", verify=False)
    assert compared.text == f"recompute-scan compare {tmp_path}/out {tmp_path}/out-after"


def test_the_recording_after_the_fix_is_not_measured_again(tmp_path: Path) -> None:
    words = "run --verify --without-checkpointing x.py --verify".split()
    again, _ = commands_after(words, None, tmp_path / "out", verify=False, script="x.py")
    assert again.text == f"recompute-scan run -o {tmp_path}/out-after x.py --verify"
