"""The guard over small trainings: what it tells, when, and that nothing else is another."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import recompute_scan
from recompute_scan.errors import InputError, RunError, UsageError
from recompute_scan.guarding.guard import StandingGuard
from tests.guard import nets
from tests.guard.nets import Net, train_step
from tests.guard.regressions import REGRESSIONS, Regression

INJECTED = 40
EVERY = 2


def train(
    net: Net, steps: int, guard: StandingGuard | None, change: object = None, at: int = INJECTED
) -> list[str]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    if guard is not None:
        guard.start()
    try:
        for number in range(1, steps + 1):
            if number == at and callable(change):
                change(net)
            losses.append(train_step(net, optimizer))
    finally:
        if guard is not None:
            guard.stop()
    return losses


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda one: one.name)
def test_a_regression_is_told_with_its_region_and_step(regression: Regression) -> None:
    torch.manual_seed(0)
    net = Net(reentrant=regression.reentrant)
    regression.start(net)
    guard = recompute_scan.guard(sample_every=EVERY, sample_share=None)
    train(net, 70, guard, regression.inject)
    assert guard.failure is None
    first = guard.changes[0]
    assert first.kind in regression.kinds, guard.changes
    assert regression.module in first.modules
    if first.kind == "unfaithful":  # seen when it is compared next: four regions in turn
        assert INJECTED <= first.step <= INJECTED + 4 * (EVERY + 1)
    else:
        assert first.step == INJECTED
        assert first.alert_step == INJECTED + 2
        assert any("nets.py" in site for site in first.sites)


@pytest.mark.parametrize(
    "how",
    [
        nets.once,
        nets.once_reentrant,
        nets.twice,
        nets.twice_to_the_end,
        nets.twice_reentrant,
        nets.reentrant_around,
        nets.reentrant_inside,
    ],
)
def test_recomputes_are_counted_as_they_run(
    how: Callable[[nn.Module, torch.Tensor], object],
) -> None:
    """A checkpoint inside another of the same module costs nothing, one run more, or two."""
    torch.manual_seed(0)
    net, guard = Net(reentrant=how is nets.once), recompute_scan.guard(sample_every=0)
    block, runs = net.blocks[1], [0]
    assert isinstance(block, nets.Block)

    def count(*_: object) -> None:
        runs[0] += 1

    def inject(net: Net) -> None:
        net.how[1] = how
        block.inner.register_forward_pre_hook(count)

    train(net, INJECTED + 9, guard, inject)
    truth = runs[0] / 10 - 1
    assert guard.failure is None
    told = [one for one in guard.changes if one.modules == ("blocks.1",)]
    if truth == 1:
        assert {(one.kind, one.after) for one in told} <= {("variant", 1)}
    else:
        assert [(one.kind, one.after) for one in told] == [("doubled", truth)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_losses_are_equal_to_the_bit_and_nothing_is_left(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = train(Net(reentrant=reentrant), 30, None)
    before = dict(vars(torch_checkpoint)), dict(vars(torch_checkpoint.CheckpointFunction))
    torch.manual_seed(0)
    guard = recompute_scan.guard(sample_every=2, sample_share=None)
    assert train(Net(reentrant=reentrant), 30, guard) == plain
    assert guard.changes == []
    after = dict(vars(torch_checkpoint)), dict(vars(torch_checkpoint.CheckpointFunction))
    assert before == after


def test_a_resumed_run_is_compared_from_its_first_step(tmp_path: Path) -> None:
    file = tmp_path / "guard.json"
    train(Net(), 30, recompute_scan.guard(baseline=file))
    same = recompute_scan.guard(baseline=file)
    train(Net(), 30, same)
    assert same.changes == []
    assert same.steps == 60
    other = recompute_scan.guard(baseline=file)
    net = Net()
    net.how[:] = [nets.plainly] * 4
    train(net, 10, other)
    (change,) = other.changes
    assert (change.kind, change.step) == ("off", 61)
    assert change.modules == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class Held:
    """Calls a module, as an object that is made for each call does."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, x: torch.Tensor) -> object:
        return self.block(x)


def _module_given(block: nn.Module, x: torch.Tensor) -> object:
    return block(x)


def _closed(block: nn.Module) -> Callable[..., object]:
    return lambda *inputs: block(inputs[0])


CALLED: dict[str, Callable[[nn.Module, torch.Tensor], tuple[object, ...]]] = {
    "a module": lambda block, x: (block, x),
    "a method": lambda block, x: (block.forward, x),
    "a partial of a method": lambda block, x: (functools.partial(block.__call__), x),
    "a closure": lambda block, x: (_closed(block), x),
    "an argument": lambda block, x: (_module_given, block, x),
    "an object": lambda block, x: (Held(block), x),
}


@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
@pytest.mark.parametrize("kind", ["off", "doubled"])
def test_a_layer_is_known_however_it_is_called(
    called: Callable[[nn.Module, torch.Tensor], tuple[object, ...]], kind: str
) -> None:
    def how(block: nn.Module, x: torch.Tensor) -> object:
        function, *args = called(block, x)
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)

    def again(block: nn.Module, x: torch.Tensor) -> object:
        with torch_checkpoint.set_checkpoint_early_stop(enable=False):
            return torch_checkpoint.checkpoint(lambda x: how(block, x), x, use_reentrant=False)

    def change(net: Net) -> None:
        net.how[1] = again if kind == "doubled" else nets.plainly

    net = Net()
    net.how[:] = [how] * 4
    guard = recompute_scan.guard(sample_every=0)
    train(net, 50, guard, change)
    (told,) = guard.changes
    assert (told.kind, told.step, told.modules) == (kind, INJECTED, ("blocks.1",))


def test_steps_can_be_said() -> None:
    net = Net()
    with recompute_scan.guard() as guard:
        for _ in range(30):
            net(torch.randn(4, 8)).square().mean().backward()
            guard.step()
    assert guard.steps == 30


def test_it_raises_only_where_asked() -> None:
    guard = recompute_scan.guard(on_change="raise")
    with pytest.raises(RunError, match=r"blocks\.2"):
        train(Net(), 70, guard, REGRESSIONS[0].inject)
    assert guard.steps == INJECTED + 2


def test_a_callback_can_be_added_under_way() -> None:
    told: list[object] = []
    guard = recompute_scan.guard()
    guard.callbacks.append(told.append)
    train(Net(), 70, guard, REGRESSIONS[0].inject)
    assert told == guard.changes
    assert len(told) == 1


def test_a_callback_that_fails_is_not_the_trainings(caplog: pytest.LogCaptureFixture) -> None:
    def callback(_: object) -> None:
        raise ValueError("theirs")

    guard = recompute_scan.guard(callbacks=[callback])
    assert len(train(Net(), 70, guard, REGRESSIONS[0].inject)) == 70
    assert len(guard.changes) == 1
    assert "callback" in caplog.text


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="E234"):
        recompute_scan.guard(learning=0)
    file = tmp_path / "other.json"
    file.write_text('{"modules": {}, "format": "another"}')
    with pytest.raises(InputError, match="E351"):
        recompute_scan.guard(baseline=file).start()
