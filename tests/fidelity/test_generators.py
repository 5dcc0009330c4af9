"""Whether something was drawn from Python's or numpy's random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recompute_scan.fidelity.state import python_states


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "random"),
        (lambda: random.shuffle([1, 2, 3]), "random"),
        (lambda: random.gauss(0, 1), "random"),
        (np.random.rand, "numpy.random"),
        (lambda: np.random.shuffle([1, 2, 3]), "numpy.random"),
    ],
)
def test_each_draw_changes_its_state_and_no_other(draw: Callable[[], object], name: str) -> None:
    for _ in range(700):  # past where a Mersenne Twister makes its words anew
        before = python_states({})
        assert python_states({}) == before
        draw()
        after = python_states({})
        assert {one for one in after if after[one] != before[one]} == {name}


def test_the_same_seed_is_the_same_state() -> None:
    np.random.seed(1)
    random.seed(1)
    before = python_states({})
    np.random.rand(1000)
    random.random()
    np.random.seed(1)
    random.seed(1)
    assert python_states({}) == before


def test_another_generator_in_numpys_place() -> None:
    place: Any = np.random
    original = place.get_bit_generator()
    try:
        place.set_bit_generator(np.random.PCG64(1))
        before = python_states({})
        np.random.rand()
        assert python_states({}) != before
    finally:
        place.set_bit_generator(original)


def test_a_normal_number_that_numpy_keeps_is_part_of_its_state() -> None:
    np.random.seed(1)
    np.random.randn()
    before = python_states({})
    np.random.randn()  # the second of the pair: no word is drawn
    assert python_states({})["numpy.random"] != before["numpy.random"]


def test_another_generator_in_pythons_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_inst", other := random.Random(5))
    before = python_states({})
    other.random()
    assert python_states({})["random"] != before["random"]
    monkeypatch.setattr(random, "_inst", random.SystemRandom())
    assert "random" not in python_states({})
