"""What is asked of trackers, without their libraries: only those in use, and nothing raised."""

import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recompute_scan import trackers
from recompute_scan.result import from_json
from recompute_scan.trackers import Note
from tests.trackers.training import followed, guarded

NOTE = Note(step=3, text="All is known.", scalars={"a": 1}, alert="Look", verdict="doubled")


class Run:
    """What a run of W&B is called with."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], bool | None]] = []
        self.summary: dict[str, object] = {}
        self.alerts: list[str] = []
        self.artifacts: list[str] = []

    def log(self, values: dict[str, float], step: int | None = None, *, commit: Any = None) -> None:
        self.rows.append((values, commit))

    def alert(self, *, title: str, text: str, level: str) -> None:
        self.alerts.append(title)

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.extend(artifact.pages)


class Artifact:
    def __init__(self, name: str, type: str) -> None:
        self.pages: list[str] = []

    def add_file(self, path: str) -> None:
        self.pages.append(Path(path).read_bytes().decode(errors="replace"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run()
    module: Any = ModuleType("wandb")
    module.run, module.Artifact = made, Artifact
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have imported is not in use here."""
    for name in ("mlflow", "torch.utils.tensorboard.writer", "tensorboardX.writer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "trackio.context_vars", raising=False)


def test_no_tracker_is_imported() -> None:
    code = (
        "import sys; from recompute_scan import trackers as t\n"
        "assert t.tell(t.Note(step=1, text='', scalars={}, alert='x', files={'a': b''})) == ()\n"
        "assert not {'wandb', 'mlflow', 'tensorboard', 'trackio', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_scan_is_told_while_the_training_goes_on(run: Run) -> None:
    seen: list[int] = []
    _, counted = followed(lambda step, loss: seen.append(len(run.rows)))
    assert seen[0] == 0
    assert seen[-1] == 1, "told before the training ends, when frameworks have closed theirs"
    ((values, commit),) = run.rows
    assert commit is False, "the script's own row of this step is not ended"
    assert values["recompute_scan/recompute_per_backward"] == counted == 2.0
    assert values["recompute_scan/saving_pct"] > 0
    assert run.summary["recompute_scan/verdict"] == "doubled"
    assert run.alerts == ["Activation checkpointing is doubled"]
    page, result, _ = run.artifacts
    assert "<html" in page
    assert from_json(result.encode()).verdict == "doubled"


def test_a_change_is_told(run: Run) -> None:
    (change,) = guarded(lambda step, loss: None)
    assert run.alerts == ["Recomputes have changed: doubled"]
    values = run.rows[0][0]
    assert values["recompute_scan/recomputes_per_forward"] == change.after
    assert values["recompute_scan/changes"] == 1
    (page,) = run.artifacts
    assert change.text in unescape(page)


def test_trackers_can_be_left_alone(run: Run) -> None:
    followed(lambda step, loss: None, trackers=False)
    guarded(lambda step, loss: None, trackers=False)
    assert run.rows == []
    assert run.alerts == []


def test_what_is_not_known_is_not_among_the_numbers(run: Run) -> None:
    trackers.tell(Note(step=1, text="No answer.", scalars={}, verdict="inconclusive"))
    assert run.rows == [({}, False)]
    assert run.summary == {"recompute_scan/verdict": "inconclusive"}
    assert run.alerts == []


@pytest.mark.parametrize("method", ["log", "alert", "log_artifact"])
def test_a_tracker_that_fails_is_logged(
    run: Run, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("theirs")

    monkeypatch.setattr(run, method, fail)
    follower, _ = followed(lambda step, loss: None)
    assert follower.scan.verdict == "doubled"
    assert "wandb could not be updated" in caplog.text
    assert "theirs" in caplog.text


def test_one_that_fails_keeps_no_other_from_being_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("theirs")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=fail))
    assert trackers.in_use() == ("wandb",)
    assert trackers.tell(NOTE) == ("wandb",)
    assert run.alerts == ["Look"]


def test_another_module_of_that_name_is_no_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "trackio.context_vars", "torch.utils.tensorboard.writer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert trackers.in_use() == ()
    assert trackers.tell(NOTE) == ()


def test_without_room_for_the_page_nothing_is_raised(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    assert trackers.tell(NOTE) == ()
    assert "could not be updated" in caplog.text
