"""Plans against trying every choice, and against what running a plan really takes."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from recompute_scan.cost.arrangement import KEEP, Arrangements
from recompute_scan.cost.memory import Footprint, Held, arrangements_of, measure_memory
from recompute_scan.recompute.study import study
from recompute_scan.trace import load
from recompute_scan.trace.allocations import Allocations, allocations, read_allocations
from tests.memory.layers import WIDTHS, record_step
from tests.present import present
from tests.recompute.training import checkpointed_step
from tests.report import sample_results
from tests.trace_builder import studied, thread


def footprint(ts: list[int], allocated: list[int], *held: Held) -> Footprint:
    return Footprint(
        device=0,
        ts=np.array(ts, np.int64),
        allocated=np.array(allocated, np.int64),
        peak_reserved=None,
        held=held,
        modules=(None,) * (1 + max(one.layer for one in held)),
    )


def model_of(measured: Footprint, gains: list[float]) -> Arrangements:
    """Every choice, where each region is worth this much."""
    place, model = arrangements_of(measured, sample_results.regions(len(gains), 1), gains, 100.0)
    assert place == list(range(len(gains)))
    return model


def peak(model: Arrangements, *without: int) -> int:
    """Most that is allocated where these regions are not checkpointed."""
    choice = model.everything
    choice[list(without)] = KEEP
    return model.peak(choice)


def test_what_is_held_counts_only_while_it_is() -> None:
    """The last layer's recompute begins where the peak is: to keep its tensors costs nothing."""
    first, last = Held(0, 50, start=0, end=90), Held(1, 50, start=10, end=20)
    model = model_of(footprint([0, 15, 30], [100, 120, 200], first, last), [1.0, 1.0])
    assert [peak(model), peak(model, 1), peak(model, 0)] == [200, 200, 250]
    choice = present(model.solve(budget=200))
    assert np.flatnonzero(choice == KEEP).tolist() == [1]


def test_what_was_allocated_before_a_span_counts_in_it() -> None:
    held = Held(0, 10, start=100, end=200)
    assert peak(model_of(footprint([0, 300], [70, 20], held), [1.0]), 0) == 80


def test_every_micro_batch_holds_its_own() -> None:
    """Two forward passes before the first backward, as pipelines run them."""
    one, other = Held(0, 30, start=0, end=50), Held(0, 30, start=10, end=60)
    assert peak(model_of(footprint([0], [100], one, other), [1.0]), 0) == 160


# -- allocations of real steps -------------------------------------------------------------------


Recorded = tuple[Footprint, Allocations, list[int]]
Record = Callable[..., Recorded]


@pytest.fixture(scope="module")
def recorded() -> Iterator[Record]:
    """What our own code reads off a step, and what autograd kept for each layer.

    Each step is recorded in a process of its own, because torch remembers the sizes of host memory
    from one recording to the next; all are forks of one that has imported torch already.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", record_step.__module__])
    with context.Pool(1, maxtasksperchild=1) as pool:

        def record(file: Path, *stopped: int, reentrant: bool = False) -> Recorded:
            truth = pool.apply(record_step, (file, stopped, reentrant))
            trace = load(file)
            found = present(read_allocations(file, trace))
            return measure_memory(study(trace), found), found, truth

        yield record


@pytest.fixture(scope="module")
def before(recorded: Record, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded(tmp_path_factory.mktemp("before") / "trace.json")


def test_a_checkpoint_saves_what_autograd_would_keep(before: Recorded) -> None:
    measured, _, truth = before
    assert [measured.saved(layer) for layer in range(len(WIDTHS))] == truth


def test_a_reentrant_recompute_holds_its_result_too(recorded: Record, tmp_path: Path) -> None:
    measured, _, truth = recorded(tmp_path / "trace.json", reentrant=True)
    result = 64 * 32 * 4
    saved = [measured.saved(layer) for layer in range(len(WIDTHS))]
    assert saved == [size + result for size in truth]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_plan_takes_the_memory_that_it_says(
    before: Recorded, recorded: Record, share: float, tmp_path: Path
) -> None:
    """The same steps run again with the plan's layers not checkpointed."""
    measured, *_ = before
    model = model_of(measured, [float(width) for width in WIDTHS])
    low, high = peak(model), peak(model, *range(len(WIDTHS)))
    budget = round(low + share * (high - low))
    choice = present(model.solve(budget=budget))
    after, *_ = recorded(tmp_path / "after.json", *np.flatnonzero(choice == KEEP).tolist())
    assert after.peak_allocated == pytest.approx(model.peak(choice), rel=0.05)
    assert after.peak_allocated <= 1.05 * budget


def test_totals_follow_from_sizes(before: Recorded) -> None:
    _, found, _ = before
    assert (found.device == -1).all()
    assert (found.size < 0).any()
    assert np.array_equal(np.diff(found.allocated), found.size[1:])
    assert np.all(np.diff(found.ts) >= 0)


def test_a_gpu_stands_above_the_host(before: Recorded, tmp_path: Path) -> None:
    _, found, _ = before
    columns = zip(found.ts.tolist(), found.size.tolist(), found.allocated.tolist(), strict=True)
    rows = [(ts, -1, size, total, -1) for ts, size, total in columns]
    start = rows[0][0]
    rows += [(start, 3, 512, 10_512, 20_000), (start + 1, 3, -512, 10_000, 20_480)]
    facts = studied(thread(checkpointed_step(0)))
    measured = measure_memory(facts, allocations(rows))
    assert (measured.device, measured.peak_allocated, measured.peak_reserved) == (3, 10_512, 20_480)
