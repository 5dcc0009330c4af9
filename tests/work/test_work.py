"""What is watched in small trainings whose waste is planted, or that have none."""

import inspect
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from recompute_scan.record.attribution import CallSites
from recompute_scan.record.isolation import Guard, Patches
from recompute_scan.result.watched_step import WatchedStep
from recompute_scan.work import Ledger, StepWatch, watched_step
from tests.work import trainings
from tests.work.trainings import ALONE, ORDINARY, PLANTED, Step


def seen(step: Step) -> StepWatch:
    """Two steps of a training, watched."""
    guard = Guard()
    watch = watch_of(guard)
    assert watch.begin()
    step()
    assert not watch.next_step()
    step()
    assert watch.next_step()
    watch.end()
    assert guard.failure is None
    return watch


def watched(step: Step, *, before: int = 2) -> WatchedStep:
    """What the third step of a training shows."""
    for _ in range(before):
        step()
    watch = seen(step)
    for one in watch.ledger.operations:  # in place of its time, which another program can stretch
        one.ms = sum(memory.bytes for memory in (*one.reads, *one.makes)) / 2**16
    return watched_step(watch, ())


def planted(name: str) -> Step:
    """A training of four layers with that waste."""
    return PLANTED[name].make(4, False, lambda run: run())


def plain() -> Step:
    return ORDINARY["plain"](3)


def watch_of(guard: Guard) -> StepWatch:
    ledger = Ledger(lambda file, line: f"{file}:{line}")
    owner = CallSites(Path.cwd()).installed_at
    return StepWatch(ledger, _name_of, owner, guard.around, guard.is_scripts, Patches(), cuda=False)


def _name_of(module: torch.nn.Module) -> tuple[str, str]:
    return "", type(module).__name__


# What is found beside the planted waste, for good reasons.
ALSO = {
    "old_log_probabilities_of_a_reentrant_model": {"unread-recompute"},
    "dropped_metric": {"never-read"},
}


def test_a_local_that_dies_with_its_function_is_never_read() -> None:
    net = trainings.Net(3, 2048)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def forward() -> None:
        scores = net(trainings.rows(1024))
        loss: Any = torch.nn.functional.cross_entropy(scores, trainings.labels(1024, 2048))
        loss.backward()

    def step() -> None:
        forward()
        optimizer.step()
        optimizer.zero_grad()

    assert "never-read" in {one.kind for one in watched(step).kept}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_waste_is_found_with_its_line(name: str) -> None:
    kind = PLANTED[name].kind
    torch.manual_seed(0)
    found = watched(planted(name))
    listed: list[Any] = [*found.work, *found.kept]
    source = Path(trainings.__file__).read_text("utf-8").splitlines()
    lines = {n for n, text in enumerate(source, 1) if text.endswith(f"# WASTE: {name}")}
    others = ALSO.get(name, set())
    assert {one.kind for one in listed} - others == {kind}
    if name == "gradients_for_nobody":  # by the forward lines of the judge's weights
        lines = {*range(*_lines_of(trainings.Block)), *range(*_lines_of(trainings.Net))}
    if name == "cycle":  # where the function that keeps it computes
        lines = {*range(*_lines_of(trainings.Kept)), *range(*_lines_of(trainings.cycle))}
    named = {int(one.line.rpartition(":")[2]) for one in listed if one.kind == kind}
    assert not lines.isdisjoint(named)


def _lines_of(thing: Any) -> tuple[int, int]:
    lines, first = inspect.getsourcelines(thing)
    return first, first + len(lines)


@pytest.mark.parametrize("name", ["plain", *sorted(ALONE)])
def test_nothing_is_found_in_an_ordinary_training(name: str) -> None:
    torch.manual_seed(0)
    found = watched({"plain": plain, **ALONE}[name]())
    assert found.untold is None
    assert (found.work, found.kept) == ((), ())


def test_bytes_between_parts_are_exact() -> None:
    torch.manual_seed(0)
    found = watched(planted("between"))
    # One result between two parts of each of four layers: 2048 x 128 numbers of four bytes.
    assert [(one.bytes, one.tensors, one.layers) for one in found.kept] == [
        (4 * 2048 * 128 * 4, 4, 4)
    ]


@pytest.mark.parametrize(
    "make", [plain, lambda: planted("cycle"), lambda: planted("recompute_tail")]
)
def test_a_watched_training_computes_the_same(make: Callable[[], Step]) -> None:
    def weights_after(*, watch: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        step = make()
        held = [
            cell.cell_contents
            for cell in step.__closure__ or ()
            if isinstance(cell.cell_contents, torch.nn.Module)
        ]
        if watch:
            watched(step)
        else:
            for _ in range(4):
                step()
        return [p.detach().clone() for one in held for p in one.parameters()]

    weights_after(watch=False)  # the first training of a process may differ from its repeats
    plain, seen = weights_after(watch=False), weights_after(watch=True)
    assert plain
    assert all(torch.equal(*pair) for pair in zip(plain, seen, strict=True))


def test_a_script_below_a_dispatch_mode_is_left_alone() -> None:
    watch = watch_of(Guard())
    with FlopCounterMode(display=False):
        assert not watch.begin()
    assert re.search("TorchDispatchMode", watched_step(watch, ()).untold or "")


def test_a_step_that_does_not_end_is_not_judged() -> None:
    watch = watch_of(Guard())
    step = planted("head_for_nobody")
    assert watch.begin()
    step()
    watch.end()
    assert watched_step(watch, ()).untold is not None
    assert "_engine_run_backward" in vars(torch.autograd)
    assert torch._C._len_torch_dispatch_stack() == 0


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_the_same_calls() -> None:
    net, x = trainings.Net(3, reentrant=False), torch.randn(4, 128)
    watch = watch_of(Guard())

    def calls() -> list[object]:
        seen = _Seen()
        with seen:
            net(x).sum().backward()
            x.tolist()
        return seen.calls

    calls()  # gradients are there from here on
    plain = calls()
    assert watch.begin()
    seen = calls()
    watch.end()
    assert (seen, set(seen)) == (plain, set(plain))


def test_a_mode_that_the_step_leaves_open_stays_open() -> None:
    watch = watch_of(Guard())
    assert watch.begin()
    with FlopCounterMode(display=False) as theirs:
        watch.end()
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert theirs.get_total_flops() == 16
    assert torch._C._len_torch_dispatch_stack() == 0


def test_our_exceptions_end_the_watch_and_the_programs_pass() -> None:
    def interrupt(*_: object) -> None:
        raise TimeoutError

    guard = Guard()
    watch = watch_of(guard)
    before = signal.signal(signal.SIGUSR1, interrupt)
    # While an operator is looked at, a signal comes.
    watch._values.drain = lambda: signal.raise_signal(signal.SIGUSR1)  # type: ignore[method-assign]
    assert watch.begin()
    with pytest.raises(TimeoutError):
        torch.ones(2) + 1
    signal.signal(signal.SIGUSR1, before)
    assert watch.untold is None
    watch._values.drain = lambda: None  # type: ignore[method-assign]
    watch._phase = lambda *_: 1 / 0  # type: ignore
    trainings.Net(3)(torch.randn(2, 128)).sum().backward()
    watch.end()
    assert guard.failure is None
    assert "ZeroDivisionError" in (watch.untold or "")
