"""What ``run`` answers to scripts after public reports agrees with what is true of them."""

from pathlib import Path

import pytest

from tests.reported.cases import answer_to, disagreements, names, truth_of


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_answer_agrees(name: str, tmp_path: Path) -> None:
    answer = answer_to(name, tmp_path / "case")
    wrong = disagreements(answer, truth_of(name)["expected"])
    assert not wrong, f"{truth_of(name)['truth']} {wrong}\n{answer.printed}"
