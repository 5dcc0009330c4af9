"""The cases in the shapes that GPUs leave, the truth being the recorded model's own counts."""

import pytest
import torch

from tests.cases import device
from tests.cases.groups import GROUPS
from tests.cases.shaped import SHAPES
from tests.effort import some
from tests.recompute.test_device_thread import run

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < device.FEWEST,
    reason="torch takes no backend in Python before 2.13",
)


def rows(output: str) -> dict[str, list[str]]:
    """What was said of each case, a word a shape."""
    names = {case.name for group in GROUPS.values() for case in group}
    lines = (line.split() for line in output.partition("\nright ")[0].splitlines())
    return {line[0]: line[3:] for line in lines if line and line[0] in names}


BESIDE = some(["int8_round_buffered", "two_gradients_round_n"], 2)
WITHOUT_ATTENTION = some(["kinds_first_n", "kinds_rolled_out_n", "kinds_recommender_n"], 2)
# In one process: its imports take most of the time of a few cases.
COMMANDS = (
    ["r_in_n"],
    ["no_checkpoint", "n_outside", "--shapes", "launch-bound,two-streams,nsight,graph,kernels"],
    [*BESIDE, "--shapes", "two-streams", "--cost"],
    [*WITHOUT_ATTENTION, "--shapes", "launches,kernels"],
)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What each of these commands prints."""
    code = f"for one in {COMMANDS!r}: call(main, one); print('====')"
    imports = "from benchmarks._frame import call; from benchmarks.shapes import main"
    return run("-c", f"{imports}\n{code}").split("====\n")


def test_some_cases_in_every_shape(printed: list[str]) -> None:
    said = {**rows(printed[0]), **rows(printed[1])}
    assert set(said) == {"no_checkpoint", "n_outside", "r_in_n"}
    assert {word for row in said.values() for word in row} == {"."}, printed[:2]


def test_what_functions_do_beside_their_blocks_goes_with_them(printed: list[str]) -> None:
    assert {word for row in rows(printed[2]).values() for word in row} == {"."}, printed[2]
    costs = printed[2].partition("of saving\n")[2].partition("\n\n")[0]
    off = {line.split()[0]: line.split()[6] for line in costs.splitlines()}
    assert off.keys() == {*BESIDE}
    assert all(abs(float(one.rstrip("%"))) < 1 for one in off.values()), off


def test_kernels_alone_say_nothing_of_models_without_attention(printed: list[str]) -> None:
    said = rows(printed[3])
    assert {word for name in WITHOUT_ATTENTION for word in said[name]} == {"?"}


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(name for name, cases in GROUPS.items() if cases))
def test_no_case_is_answered_wrongly_in_any_shape(group: str) -> None:
    """With operators every answer is the truth; without, it is that or `inconclusive`, but for
    blocks that a hook or a function's design runs again.
    """
    output = run("-m", "benchmarks", "shapes", "--group", group, timeout=3600)
    counted = {line.split("  ")[0]: line.split()[-len(SHAPES) :] for line in output.splitlines()}
    assert set(counted["wrong"]) == {"0"}, output
    for shape, number in zip(SHAPES, counted["inconclusive"], strict=True):
        assert number == "0" or not shape.tells_operators, shape.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r_in_n", "fsdp2_wrapper_r"])
def test_recordings_of_the_cpu_in_every_shape(name: str) -> None:
    """Their backward pass is moved to a thread of its own."""
    output = run("-m", "benchmarks", "shapes", name, "--from", "cpu")
    assert rows(output)[name] == ["."] * len(SHAPES), output


@pytest.mark.slow
def test_the_fix_saves_what_the_repaired_twin_says() -> None:
    output = run("-m", "benchmarks", "shapes", "r_in_r", "n_in_r", "r_in_n", "accumulation_doubled",
                 "--cost")  # fmt: skip
    printed = output.partition("of saving\n")[2].partition("\n\n")[0]
    costs = [line.split() for line in printed.splitlines()]
    assert len(costs) == 4 * (len(SHAPES) - 1)  # without the one that the host limits
    by_kernels = {shape.name for shape in SHAPES if not shape.tells_operators}
    for name, shape, *numbers in costs:
        assert numbers[-1] != "range", (name, shape)
        assert abs(float(numbers[-1].rstrip("%"))) < (10 if shape in by_kernels else 5), (
            name,
            shape,
        )
