"""The fuzz target over every damaged file there is, as an ordinary test."""

from pathlib import Path

import pytest

from tests.fuzz.target import one_input, round_trip

CORPUS = sorted(path for path in Path("tests/damage/corpus").rglob("*") if path.is_file())


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) > 50


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_no_error_but_our_own(path: Path) -> None:
    data = path.read_bytes()
    one_input(data)
    round_trip(data)
