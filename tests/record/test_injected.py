"""Faults in every function of ours that runs inside the script: its losses and its end stay.

The functions are found by what is entered while a script trains, so none can be forgotten. Each
fails in turn, when it is entered or when it returns. What is left out is the guard itself, and the
interpreter's part in running a script.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

import recompute_scan
from recompute_scan.record.children import record
from recompute_scan.record.options import RemovalOptions, RunOptions
from recompute_scan.record.profiler import _left
from recompute_scan.result.run_record import RunInfo

OURS = str(Path(recompute_scan.__file__).parent)
# What is between the script and all else of ours, and what runs the script.
OUTSIDE = ("isolation.py", "execute.py")
# What calls each operator, and shelters it from all that looks at it.
SHELTERS = ("__torch_dispatch__", "_fail", "fail")
EXCHANGE = "exchanged_with_the_test"
SCRIPT = f"""
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tiny import Trainer
import {EXCHANGE} as exchange

torch.manual_seed(0)
exchange.begin()
trainers = [Trainer(), Trainer(reentrant=True)]
for number in range(9):
    with record_function("step"):
        losses = [trainer.loss() for trainer in trainers]
        sum(losses).backward()
    for trainer in trainers:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    exchange.losses.append([loss.item().hex() for loss in losses])
with profile(activities=[ProfilerActivity.CPU]):
    exchange.losses.append(trainers[0].step().hex())
exchange.end()
del trainers, trainer, losses  # as at the end of a process
"""


class Fault(Exception):
    """Nothing that our code expects."""


class Faults:
    """Makes one function of ours fail, or notes which are entered."""

    def __init__(self) -> None:
        self.entered: dict[str, int] = {}
        self.target = ""
        self.at_return = False
        self.hits = 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        name = _name(frame.f_code)
        if not name:
            return None
        self.entered[name] = self.entered.get(name, 0) + 1
        if name != self.target:
            return None
        if self.at_return:
            return self._until_it_returns
        self.hits += 1
        raise Fault("injected")

    def _until_it_returns(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            self.hits += 1
            raise Fault("injected")
        return self._until_it_returns


def _name(code: CodeType) -> str:
    file = code.co_filename
    if not file.startswith(OURS) or file.endswith(OUTSIDE) or code.co_name in SHELTERS:
        return ""
    return f"{Path(file).stem}:{code.co_firstlineno}:{code.co_name}"


@contextmanager
def traced(faults: Faults) -> Iterator[SimpleNamespace]:
    exchange = SimpleNamespace(
        losses=[], begin=lambda: sys.settrace(faults.trace), end=lambda: sys.settrace(None)
    )
    before = sys.gettrace()
    sys.modules[EXCHANGE] = exchange  # type: ignore[assignment]
    sys.path.append(str(Path(__file__).parent / "scripts"))
    try:
        yield exchange
    finally:
        sys.settrace(before)
        sys.path.pop()
        del sys.modules[EXCHANGE]
        _left.clear()  # what a fault may leave open closes with the step


def run(folder: Path, faults: Faults, *, removing: bool = False) -> tuple[RunInfo, list[Any]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    removal = RemovalOptions("torch-checkpoint", "elsewhere.py:1", "reentrant")
    options = RunOptions(
        str(script),
        is_module=False,
        args=(),
        output=folder / "out",
        steps=2,
        warmup=1,
        timing_steps=1,
        keep_going=True,
        work=True,
        measure=removing,
        removals=(removal,) if removing else (),
        switching=removing,
    )
    with traced(faults) as exchange:
        info = record(options)
    return info, exchange.losses


# What a fault leaves half open is closed by the collector, which says so.
# One run for each of our functions.
EVERY = pytest.param(1, marks=(pytest.mark.slow, pytest.mark.timeout(2400)))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [EVERY, 48])
@pytest.mark.parametrize("removing", [False, True], ids=["recording", "verifying"])
def test_no_fault_of_ours_reaches_the_script(
    tmp_path: Path, removing: bool, every: int, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = Faults()
    info, expected = run(tmp_path, plain, removing=removing)
    assert info.bug is None
    names = sorted(plain.entered)
    assert len(names) > 100
    wrong = []
    for number, name in enumerate(names[::every]):
        faults = Faults()
        faults.target, faults.at_return = name, number % 2 == 1
        info, losses = run(tmp_path, faults, removing=removing)
        told = info.bug is not None or any("[E703]" in one for one in info.warnings)
        compared = info.fidelity.regions if info.fidelity is not None else ()
        told = told or any(region.untold for region in compared)
        told = told or (info.watched is not None and info.watched.untold is not None)
        if losses != expected or info.exit_status or (faults.hits and not told):
            wrong.append((name, faults.at_return, info.exit_status, losses == expected, told))
    assert not wrong
    assert "[E702]" in capfd.readouterr().err
