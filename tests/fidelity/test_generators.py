"""Whether something was drawn from Python's or numpy's random numbers."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.fidelity.state import python_states
from tests.fidelity.cases import Case, D, Net
from tests.fidelity.compare import compare


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


class _Drawing(nn.Module):
    """Draws from a generator that it keeps, by a helper that counts its calls in a global."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.lin, self.generator, self.helper = nn.Linear(D, D), generator, _Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.helper.see()
        return torch.tanh(self.lin(x)) * (1 + self.generator.random())  # type: ignore[no-any-return]


class _Helper:
    def see(self) -> None:
        _CALLS["see"] += 1


_CALLS = Counter(see=0)


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0)])
def test_a_generator_of_the_script_is_named_and_so_is_what_a_helper_counts(generator: Any) -> None:
    def build(on: bool) -> nn.Module:
        call = partial(checkpoint, use_reentrant=True) if on else (lambda layer, x: layer(x))
        return Net([_Drawing(generator)], call)

    found, _, _ = compare(Case("", True, build, shape=(8, D)))
    (region,) = found.regions
    assert [(one.kind, one.generator) for one in region.differences] == [
        ("random", "layers.0.generator")
    ]
    assert "_CALLS['see']" in {state.name for state in region.states}
