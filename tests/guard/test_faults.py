"""Faults in every function of the guard that a run enters: the script's losses, output and status
stay.

The functions are found by what is entered. The doors hold the script's own calls, so a fault is put
into each line of theirs that is ours alone: those of the ``try`` before the call.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import recompute_scan
from recompute_scan import guarding
from recompute_scan.guarding import counters, guard
from recompute_scan.record.steps import is_recorded

OURS = str(Path(guarding.__file__).parent)
SCRIPT = """
import sys
import torch
from tests.guard import nets
from tests.guard.nets import Net, train_step

torch.manual_seed(0)
models = [Net(2), Net(2, reentrant=True)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in models]
for number in range(26):
    if number == 18:
        models[0].how[0] = nets.plainly
        models[1].how[1] = lambda block, x: nets.once_reentrant(lambda x: block(x), x)
    print([train_step(*each) for each in zip(models, optimizers, strict=True)])
sys.exit(3)
"""


class Fault(Exception):
    """Nothing that our code expects."""


class Faults:
    """Makes a function or a line of ours fail once or always, or notes which are entered."""

    def __init__(self, target: str = "", line: int = 0) -> None:
        self.entered: dict[str, None] = {}
        self.target = target
        self.line = line
        self.hits = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        module = Path(code.co_filename).stem
        if module == "counters" and code.co_name in ("passing", "counting"):
            return self.line_of_a_door if self.line and code.co_name == "passing" else None
        name = f"{module}:{code.co_firstlineno}:{code.co_name}"
        self.entered[name] = None
        if name == self.target:
            self.hits += 1
            raise Fault("injected")
        return None

    def line_of_a_door(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lineno == self.line:
            self.hits += 1
            raise Fault("injected")
        return self.line_of_a_door


class Runs:
    """Runs the script under the guard, with a fault or without."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT)
        self._folder = folder
        self._capsys = capsys
        self._number = 0

    def __call__(self, faults: Faults | None) -> tuple[str, int]:
        self._number += 1
        sys.settrace(faults)
        try:
            folder = self._folder / str(self._number)
            _, ended = guard.run_guarded(str(self._script), False, [], folder)
        finally:
            sys.settrace(None)
        assert not is_recorded()
        return self._capsys.readouterr().out, ended.exit_status


@pytest.fixture
def runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runs]:
    often = partial(recompute_scan.guard, learning=5, sample_every=2, sample_share=None)
    monkeypatch.setattr(guard, "guard", often)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    yield Runs(tmp_path, capsys)
    assert "tests.guard.nets" in sys.modules


def lines_of_ours() -> list[int]:
    """Lines of the door that are ours alone."""
    tree = ast.parse(inspect.getsource(counters))
    (passing,) = (
        one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "passing"
    )
    (ours,) = (one for one in passing.body if isinstance(one, ast.Try))
    statements = (one for part in ours.body for one in ast.walk(part) if isinstance(one, ast.stmt))
    return sorted(one.lineno for one in statements)


@pytest.mark.slow
def test_the_script_is_the_same_whatever_fails(runs: Runs) -> None:
    plain = runs(Faults("nothing"))
    assert plain[1] == 3
    assert plain[0].count("0x") == 52
    look = Faults()
    assert runs(look) == plain
    assert len(look.entered) > 60
    for target in look.entered:
        if target.endswith(":run_guarded"):  # the script's way in
            continue
        faults = Faults(target)
        assert runs(faults) == plain, target
        assert faults.hits, target


def test_a_door_lets_the_call_through_whatever_line_fails(runs: Runs) -> None:
    plain = runs(None)
    hits = 0
    lines = lines_of_ours()
    assert len(lines) > 10
    for line in lines:
        faults = Faults(line=line)
        assert runs(faults) == plain, line
        hits += faults.hits > 0
    assert hits > 10


def test_a_guard_that_a_bug_has_ended_is_in_the_way_of_no_recording() -> None:
    standing = recompute_scan.guard().start()
    assert is_recorded()
    standing._guard.run(lambda: 1 / 0, otherwise=None)
    assert not is_recorded()
    standing.stop()
