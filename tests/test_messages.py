"""Every error code has one paragraph in docs/messages.md, and every paragraph a code."""

import re
from collections import Counter
from pathlib import Path

import pytest

from recompute_scan.errors import InputError, MissingExtra, RunError, ScanError, UsageError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (E\d{3})\n\n(.+?)(?=\n#|\Z)", PAGE, re.MULTILINE | re.DOTALL)


def codes_in_source() -> set[str]:
    found: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found.update(re.findall(r'"(E\d{3})"', text))
        found.update(re.findall(r"\[(E\d{3})\]", text))
    return found


def test_codes_in_source_and_page_are_the_same() -> None:
    assert {code for code, _ in SECTIONS} == codes_in_source()


def test_each_code_has_one_paragraph_in_order() -> None:
    codes = [code for code, _ in SECTIONS]
    assert codes == sorted(set(codes))
    assert Counter(re.findall(r"^### (.*)$", PAGE, re.MULTILINE)) == Counter(codes)
    for code, paragraph in SECTIONS:
        assert len(paragraph.split()) > 8, code
        assert "\n\n" not in paragraph.strip(), code


@pytest.mark.parametrize(
    ("error", "hundred"), [(UsageError, 2), (InputError, 3), (RunError, 3), (ScanError, 7)]
)
def test_codes_stand_under_their_exit_status(error: type[ScanError], hundred: int) -> None:
    heading = f"(status {error.exit_status})"
    (section,) = [part for part in PAGE.split("\n## ") if heading in part.splitlines()[0]]
    codes = re.findall(r"^### E(\d)", section, re.MULTILINE)
    assert set(codes) == {str(hundred)}
    assert f"| {error.exit_status} |" in PAGE


def test_an_error_reads_what_why_and_what_to_try() -> None:
    error = InputError("E301", "Cannot read x.", why="No such file", hint="check the path")
    assert str(error) == "Cannot read x. [E301]\nwhy: No such file\ntry: check the path"
    assert str(InputError("E301", "Cannot read x.")) == "Cannot read x. [E301]"


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    error = MissingExtra("torch", "torch", "Recording")
    assert "Recording needs torch" in str(error)
    assert 'pip install ".[torch]"' in str(error)
    assert error.exit_status == 2
