"""What recomputes cost by kernels alone, where the sequence of kernels is laid out here.

Each kernel is written down with the run that it is of, so that what a repair saves is a sum.
"""

from collections.abc import Iterator, Sequence

import pytest

from recompute_scan.analysis.pipeline import result_of
from recompute_scan.result import Cost, Result
from recompute_scan.trace.columns import Trace
from tests.recompute.attention_traces import FLASH_2
from tests.trace.kineto_reading import parse
from tests.trace_builder import as_bytes

# Name and time in µs. Norms and activations say which pass they are of, products do not.
Kernel = tuple[str, int]
ATTENTION: tuple[Kernel, ...] = (
    ("layer_norm_forward_kernel", 30), ("nvjet_qkv", 130), (FLASH_2.forward, 120),
    ("nvjet_out", 120), ("add_kernel", 20),
)  # fmt: skip
MLP: tuple[Kernel, ...] = (
    ("layer_norm_forward_kernel", 30), ("nvjet_up", 140), ("gelu_kernel", 20), ("nvjet_down", 140),
    ("add_kernel", 20),
)  # fmt: skip
LAYER: tuple[Kernel, ...] = (*ATTENTION, *MLP)
# What early stop leaves out of either.
TAIL = 2
ATTENTION_BACK: tuple[Kernel, ...] = (
    ("nvjet_back", 120), ("reduce_kernel", 30), (FLASH_2.backward, 250), ("nvjet_back", 130),
    ("nvjet_weight", 130), ("layer_norm_backward_kernel", 40),
)  # fmt: skip
MLP_BACK: tuple[Kernel, ...] = (
    ("nvjet_back", 140), ("nvjet_weight", 140), ("gelu_backward_kernel", 20), ("nvjet_back", 140),
    ("nvjet_weight", 140), ("layer_norm_backward_kernel", 40),
)  # fmt: skip
LOSS: tuple[Kernel, ...] = (("loss_kernel", 50), ("fill_kernel", 10), ("loss_backward_kernel", 50))
LAYERS, STEPS = 4, 3
Run = tuple[Sequence[Kernel], bool]


def cost(steps: Iterator[Run]) -> tuple[Cost, float]:
    """The cost of these kernels; what the redundant ones take a step, ms."""
    result, redundant = answer(steps)
    assert result.cost is not None
    return result.cost, redundant


def answer(steps: Iterator[Run]) -> tuple[Result, float]:
    """What is said of these kernels one after the other; what the redundant ones take a step, ms.

    Args:
        steps: Kernels, and whether they are of a redundant run.
    """
    events, now, redundant = [], 0, 0
    for kernels, more in steps:
        for name, us in kernels:
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": now,
                           "dur": us, "args": {"device": 0, "stream": 7}})  # fmt: skip
            now += us
            redundant += us * more
    trace: Trace = parse(as_bytes({"traceEvents": events}), "kernels")
    result = result_of(trace)
    assert result.verdict == "doubled"
    return result, redundant / STEPS / 1000


def layers_again(*runs: tuple[Sequence[Kernel], bool]) -> Iterator[Run]:
    """Steps whose backward pass has these recomputes before each layer's."""
    for _ in range(STEPS):
        yield LAYER * LAYERS, False
        yield LOSS, False
        for _ in range(LAYERS):
            yield from runs
            yield MLP_BACK, False
            yield ATTENTION_BACK, False


def halves_in_layers() -> Iterator[Run]:
    """Reentrant around each layer and around each half of it."""
    for _ in range(STEPS):
        yield LAYER * LAYERS, False
        yield LOSS, False
        for _ in range(LAYERS):
            yield LAYER, False
            yield MLP, True
            yield MLP_BACK, False
            yield ATTENTION, True
            yield ATTENTION_BACK, False


def test_one_stops_early() -> None:
    found, truth = cost(layers_again((LAYER, True), (LAYER[:-TAIL], False)))
    assert found.step_ms - found.predicted_step_ms == pytest.approx(truth, rel=0.01)


def test_where_an_mlp_has_its_own_checkpoint_no_cost_is_told() -> None:
    """Nothing says where its recomputes are, so that too little would be counted."""
    assert answer(halves_in_layers())[0].cost is None


def test_where_none_stops_early_the_range_holds_both() -> None:
    found, truth = cost(layers_again((LAYER, False), (LAYER, True)))
    early = LAYERS * sum(us for _, us in MLP[-TAIL:]) / 1000
    for saved in (truth, truth + early):
        assert found.predicted_low_ms < found.step_ms - saved < found.predicted_high_ms
    assert truth < found.step_ms - found.predicted_step_ms < truth + early


def test_a_gradient_named_as_the_next_layers_first_kernel_is_no_recompute() -> None:
    """The next layer's recomputes are known, and begin with that kernel: here it is none."""
    layer: tuple[Kernel, ...] = (
        ("nvjet_up", 120), (FLASH_2.forward, 20), ("nvjet_down", 130),
    )  # fmt: skip
    back: tuple[Kernel, ...] = (
        ("nvjet_up", 120), ("nvjet_weight", 130), (FLASH_2.backward, 20),
        ("nvjet_back", 130), ("nvjet_weight", 120),
    )  # fmt: skip

    def steps() -> Iterator[Run]:
        for _ in range(STEPS):
            yield layer * LAYERS, False
            yield LOSS, False
            for _ in range(LAYERS):
                yield layer, True
                yield layer, False
                yield back, False

    found, truth = cost(steps())
    early = LAYERS * 130 / 1000
    assert truth < found.step_ms - found.predicted_step_ms < truth + early


def test_a_kernel_more_than_in_the_forward_pass() -> None:
    """A recompute with gradients has one kernel more than the forward pass."""
    again = (*ATTENTION, ("reduce_kernel", 10), *MLP)
    found, truth = cost(layers_again((LAYER, True), (again[:-TAIL], False)))
    assert found.step_ms - found.predicted_step_ms == pytest.approx(truth, rel=0.1)


def test_a_kernel_before_the_first_recompute_that_stands_before_layers_too() -> None:
    """It seems to be the first one's, and the second has none: either has its last kernel."""
    copy: Kernel = ("copy_kernel", 10)

    def steps() -> Iterator[Run]:
        for _ in range(STEPS):
            yield (copy, *LAYER) * LAYERS, False
            yield LOSS, False
            for _ in range(LAYERS):
                yield (copy,), False
                yield LAYER, False
                yield LAYER, True
                yield (*MLP_BACK, MLP[-1], *ATTENTION_BACK, MLP[-1], copy), False

    found, truth = cost(steps())
    early = LAYERS * sum(us for _, us in MLP[-TAIL:]) / 1000
    assert truth < found.step_ms - found.predicted_step_ms < truth + early
    assert found.predicted_low_ms < found.step_ms - truth - early


def test_two_layers_by_order_alone() -> None:
    """Before the second backward there are as many forwards as a forward pass has."""

    def steps() -> Iterator[Run]:
        for _ in range(STEPS):
            yield LAYER * 2, False
            yield LOSS, False
            for _ in range(2):
                yield LAYER, True
                yield LAYER[:-TAIL], False
                yield (*MLP_BACK, *ATTENTION_BACK), False

    found, truth = cost(steps())
    assert found.step_ms - found.predicted_step_ms == pytest.approx(truth, rel=0.01)
