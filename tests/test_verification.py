"""What several runs say together: the arithmetic, on run records made for it."""

import math
import random
from collections.abc import Sequence
from statistics import median

import pytest
from msgspec import structs

from recompute_scan.intervals import median_interval, ratio_interval
from recompute_scan.report.layout import measured_sentences, measured_title
from recompute_scan.result import Checkpoint, Result, Verified, WithPlan
from recompute_scan.result.run_record import Measurements, step_has_fix
from recompute_scan.verification import Trial, Trials, verified
from tests.present import present
from tests.record.runs import run_info
from tests.report import sample_results

REMOVED = (Checkpoint(1, "reentrant", "torch-checkpoint", "train.py:3"),)
STEADY = (100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 100.2, 99.8)


def trial(
    *times: float,
    losses: Sequence[float] = (3.0, 2.0),
    calls: int = 0,
    status: int = 0,
    message: str | None = None,
    gpu: int | None = None,
) -> Trial:
    measured = Measurements(
        losses=tuple(value.hex() for value in losses),
        seeded=True,
        bypassed_calls=calls,
        peak_allocated_bytes=gpu,
        peak_reserved_bytes=gpu and 2 * gpu,
        peak_rss_bytes=10**9,
    )
    info = run_info(
        status="complete" if status == 0 else "failed",
        exit_status=status,
        device="cpu" if gpu is None else "cuda",
        timed_steps_ms=times,
        trace=None,
        message=message,
        measured=measured,
    )
    return Trial((info,), status)


def with_fix(*times: float, losses: Sequence[float] = (3.0, 2.0), calls: int = 12) -> Trial:
    return trial(*times, losses=losses, calls=calls)


def verify(
    before: Sequence[Trial],
    after: Sequence[Trial] = (),
    without: Sequence[Trial] = (),
    switching: Sequence[Trial] = (),
) -> tuple[Result, Verified]:
    result = verified(sample_results.doubled(), REMOVED, Trials(before, after, without, switching))
    return result, present(result.verified)


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * time for time in STEADY)


def test_times_in_two_ways_that_are_never_mixed() -> None:
    """The reported case: 248.88 s where 185.07 s is enough."""
    before, after = trial(*[248.88] * 8), with_fix(*[185.07] * 8)
    result, section = verify([before, before], [after, after])
    assert section.outcome == "helps"
    assert section.more_time_pct == pytest.approx(34.48, abs=0.01)
    assert section.saving_pct == pytest.approx(25.64, abs=0.01)
    said = " ".join(measured_sentences(result))
    assert "25.6 % less time, 34.5 % more throughput" in said


@pytest.mark.parametrize(
    ("factor", "outcome"), [(0.8, "helps"), (1.2, "slower"), (1.0, "no-gain"), (0.99, "no-gain")]
)
def test_the_outcome_follows_from_the_intervals(factor: float, outcome: str) -> None:
    before, after = trial(*STEADY), with_fix(*scaled(factor))
    result, section = verify([before, before], [after, after])
    assert section.outcome == outcome
    assert section.saving_ms == pytest.approx(100 * (1 - factor))
    low, high = present(section.saving_low_ms), present(section.saving_high_ms)
    assert low <= present(section.saving_ms) <= high
    assert "predicted" not in result.headline
    assert ("of the step is wasted, measured" in result.headline) == (outcome == "helps")
    assert not result.headline.endswith("is wasted.")


def test_runs_that_disagree_leave_it_open() -> None:
    """Each run is steady in itself, but one of each kind took three times as long."""
    before = [trial(*STEADY), trial(*scaled(3.0))]
    after = [with_fix(*scaled(2.4)), with_fix(*scaled(0.8))]
    result, section = verify(before, after)
    assert section.outcome == "unclear"
    assert "vary too much" in measured_sentences(result)[0]
    assert "% of the step is wasted" in result.headline  # the prediction stands


def test_a_slow_round_slows_both_sides_of_it() -> None:
    """Seen on a shared machine: 203.0 and 166.3 ms unchanged, 155.2 and 136.8 with the fix."""
    pairs = [(1.0, 0.77), (0.82, 0.67), (1.1, 0.86), (0.9, 0.72)]
    before = [trial(*scaled(unchanged)) for unchanged, _ in pairs]
    after = [with_fix(*scaled(fixed)) for _, fixed in pairs]
    _, section = verify(before, after)
    assert section.outcome == "helps"
    assert 10 < present(section.saving_low_ms) < 21


def test_one_round_with_a_burst_of_other_work_leaves_six_rounds_clear() -> None:
    """Ratios seen on a shared machine: one of 0.59 among five of 0.84."""
    ratios = (0.594, 0.835, 0.865, 0.841, 0.837, 0.84)
    before = [trial(*STEADY)] * 6
    after = [with_fix(*scaled(ratio)) for ratio in ratios]
    assert verify(before[:5], after[:5])[1].outcome == "unclear"
    assert verify(before, after)[1].outcome == "helps"


def test_a_fix_that_does_nothing_seldom_seems_to_do_something() -> None:
    """Asked after every round from the second to the sixth, as `run --verify` does."""
    random.seed(1)
    wrong = 0
    for _ in range(3000):
        rounds: list[tuple[list[float], list[float]]] = []
        for number in range(1, 7):
            rounds.append((drawn_run(), drawn_run()))
            low, high = ratio_interval(rounds)
            if number > 1 and not low <= 1 <= high:
                wrong += 1
                break
    assert 0.01 < wrong / 3000 < 0.08


def test_of_the_whole_procedure_neither() -> None:
    """Two rounds, then up to four runs of pairs, on machines that change their speed now and
    then, or seldom.
    """
    random.seed(2)
    for often in (0.15, 0.03):
        outcomes = [whole_procedure(1.0, often) for _ in range(800)]
        wrong = sum(outcome in ("helps", "slower") for outcome in outcomes)
        assert 0.005 < wrong / 800 < 0.08


def test_a_fifth_is_found_on_a_machine_with_two_speeds() -> None:
    random.seed(3)
    outcomes = [whole_procedure(0.8, 0.15) for _ in range(300)]
    assert outcomes.count("helps") / 300 > 0.95
    by_runs = 0
    for _ in range(300):
        rounds = [
            (drawn_steps(10, 0.15), [0.8 * time for time in drawn_steps(10, 0.15)])
            for _ in range(6)
        ]
        by_runs += ratio_interval(rounds)[1] < 1
    assert by_runs / 300 < 0.7


def test_what_pairs_say_is_said() -> None:
    """The median of either way alone is of the machine's quick half or of its slow one."""
    quick, slow = (100.0, 80.0), (200.0, 160.0)
    # Unchanged, fixed, fixed, unchanged: five quick pairs and four slow ones.
    steps = [*quick, *quick[::-1]] * 2 + [*quick, *slow[::-1]] + [*slow, *slow[::-1]] + [*slow]
    rounds = ([trial(*STEADY)] * 2, [with_fix(*scaled(0.6)), with_fix(*scaled(1.2))])
    section = verify(*rounds, switching=[with_fix(*steps)])[1]
    assert (section.outcome, section.pairs, section.switching_runs) == ("helps", 9, 1)
    assert section.before_step_ms == 100.0
    assert section.after_step_ms == pytest.approx(80.0)
    assert section.saving_pct == pytest.approx(20.0)
    assert present(section.after).step_ms == section.after_step_ms


def test_a_run_that_fails_leaves_the_pairs_of_others_out() -> None:
    rounds = ([trial(*STEADY)] * 2, [with_fix(*scaled(0.6)), with_fix(*scaled(1.2))])
    pairs = with_fix(*[100.0, 80.0, 80.0, 100.0] * 4)
    assert verify(*rounds, switching=[pairs])[1].outcome == "helps"
    assert verify(*rounds, switching=[pairs, with_fix(100.0)])[1].pairs == 8
    for failed in (trial(status=1), trial()):
        section = verify(*rounds, switching=[pairs, failed])[1]
        assert (section.outcome, section.pairs, section.switching_runs) == ("unclear", 0, 0)


def whole_procedure(factor: float, often: float) -> str:
    """What `run --verify` says of a fix that makes a step this many times as long."""
    before: list[Trial] = []
    after: list[Trial] = []
    switching: list[Trial] = []
    for _ in range(2):
        before.append(trial(*drawn_steps(10, often)))
        after.append(with_fix(*(factor * time for time in drawn_steps(10, often))))
    while True:
        section = verify(before, after, switching=switching)[1]
        if section.outcome != "unclear" or len(switching) == 4:
            return section.outcome
        steps = enumerate(drawn_steps(20, often))
        switching.append(
            with_fix(*(time * (factor if step_has_fix(at) else 1.0) for at, time in steps))
        )


def drawn_steps(number: int, often: float) -> list[float]:
    """Steps of a machine that runs at one of two speeds for some steps, then at the other."""
    steps, slow = [], random.random() < 0.5
    for _ in range(number):
        slow ^= random.random() < often
        steps.append(math.exp(0.4 * slow + random.gauss(0, 0.05)))
    return steps


def drawn_run() -> list[float]:
    """Ten steps of a run, of which some are slower as a whole than others."""
    speed = random.gauss(0, 0.05)
    return [math.exp(speed + random.gauss(0, 0.03)) for _ in range(10)]


def test_losses() -> None:
    steady = trial(*STEADY)
    nan = float("nan")
    for before, after, status, largest in [
        ((3.0, 2.0), (3.0, 2.0), "equal", 0.0),
        ((3.0, 2.0, 1.0), (3.0, 2.0), "equal", 0.0),
        ((3.0, nan), (3.0, nan), "equal", 0.0),
        ((3.0, 2.0), (3.0, 2.25), "different", 0.25),
        ((3.0, 2.0), (3.0, nan), "different", None),
        ((), (), "not-seen", None),
    ]:
        unchanged = trial(*STEADY, losses=before)
        _, section = verify([unchanged, unchanged], [with_fix(*STEADY, losses=after)])
        assert (section.losses.status, section.losses.largest_difference) == (status, largest)
        assert section.losses_equal is {"equal": True, "different": False}.get(status)
    other = trial(*STEADY, losses=(3.0, 2.5))
    _, section = verify([steady, other], [with_fix(*scaled(0.8))])
    assert (section.losses.status, section.losses.repeat_difference) == ("not-repeatable", 0.5)
    assert (section.outcome, section.losses_equal) == ("helps", None)


@pytest.mark.parametrize(
    ("own", "fixed", "outcome", "said"),
    [
        (2.0 + 1e-7, 2.0 + 9e-7, "helps", "differ by up to 1e-07"),
        (
            2.0 + 1e-7,
            2.001,
            "helps",
            "do not show whether the fix changes them",
        ),  # below a thousandth of 3
        (2.0 + 1e-7, 9.0, "losses-differ", "differ by up to 7, where the unchanged script"),
        (2.0 + 1e-7, float("nan"), "losses-differ", "some losses are not numbers"),
        (2.5, 6.5, "helps", "do not show whether the fix changes them"),  # not ten times as far
        (float("nan"), float("nan"), "helps", "not known"),
    ],
)
def test_losses_of_a_script_that_does_not_repeat_them(
    own: float, fixed: float, outcome: str, said: str
) -> None:
    before = [trial(*STEADY), trial(*STEADY, losses=(3.0, own))]
    after = [with_fix(*scaled(0.8), losses=(3.0, fixed))] * 2
    result, section = verify(before, after)
    assert section.outcome == outcome
    assert said in " ".join(measured_sentences(result))


def test_nothing_is_said_of_a_fix_where_there_was_none() -> None:
    result, section = verify([trial(*STEADY)])
    assert (section.outcome, measured_title(result)) == ("not-tried", "Measured")
    assert measured_sentences(result) == [
        "There was no fix to try: no finding of a known saving names a checkpoint to take out."
    ]


def test_what_took_nothing_out_measured_nothing() -> None:
    before = trial(*STEADY)
    result, section = verify([before, before], [with_fix(*scaled(0.5), calls=0)])
    assert (section.outcome, section.after, section.saving_ms) == ("not-applied", None, None)
    assert (section.after_step_ms, section.losses_equal) == (None, None)
    assert "could not be applied in memory" in measured_sentences(result)[0]


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (1, "The script raised torch.OutOfMemoryError: CUDA out of memory. Tried", "out-of-memory"),
        (137, None, "out-of-memory"),
        (1, "The script raised ValueError: no.", "failed"),
        (7, None, "failed"),
    ],
)
def test_a_run_that_does_not_come_through(status: int, message: str | None, expected: str) -> None:
    before = trial(*STEADY)
    gone = trial(status=status, message=message)
    result, section = verify([before, before], [with_fix(*scaled(0.8))], [gone])
    assert present(section.without_checkpointing).status == expected
    assert present(section.without_checkpointing).step_ms is None
    assert section.outcome == "helps"
    _, failed = verify([before, before], [gone])
    assert (failed.outcome, failed.saving_ms) == ("failed", None)
    assert any("memory" in said or "to its end" in said for said in measured_sentences(result))


def with_plan(*plan: Trial) -> tuple[WithPlan, str]:
    """What is said of these runs with the plan, beside two unchanged ones."""
    before = trial(*STEADY)
    result = verified(
        sample_results.full(), (), Trials([before, before], plan=plan), ("model.layers.3",)
    )
    (said,) = [text for text in measured_sentences(result) if "the plan of RS301" in text]
    return present(present(result.verified).with_plan), said


def test_what_the_plan_gave_is_said_beside_what_was_predicted() -> None:
    """The sample's plan: 217 ms of a step of 247, 66 GiB."""
    ran = trial(*scaled(0.9), calls=4, gpu=65 << 30)
    found, said = with_plan(ran, ran)
    assert (present(found.arm).step_ms, found.losses.status) == (90.0, "equal")
    cost = present(sample_results.full().cost)
    predicted = 100 * 217 / cost.step_ms
    assert said == (
        "With the plan of RS301 (1 layer without checkpoints) a step takes 90.0 ms, predicted "
        f"{predicted:.1f} ms; at most 65.0 GiB are allocated, predicted 66.0 GiB. Its losses equal "
        "the unchanged script's, to the last bit."
    )


def test_losses_with_the_plan_that_differ_are_said() -> None:
    found, said = with_plan(trial(*STEADY, losses=(3.0, 2.5), calls=4))
    assert (found.losses.status, found.losses.largest_difference) == ("different", 0.5)
    assert said.endswith("Its losses differ from the unchanged script's by up to 0.5.")
    found, said = with_plan(trial(*STEADY, losses=(3.0, float("nan")), calls=4))
    assert found.losses.status == "different"
    assert said.endswith("Some of its losses are not numbers.")


@pytest.mark.parametrize(
    ("message", "status", "words"),
    [
        ("The script raised torch.OutOfMemoryError: no room.", "out-of-memory", "does not fit"),
        ("The script raised ValueError: no.", "failed", "did not run to its end"),
    ],
)
def test_a_plan_that_does_not_come_through(message: str, status: str, words: str) -> None:
    ran = trial(*STEADY, calls=4)
    found, said = with_plan(ran, trial(status=1, message=message))
    assert (present(found.arm).status, found.losses.status) == (status, "not-seen")
    assert words in said
    assert said.endswith(message)


def test_a_plan_that_took_nothing_out_measured_nothing() -> None:
    assert with_plan(trial(*STEADY))[0].arm is None
    # Others lost their checkpoints, and the layer of the plan did not.
    ran = structs.replace(trial(*STEADY, calls=4), result=sample_results.full())
    found, said = with_plan(ran)
    assert (found.arm, found.losses.status) == (None, "not-seen")
    assert "nothing was measured" in said
    elsewhere = structs.replace(ran, result=sample_results.clean())
    assert with_plan(elsewhere)[0].arm is not None


def test_memory_is_that_of_the_gpu_where_there_is_one() -> None:
    before, after = trial(*STEADY, gpu=4000), trial(*STEADY, gpu=3000, calls=1)
    _, section = verify([before, trial(*STEADY, gpu=4100)], [after])
    assert (section.before_peak_bytes, section.after_peak_bytes) == (4100, 3000)
    assert section.before.peak_reserved_bytes == 8200
    assert section.before.peak_rss_bytes == 10**9


@pytest.mark.parametrize("number", [6, 10, 25])
def test_the_interval_holds_the_median_as_often_as_it_says(number: int) -> None:
    """Of samples from a skewed distribution with a known median, at least 95 %."""
    random.seed(number)
    true_median = 1.0  # of exp(normal)
    held = 0
    for _ in range(4000):
        low, high = median_interval([random.lognormvariate(0, 1) for _ in range(number)])
        held += low <= true_median <= high
    assert held / 4000 >= 0.945


def test_the_interval_of_few_times_is_their_range() -> None:
    assert median_interval([5.0]) == (5.0, 5.0)
    assert median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    low, high = median_interval(range(1, 11))
    assert (low, high) == (2, 9)  # the table of the sign test for n = 10
    assert low < median(range(1, 11)) < high


@pytest.mark.parametrize(
    ("before", "after", "grew"),
    [
        ((100, 104), (180, 190), 83),
        ((100, 104), (103, 190), None),
        ((180, 190), (100, 104), None),
    ],
)
def test_memory_grew_where_every_run_with_the_fix_needs_more(
    before: tuple[int, int], after: tuple[int, int], grew: int | None
) -> None:
    _, section = verify(
        [trial(*STEADY, gpu=size << 20) for size in before],
        [trial(*STEADY, gpu=size << 20, calls=12) for size in after],
    )
    assert section.memory_grew_bytes == (grew and grew << 20)
    result = structs.replace(sample_results.doubled(), verified=section)
    said = " ".join(measured_sentences(result))
    assert ("Memory grew" in said) is (grew is not None)
