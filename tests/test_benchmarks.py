"""The frame of the benchmarks: every one says how it is run, and tables are tables."""

import importlib.util
import subprocess
import sys

import click
import numpy as np
import pytest
from benchmarks import _frame
from benchmarks.__main__ import NAMES, first_line, main
from click.testing import CliRunner


def test_all_are_listed_with_a_line() -> None:
    listed = CliRunner().invoke(main, ["--help"], terminal_width=200).output
    for name in NAMES:
        assert f"  {name} " in listed
        assert first_line(name).rstrip(".") in listed


@pytest.mark.parametrize("name", NAMES)
def test_each_says_how_it_is_run(name: str) -> None:
    if name == "page" and importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright comes with make browser")
    asked = CliRunner().invoke(main, [name, "--help"])
    assert asked.exit_code == 0, asked.output
    assert asked.output.startswith(f"Usage: main {name} ")


def test_a_name_that_is_none_is_refused() -> None:
    assert _frame.call(main, ["no-such-name"]) == 2


def test_names_with_commas_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @_frame.some("--of", ["one", "two", "three"], text="Some.")
    def command(of: tuple[str, ...]) -> int:
        return len(of)

    assert _frame.call(command, []) == 3
    assert _frame.call(command, ["--of", "two,one"]) == 2
    assert _frame.call(command, ["--of", "four"]) == 2
    assert "four: not among one, two, three" in capsys.readouterr().err


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    for markdown in (False, True):
        table = _frame.Table({"case": "<6", "off": ">+8.1%", "": "<"}, markdown=markdown)
        table.row("a", 0.25, "x")
        table.row("b", None, "", note=" wrong")
    assert capsys.readouterr().out.splitlines() == [
        "case        off",
        "a        +25.0% x",
        "b             -  wrong",
        "| case | off |  |",
        "| --- | ---: | --- |",
        "| a | +25.0% | x |",
        "| b | - |  | wrong",
    ]


def test_turns_and_intervals() -> None:
    assert list(_frame.in_turn("ab", 3)) == ["a", "b", "b", "a", "a", "b"]
    low, middle, high = _frame.interval(np.arange(101.0), lambda drawn: float(np.median(drawn)))
    assert 30 < low < middle == 50 < high < 70


def test_clean_processes() -> None:
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS']); sys.exit(3)"
    ran = _frame.fresh([sys.executable, "-c", code], variables={"OMP_NUM_THREADS": "2"})
    assert (ran.status, ran.output) == (3, "2\n")
    late = _frame.fresh([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert late.status == 124
    assert _frame.told([sys.executable, "-c", "print('said'); print('[1]')"]) == [1]
    with pytest.raises(subprocess.CalledProcessError):
        _frame.told([sys.executable, "-c", "raise SystemExit(1)"])
