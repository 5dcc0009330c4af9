"""The cases in the shapes that GPUs leave, the truth being the recorded model's own counts."""

from __future__ import annotations

import pytest
import torch

from tests.cases import device
from tests.cases.nesting import CASES
from tests.recompute.test_device_thread import run

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < device.FEWEST,
    reason="torch takes no backend in Python before 2.13",
)


def rows(output: str) -> dict[str, list[str]]:
    """What was said of each case, a word a shape."""
    names = {case.name for case in CASES}
    lines = (line.split() for line in output.splitlines())
    return {line[0]: line[3:] for line in lines if line and line[0] in names and len(line) > 9}


def test_some_cases_in_every_shape() -> None:
    output = run("benchmarks/shapes.py", "no_checkpoint", "n_outside", "r_in_n")
    said = rows(output)
    assert set(said) == {"no_checkpoint", "n_outside", "r_in_n"}
    assert {word for row in said.values() for word in row} == {"."}, output


@pytest.mark.slow
def test_no_case_is_answered_wrongly_in_any_shape() -> None:
    """With operators every answer is the truth; without, it is that or `inconclusive`."""
    output = run("benchmarks/shapes.py", timeout=1200)
    said = rows(output)
    assert len(said) == len(CASES)
    for name, row in said.items():
        assert set(row[:7]) == {"."}, name
        assert set(row) <= {".", "?"}, name


@pytest.mark.slow
def test_the_fix_saves_what_the_repaired_twin_says() -> None:
    output = run("benchmarks/shapes.py", "r_in_r", "n_in_r", "r_in_n", "accumulation_doubled",
                 "--cost")  # fmt: skip
    costs = [line.split() for line in output.partition("of step\n")[2].splitlines()]
    assert len(costs) == 4 * 10
    for name, shape, *numbers in costs:
        off = float(numbers[-1].rstrip("%"))
        if shape == "device-bound":
            assert abs(off) < 1, name
        elif shape.startswith(("kernels", "launches")):
            assert abs(off) < 5, name
