"""What a terminal is taken to be able to do, and pages of the documentation on it."""

import io
import os
import re
from pathlib import Path

import pytest

from recompute_scan.cli import main
from recompute_scan.cli.show import messages, page, titles
from recompute_scan.report.finding_words import sheet
from recompute_scan.report.render import render_text
from recompute_scan.terminal import colored, width
from tests.report.sample_results import doubled

ROOT = Path(__file__).parents[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "said", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_when_there_is_colour(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, said: dict[str, str], expected: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert colored(Terminal() if terminal else io.StringIO()) is expected


@pytest.mark.parametrize(("columns", "expected"), [(40, 80), (80, 80), (100, 100), (240, 110)])
def test_the_width_of_the_terminal_is_used(
    monkeypatch: pytest.MonkeyPatch, columns: int, expected: int
) -> None:
    monkeypatch.setattr(Terminal, "fileno", lambda _: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    assert width(Terminal()) == expected
    assert width(io.StringIO()) == 80
    written = render_text(doubled(), color=False, width=expected)
    # Neither code nor a command is broken.
    lines = (line for line in written.splitlines() if "  recompute-scan " not in line)
    prose = [line for line in lines if not line.startswith("    ")]
    assert max(map(len, prose)) <= expected
    assert max(map(len, prose)) > expected - 16


@pytest.mark.parametrize("code", [*titles(), *messages()])
def test_every_page_is_shown_without_markup_in_its_columns(code: str) -> None:
    text = page(code) or messages()[code]
    shown = sheet(text, color=False, folder="findings/" if code.startswith("RS") else "")
    assert shown.startswith(code)
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", sheet(text, color=True))
    assert "Generated" not in shown
    prose = [line for line in shown.splitlines() if not line.startswith("    ")]
    assert not [line for line in prose if re.search(r"\*\*|^#|\]\(|```", line)]
    assert all(len(line) <= 80 for line in prose)
    # links are whole, and lead to the project's pages or to others
    assert not re.search(r"\((?!https)[\w./-]+\.md(#[\w-]+)?\)", "".join(prose))


def test_explain_knows_messages_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "e202"]) == 0
    assert "script cannot be opened" in capsys.readouterr().out
    assert main(["explain", "E299"]) == 2
    error = capsys.readouterr().err
    assert "There is no message E299. [E214]" in error
    assert "did you mean E" in error
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert "RS001  doubled-checkpoint" in listed and "E202" in listed
