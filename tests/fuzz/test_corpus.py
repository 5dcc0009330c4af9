"""Every damaged file there is, and all that the fuzzer found, as an ordinary test."""

from pathlib import Path
from random import Random

import pytest

from tests.effort import examples
from tests.fuzz.__main__ import CORPUS, fuzz
from tests.fuzz.target import TARGETS, outcome

DAMAGED = sorted(path for path in Path("tests/damage/corpus").rglob("*") if path.is_file())
FOUND = sorted(CORPUS.glob("*"))


def test_the_corpus_is_there() -> None:
    assert len(DAMAGED) > 50
    assert FOUND


@pytest.mark.parametrize("path", DAMAGED, ids=lambda path: path.name)
def test_no_error_but_our_own(path: Path) -> None:
    data = path.read_bytes()
    for target in TARGETS:
        outcome(target, data)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_the_fuzzer_found_ends_as_documented(path: Path) -> None:
    outcome(path.name.partition("-")[0], path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_a_second_of_fuzzing_finds_nothing(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = fuzz(target, examples(5) / 5, Random(f"a second of {target}"), tmp_path)
    assert tally.failures == [], capsys.readouterr()
