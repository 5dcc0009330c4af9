"""The statement shown for a call site."""

import ast
from pathlib import Path

import pytest

from recompute_scan.record.attribution import statement_at
from tests.present import present

SOURCE = """\
import torch

def main(model):
    if model.enable():
        model.train()
    wrap(
        model,
        check=None,
    )
    a(); b()
    return model
"""


@pytest.mark.parametrize(
    ("line", "begin", "end", "alone", "whole_lines"),
    [
        (1, 1, 1, False, True),
        (4, 4, 4, False, False),  # a header cannot be deleted alone
        (5, 5, 5, True, True),
        (6, 6, 9, False, True),
        (8, 6, 9, False, True),
        (10, 10, 10, False, False),
    ],
)
def test_the_innermost_statement(
    tmp_path: Path, line: int, begin: int, end: int, alone: bool, whole_lines: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    found = present(statement_at(path, line))
    assert (found.begin, found.end) == (begin, end)
    assert (found.alone, found.whole_lines) == (alone, whole_lines)
    assert found.first == max(1, begin - 3)
    assert found.text.splitlines() == SOURCE.splitlines()[found.first - 1 : end + 3]


@pytest.mark.parametrize("end", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_what_ends_no_line_of_python_ends_none_here(tmp_path: Path, end: str) -> None:
    path, text = tmp_path / "train.py", f"note = 'a{end}b'\nhere = 1\n" + "then = 2\n" * 9
    path.write_text(text, newline="")
    line = ast.parse(text).body[1].lineno
    found = present(statement_at(path, line))
    assert found.text == "\n".join(text.split("\n")[: line + 3])


def test_no_statement(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    assert statement_at(path, 2) is None
    assert statement_at(tmp_path / "absent.py", 1) is None
    path.write_text("x = = 1\n")
    assert statement_at(path, 1) is None
