"""The solver against trying everything, and its memory against a count by hand."""

import itertools
import random

import numpy as np
import pytest
from msgspec.structs import replace

from recompute_scan.cost.arrangement import Arrangements
from recompute_scan.cost.plan import Planner, arrangements, read_wish
from recompute_scan.errors import RunError, UsageError
from recompute_scan.result.run_record import (
    ArmMeasured,
    Candidate,
    Hold,
    ModuleRun,
    Rehearsal,
    Storage,
)
from tests.effort import some
from tests.present import present


def rehearsal(
    storages: list[Storage],
    runs: list[ModuleRun],
    again: list[float],
    selective: tuple[float, ...] = (),
    offload: float | None = None,
) -> Rehearsal:
    whole = sum(again)
    partly = ArmMeasured("selective", (100.0 + sum(selective),) * 8, 0)
    return Rehearsal(
        rank=0,
        device="cpu",
        candidates=tuple(
            Candidate(f"layers.{n}", f"Layer{n}", True, ms, selective[n] if selective else 0.0)
            for n, ms in enumerate(again)
        ),
        runs=tuple(runs),
        storages=tuple(storages),
        arms=(
            ArmMeasured("today", (100.0,) * 8, 0),
            ArmMeasured("keep", (100.0,) * 8, 0),
            ArmMeasured("recompute", (100.0 + whole,) * 8, 0),
            *((partly,) if selective else ()),
            *((ArmMeasured("offload", (100.0 + offload,) * 8, 0),) if offload is not None else ()),
        ),
    )


def chain(
    layers: int, rng: random.Random, *, selective: bool = False, offload: bool = False
) -> Rehearsal:
    """Layers that save tensors of their own, and the border to the one before. Heavy operators
    make some of those, and some that nobody saves.
    """
    storages, runs = [], []
    last = 10 * layers
    for n in range(layers):
        backward = last + 10 * (layers - n)
        runs.append(ModuleRun(n, 10 * n, backward))
        own = Hold(n, "saved", 10 * n + 1, backward)
        storages.append(Storage(rng.randint(1, 60) << 20, (own,)))
        heavy = [Hold(n, "heavy", 10 * n + 2, backward), Hold(n, "saved", 10 * n + 3, backward)]
        storages.append(Storage(rng.randint(1, 30) << 20, tuple(heavy)))
        if rng.random() < 0.5:
            storages.append(Storage(rng.randint(1, 30) << 20, tuple(heavy[:1])))
        border = [Hold(n, "input", 10 * n, backward + 5)]
        if rng.random() < 0.6:  # the first operator saves the input too
            border.append(Hold(n, "saved", 10 * n + 1, backward + 2))
        if n and rng.random() < 0.6:  # the last operator before saved its result
            border.append(Hold(n - 1, "saved", 10 * n - 1, backward + 9))
        storages.append(Storage(rng.randint(1, 9) << 20, tuple(border)))
    storages.append(Storage(rng.randint(1, 90) << 20, (Hold(-1, "saved", last, last + 1),)))
    again = [rng.uniform(1, 9) for _ in range(layers)]
    some = tuple(ms * rng.uniform(0.2, 1.1) for ms in again) if selective else ()
    copies = rng.uniform(0.3, 1.5) * sum(again) if offload else None
    return rehearsal(storages, runs, again, some, copies)


def with_parts(one: Rehearsal, rng: random.Random) -> Rehearsal:
    """Two parts in each layer: the first saves what stands in front in the layer, the second what
    is behind it, each with an input of its own. What the layers saved so far is outside of them.
    """
    layers = len(one.candidates)
    parts = tuple(
        Candidate(f"layers.{n}.{name}", name, False, whole.again_ms * share, part_of=n)
        for n, whole in enumerate(one.candidates)
        for name, share in (("attention", rng.uniform(0.2, 0.6)), ("mlp", rng.uniform(0.1, 0.3)))
    )
    runs, storages = list(one.runs), list(one.storages)
    for n, run in enumerate(one.runs):
        for place, (begin, backward) in enumerate(((1, 6), (5, 2))):
            number = len(runs)
            behind = run.backward + backward
            runs.append(ModuleRun(layers + 2 * n + place, run.begin + begin, behind, n))
            given = [Hold(number, "input", run.begin + begin, behind + 1)]
            if rng.random() < 0.5:  # an operator outside the part saves it too
                given.append(Hold(n, "saved", run.begin + begin, behind + 1))
            own = Hold(number, "saved", run.begin + begin + 1, behind + 1)
            heavy = [Hold(number, "heavy", run.begin + begin + 1, behind + 1)]
            storages += [
                Storage(rng.randint(1, 9) << 20, tuple(given)),
                Storage(rng.randint(1, 40) << 20, (own, *(heavy if rng.random() < 0.5 else ()))),
            ]
    return replace(
        one,
        candidates=(*one.candidates, *parts),
        runs=tuple(runs),
        storages=tuple(storages),
        arms=(*one.arms, parts_arm(*parts)),
    )


def parts_arm(*parts: Candidate) -> ArmMeasured:
    return ArmMeasured("parts", (100.0 + sum(one.again_ms for one in parts),) * 8, 0)


def test_a_step_that_never_ran_is_one_with_all_recomputes_less_these() -> None:
    shown = chain(4, random.Random(0))
    known = arrangements(shown)
    shown = replace(shown, arms=tuple(arm for arm in shown.arms if arm.way != "keep"))
    model = arrangements(shown)
    assert model.keep_ms == pytest.approx(known.keep_ms)
    assert model.again_ms == pytest.approx(known.again_ms)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("selective", [False, True], ids=["whole", "selective"])
@pytest.mark.parametrize("parts", [False, True], ids=["", "parts"])
@pytest.mark.parametrize("seed", some(range(12), 3))
def test_the_solver_finds_what_trying_everything_finds(
    seed: int, parts: bool, selective: bool, offload: bool
) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 3 if parts else 7 - 2 * selective - offload)
    shown = chain(layers, rng, selective=selective, offload=offload)
    model = arrangements(with_parts(shown, rng) if parts else shown)
    assert bool(model.parts) is parts
    options = [model.options(place) for place in range(len(model.candidates))]
    each = (model.followed(np.array(one, np.int8)) for one in itertools.product(*options))
    every = list(np.unique(list(each), axis=0))
    peaks = [model.peak(one) for one in every]
    assert model.least() == min(peaks)
    for part in (0.0, 0.3, 0.6, 0.9, 1.0):
        budget = round(min(peaks) + part * (max(peaks) - min(peaks)))
        found = present(model.solve(budget=budget))
        assert model.peak(found) <= budget
        best = min(
            model.step_ms(one) for one, peak in zip(every, peaks, strict=True) if peak <= budget
        )
        assert model.step_ms(found) == pytest.approx(best)
        smallest = present(model.solve(step_ms=model.step_ms(found) + 1e-6))
        fast = (one for one in every if model.step_ms(one) <= model.step_ms(found) + 1e-6)
        assert model.peak(smallest) == min(map(model.peak, fast))
    assert model.solve(budget=min(peaks) - 1) is None
    assert model.solve(step_ms=model.keep_ms - 1) is None


def test_memory_is_what_a_count_by_hand_gives() -> None:
    """Two layers: each saves 8, the border between them 4, what is in front 2, the loss 1."""
    model = two_layers()
    neither, first, second, both = ([0, 0], [1, 0], [0, 1], [1, 1])
    # At the turn: 2 + 8 + 4 + 8 + 1.
    assert model.peak(np.array(neither, np.int8)) == 23 << 20
    # At the turn 2 + 4 + 8 + 1; its recompute comes when the second layer has let go.
    assert model.peak(np.array(first, np.int8)) == 15 << 20
    # The second's recompute: 2 + 8 + 4 + 8, without the loss.
    assert model.peak(np.array(second, np.int8)) == 22 << 20
    # 2 + 4 + 1 at the turn, 2 + 4 + 8 in the second's recompute, 2 + 8 in the first's.
    assert model.peak(np.array(both, np.int8)) == 14 << 20


def test_what_is_offloaded_is_back_for_its_backward_pass() -> None:
    """The same two layers. Copies take 6 ms, by bytes: 2 + 8 and 4 + 8 of 22."""
    model = two_layers(offload=6.0)
    both, first, last = (np.array(one, np.int8) for one in ([3, 3], [3, 0], [1, 3]))
    # The loss alone at the turn, then what each has saved: 4 + 8, 2 + 8.
    assert model.peak(both) == 12 << 20
    # 4 + 8 + 1 at the turn.
    assert model.peak(first) == 13 << 20
    # A checkpoint's input stays: 2 + 4 + 8 in the second's backward pass, 2 + 8 in the first's.
    assert model.peak(last) == 14 << 20
    assert model.step_ms(both) == pytest.approx(106.0)
    assert model.step_ms(first) == pytest.approx(100 + 6 * 10 / 22)


def test_what_comes_back_is_there_beside_what_others_hold_of_it() -> None:
    """Two layers that both save the 4 MiB between them, and have weights of 3 MiB."""
    storages = [
        Storage(8 * _MIB, (Hold(0, "saved", 2, 50),)),
        Storage(4 * _MIB, (Hold(0, "saved", 3, 50), Hold(1, "saved", 11, 42))),
        Storage(5 * _MIB, (Hold(1, "saved", 12, 40),)),
    ]
    one = rehearsal(storages, _STORAGES[1], [3.0, 5.0], offload=6.0)
    model = arrangements(
        replace(one, candidates=tuple(replace(c, weight_bytes=3 * _MIB) for c in one.candidates))
    )
    # In its backward pass the second has 4 + 5 + 3 again, beside the first's 8 + 4.
    assert model.peak(np.array([0, 3], np.int8)) == 24 << 20
    # 8 + 4 + 3 in the first's; at the turn the second's 4 + 5.
    assert model.peak(np.array([3, 0], np.int8)) == 15 << 20


def test_copies_that_cannot_be_told_from_noise_are_not_offered() -> None:
    """They would come out free, and everything be offloaded without need."""
    one = rehearsal(*_STORAGES, [3.0, 5.0], offload=0.0)
    planner = Planner([one], read_wish("1GB", None))
    plan = planner.plan(planner.best())
    assert not any(module.offloaded or module.recompute for module in plan.modules)
    assert [module.again_ms for module in plan.modules] == pytest.approx([3.0, 5.0])
    # Nor where one rank's host had too little memory.
    enough = rehearsal(*_STORAGES, [3.0, 5.0], offload=6.0)
    assert arrangements(enough).offload_ms
    assert not arrangements(enough, replace(enough, arms=enough.arms[:-1])).offload_ms


def test_the_plan_says_what_is_offloaded() -> None:
    """Too little memory for anything else: both recomputed hold 14 MiB."""
    one = rehearsal(*_STORAGES, [3.0, 5.0], offload=6.0)
    planner = Planner([one], read_wish("12MiB", None))
    plan = planner.plan(planner.best())
    assert [(module.offloaded, module.recompute) for module in plan.modules] == [(True, False)] * 2
    assert (plan.plan.offloaded, plan.plan.recomputed) == (2, 0)
    with pytest.raises(RunError, match="E332"):
        Planner([replace(one, arms=one.arms[:-1])], read_wish("12MiB", None)).best()


def test_a_part_alone_holds_what_a_count_by_hand_gives() -> None:
    """One layer: input 2, 16 of its own; a part with an input of 4 that saves 8. The loss 1."""
    storages = [
        Storage(2 * _MIB, (Hold(0, "input", 0, 60), Hold(0, "saved", 1, 59))),
        Storage(16 * _MIB, (Hold(0, "saved", 2, 41),)),
        Storage(4 * _MIB, (Hold(1, "input", 3, 52),)),
        Storage(8 * _MIB, (Hold(1, "saved", 4, 50),)),
        Storage(1 * _MIB, (Hold(-1, "saved", 20, 30),)),
    ]
    runs = [ModuleRun(0, 0, 40), ModuleRun(1, 3, 50, part_of=0)]
    one = rehearsal(storages, runs, [3.0])
    part = Candidate("layers.0.mlp", "Mlp", False, 1.0, part_of=0)
    one = replace(one, candidates=(*one.candidates, part), arms=(*one.arms, parts_arm(part)))
    model = arrangements(one)
    keep, whole, alone = (np.array(each, np.int8) for each in ([0, 0], [1, 1], [0, 4]))
    # 2 + 16 + 8 + 1 at the turn.
    assert model.peak(keep) == 27 << 20
    # Its recompute: 2 + 16 + 8.
    assert model.peak(whole) == 26 << 20
    # 2 + 16 + 4 + 1 at the turn; the part's recompute comes when the 16 are gone: 2 + 4 + 8.
    assert model.peak(alone) == 23 << 20
    assert model.step_ms(alone) == pytest.approx(101.0)
    planner = Planner([one], read_wish("23MiB", None))
    plan = planner.plan(planner.best())
    assert [module.parts for module in plan.modules] == [("mlp",)]
    assert (plan.plan.recomputed, plan.plan.in_part) == (0, 1)
    assert plan.modules[0].checkpointed_names == ("layers.0.mlp",)


def test_a_part_that_runs_outside_its_module_is_recomputed_with_it_alone() -> None:
    one = with_parts(chain(2, random.Random(1)), random.Random(1))
    assert arrangements(one).parts == {2, 3, 4, 5}
    apart = replace(one.runs[-1], part_of=-1)
    assert arrangements(replace(one, runs=(*one.runs, apart))).parts == {2, 3, 4}


def test_a_selective_checkpoint_holds_what_heavy_operators_made() -> None:
    """One layer: input 2, a product of 5 that is saved, 3 that nobody saves and its recompute drops
    on the way, 1 that it never comes to; 4 that is saved behind all of them but the last.
    """
    mib = 1 << 20
    storages = [
        Storage(2 * mib, (Hold(0, "input", 0, 60),)),
        Storage(5 * mib, (Hold(0, "heavy", 1, 9), Hold(0, "saved", 2, 50))),
        Storage(3 * mib, (Hold(0, "heavy", 3, 9),)),
        Storage(4 * mib, (Hold(0, "saved", 4, 50),)),
        Storage(1 * mib, (Hold(0, "heavy", 5, 9),)),
        Storage(8 * mib, (Hold(-1, "saved", 20, 30),)),
    ]
    runs = [ModuleRun(0, 0, 50)]
    model = arrangements(rehearsal(storages, runs, [3.0], (1.0,)))
    keep, recompute, selective = (model.peak(np.array([n], np.int8)) for n in range(3))
    # At the turn: 5 + 4 + 8; 2 + 8, with which its recompute's 2 + 5 + 4 compare.
    assert (keep, recompute) == (17 << 20, 11 << 20)
    # At the turn: 2 + 5 + 3 + 1 + 8.
    assert selective == 19 << 20
    # Without the loss: its recompute's end, 2 + 5 + 4 + 1; on the way 2 + 5 + 3 + 1.
    quiet = arrangements(rehearsal(storages[:-1], runs, [3.0], (1.0,)))
    assert quiet.peak(np.array([2], np.int8)) == 12 << 20


def test_every_rank_has_to_have_the_memory() -> None:
    rng = random.Random(3)
    one, other = chain(4, rng), chain(4, rng)
    both = arrangements(one, other)
    for choices in itertools.product((0, 1), repeat=4):
        what = np.array(choices, np.int8)
        alone = [arrangements(rank).peak(what) for rank in (one, other)]
        assert both.peak(what) == max(alone)


_MIB = 1 << 20
_STORAGES = (
    [
        Storage(2 * _MIB, (Hold(0, "input", 0, 60), Hold(0, "saved", 1, 52))),
        Storage(8 * _MIB, (Hold(0, "saved", 2, 50),)),
        Storage(4 * _MIB, (Hold(1, "input", 10, 45), Hold(1, "saved", 11, 42))),
        Storage(8 * _MIB, (Hold(1, "saved", 12, 40),)),
        Storage(1 * _MIB, (Hold(-1, "saved", 20, 30),)),
    ],
    [ModuleRun(0, 0, 50), ModuleRun(1, 10, 40)],
)


def two_layers(offload: float | None = None) -> Arrangements:
    return arrangements(rehearsal(*_STORAGES, [3.0, 5.0], offload=offload))


def test_a_tower_that_is_not_checkpointed_is_told_of() -> None:
    """The second and third layer are a tower of their own; between them they share 4 MiB."""
    mib = 1 << 20
    storages = [
        Storage(2 * mib, (Hold(0, "saved", 1, 60),)),
        Storage(4 * mib, (Hold(1, "saved", 2, 50), Hold(2, "saved", 3, 40))),
        Storage(8 * mib, (Hold(2, "input", 3, 50), Hold(2, "saved", 4, 40))),
    ]
    runs = [ModuleRun(0, 0, 60), ModuleRun(1, 1, 50), ModuleRun(2, 2, 40)]
    one = rehearsal(storages, runs, [1.0, 1.0, 1.0])
    names = ("text.layers.0", "vision.blocks.0", "vision.blocks.1")
    candidates = tuple(
        replace(candidate, module=name, checkpointed=name.startswith("text"))
        for candidate, name in zip(one.candidates, names, strict=True)
    )
    planner = Planner([replace(one, candidates=candidates)], read_wish("1GB", None))
    (said,) = planner.plan(planner.best()).remarks
    assert said == (
        "1 of 3 modules are checkpointed today. Not checkpointed: 2 in vision.blocks, which save "
        "12.0 MiB."
    )
    whole = Planner([one], read_wish("1GB", None))
    assert not whole.plan(whole.best()).remarks


def test_a_script_without_checkpoints_is_what_it_is_without_them() -> None:
    """Whatever the clock says: both arms made the same steps."""
    one = rehearsal([], [ModuleRun(0, 0, 5)], [3.0])
    today = ArmMeasured("today", (130.0,) * 8, 7)
    keep = ArmMeasured("keep", (100.0,) * 8, 7)
    one = replace(one, arms=(today, keep, *one.arms[2:]))
    kept = Planner([one], read_wish("1GB", None))
    assert kept.today.step_ms == 130.0  # it has checkpoints
    none = replace(one, candidates=(replace(one.candidates[0], checkpointed=False),))
    planner = Planner([none], read_wish("1GB", None))
    assert planner.today.step_ms == planner.arrangements.keep_ms == 115.0


def test_a_script_that_checkpoints_everything_is_what_it_is_with_checkpoints_of_ours() -> None:
    """Unless it takes longer for certain: with two around each module."""
    one = rehearsal([], [ModuleRun(0, 0, 5)], [20.0])
    keep = ArmMeasured("keep", (80.0, 81.0) * 8, 0)
    for today, ours, same in (
        ((101.0, 99.0), (99.0, 103.0), True),
        ((130.0, 130.0), (99.0, 103.0), False),
    ):
        arms = (ArmMeasured("today", today * 8, 7), keep, ArmMeasured("recompute", ours * 8, 7))
        planner = Planner([replace(one, arms=arms)], read_wish("1GB", None))
        model = planner.arrangements
        assert (model.step_ms(model.everything) == pytest.approx(planner.today.step_ms)) is same


def test_a_machine_that_gets_slower_does_so_for_all_arms() -> None:
    """Twice as slow at the end, and never a step without checkpoints that is not a fifth faster."""
    one = rehearsal([], [ModuleRun(0, 0, 5)], [20.0])
    slower = [1.0 + n / 15 for n in range(16)]
    steps = {"today": 100.0, "keep": 80.0, "recompute": 110.0}
    arms = tuple(
        replace(arm, steps_ms=tuple(steps[arm.way] * by for by in slower)) for arm in one.arms
    )
    planner = Planner([replace(one, arms=arms)], read_wish("1GB", None))
    model = planner.arrangements
    assert model.keep_ms / planner.today.step_ms == pytest.approx(0.8)
    assert model.step_ms(model.everything) / planner.today.step_ms == pytest.approx(1.1)


def test_what_steps_say_outranks_what_recomputes_took() -> None:
    """Recomputes of 3 and 5 ms, and steps that differ by 16 ms for certain."""
    one = rehearsal([], [ModuleRun(0, 0, 5), ModuleRun(1, 1, 4)], [3.0, 5.0])
    arms = (*one.arms[:2], ArmMeasured("recompute", (116.0,) * 8, 0))
    model = arrangements(replace(one, arms=arms))
    assert model.again_ms == pytest.approx((6.0, 10.0))
    assert model.step_ms(model.everything) == pytest.approx(116.0)


@pytest.mark.parametrize(
    ("text", "today", "free", "bytes_"),
    [
        ("60GB", 0, 0, 60_000_000_000),
        ("1.5 GiB", 0, 0, 3 << 29),
        ("512MiB", 0, 0, 512 << 20),
        ("1000", 0, 0, 1000),
        ("80%", 1000, 0, 800),
        ("free", 1000, 500, 1450),
        ("free", 1000, None, None),
        (None, 1000, 0, 1000),
    ],
)
def test_limits(text: str | None, today: int, free: int | None, bytes_: int | None) -> None:
    assert read_wish(text, None).budget(today, free) == bytes_


@pytest.mark.parametrize("text", ["", "many", "-5GB", "60 GBs", "5i", "%"])
def test_no_limits(text: str) -> None:
    with pytest.raises(UsageError, match="E232"):
        read_wish(text or "x", None)


def test_one_limit_only() -> None:
    with pytest.raises(UsageError, match="one limit"):
        read_wish("60GB", 30.0)
