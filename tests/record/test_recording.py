"""``recompute_scan.record``: the loop is recorded, gives the right answer, and is left alone."""

import copy
import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recompute_scan as rs
from recompute_scan.errors import RunError, UsageError
from recompute_scan.record.recording import Recording
from tests.present import present
from tests.record.residue import WAITING, frames_of_ours, left_behind, snapshot
from tests.record.runs import run_plain

STEPS = 3 + 2 + 1  # warm-up, profiled, with stacks


class Layer(nn.Module):
    """Counts its own forward runs, in the forward pass and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.runs = [0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[torch._C._current_graph_task_id() != -1] += 1
        out: torch.Tensor = self.down(torch.relu(self.up(x))) + x
        return out


class Loop:
    """A training loop over three layers, each in as many checkpoints as told."""

    def __init__(self, checkpoints: int) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.optimizer = torch.optim.SGD(self.layers.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.checkpoints = checkpoints
        self.losses: list[float] = []

    def train(self) -> None:
        x = torch.ones(32, 64, requires_grad=True)
        for layer in self.layers:
            x = self.run(layer, x, self.checkpoints)
        loss = x.square().mean()
        loss.backward()
        self.losses.append(loss.item())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def run(self, layer: nn.Module, x: Any, checkpoints: int) -> Any:
        if checkpoints == 0:
            return layer(x)
        return checkpoint(self.run, layer, x, checkpoints - 1, use_reentrant=True)


def record(**options: Any) -> Recording:
    return rs.record(**{"steps": 2, "timing_steps": 0, "warmup": 3, **options})


def recorded(loop: Loop, made: int = STEPS, **options: Any) -> Recording:
    with record(**options) as recording:
        for _ in range(made):
            loop.train()
            recording.step()
    return recording


def is_done(recording: Recording) -> bool:
    return recording.done


@pytest.fixture(scope="module")
def doubled() -> Recording:
    return recorded(Loop(2), STEPS + 3, timing_steps=2)


@pytest.fixture(autouse=True)
def _no_profiler_is_left() -> Iterator[None]:
    yield
    assert not torch._C._autograd._profiler_enabled()


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == set()


@pytest.mark.parametrize("checkpoints", [0, 1, 2, 3])
def test_it_finds_what_the_layers_count(checkpoints: int) -> None:
    loop = Loop(checkpoints)
    scan = recorded(loop).scan
    counted = {layer.runs[1] / layer.runs[0] for layer in loop.layers if isinstance(layer, Layer)}
    assert counted == {checkpoints}
    assert scan.recompute_per_backward == checkpoints
    assert scan.verdict == ("none", "full", "doubled", "doubled")[checkpoints]


def test_the_answer_is_that_of_a_recorded_script(doubled: Recording) -> None:
    scan = doubled.scan
    assert (scan.verdict, scan.result.evidence_level) == ("doubled", "annotated")
    assert scan.regions["recompute_runs_per_backward"].tolist() == [2.0] * 3
    assert scan.regions["module_class"].tolist() == ["Layer"] * 3
    assert [finding.code for finding in scan.findings] == ["RS001"]
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip().startswith("return checkpoint(self.run")
    )
    sites = {one.call_site for region in scan.result.regions for one in region.checkpoints}
    assert sites == {f"tests/record/test_recording.py:{line}"}
    assert present(scan.cost).step_source == "timed"
    assert doubled.info is not None
    assert len(doubled.info.timed_steps_ms) == 2
    assert (doubled.info.status, doubled.info.profiled_steps) == ("complete", 2)
    assert len(scan.trace.events) > 100
    assert doubled.scan is scan


def test_nothing_is_changed_by_it() -> None:
    plain, watched = Loop(2), Loop(2)
    for _ in range(STEPS + 2):
        plain.train()
    recorded(watched, STEPS + 2)
    assert watched.losses == plain.losses
    for one, other in zip(plain.layers.parameters(), watched.layers.parameters(), strict=True):
        assert torch.equal(one, other)


def test_after_the_last_step_nothing_of_ours_runs() -> None:
    loop = Loop(2)
    before = snapshot()
    with record() as recording:
        assert left_behind()  # the test can see what is there
        assert frames_of_ours(loop.train)
        for _ in range(STEPS):
            assert not is_done(recording)
            loop.train()
            recording.step()
        assert is_done(recording)
        # Still inside the block: the loop goes on, and nothing is in its way.
        assert left_behind() == set()
        assert frames_of_ours(loop.train) == []
        assert recording.scan.verdict == "doubled"
        for _ in range(3):
            loop.train()
            recording.step()
    after = snapshot()
    assert [where for where in before if after.get(where) is not before[where]] == []


def test_what_waits_for_imports_does_not_grow(doubled: Recording) -> None:
    assert doubled.done
    module, _, name = WAITING.rpartition(".")
    waiting = getattr(sys.modules[module], name)
    before = sum(map(len, waiting.values()))
    recorded(Loop(1))
    assert sum(map(len, waiting.values())) == before


def test_several_times_in_one_process(doubled: Recording) -> None:
    again = [recorded(Loop(number)) for number in (1, 2)]
    assert [one.scan.verdict for one in (doubled, *again)] == ["doubled", "full", "doubled"]
    same = record()
    for checkpoints in (2, 1):
        loop = Loop(checkpoints)
        with same:
            for _ in range(STEPS):
                loop.train()
                same.step()
        assert same.scan.recompute_per_backward == checkpoints


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_an_exception_passes_through_and_leaves_nothing(steps: int) -> None:
    loop, recording = Loop(2), record()
    with pytest.raises(ZeroDivisionError, match="theirs"), recording:
        for _ in range(steps):
            loop.train()
            recording.step()
        raise ZeroDivisionError("theirs")
    assert left_behind() == set()
    assert frames_of_ours(loop.train) == []
    scan = recording.scan
    assert scan.result.crash is not None
    assert scan.verdict == ("inconclusive" if steps == 1 else "doubled")
    assert recorded(Loop(1)).scan.verdict == "full"


def test_an_interrupted_loop_keeps_what_it_has() -> None:
    loop, recording = Loop(2), record()
    with pytest.raises(KeyboardInterrupt), recording:
        for _ in range(STEPS - 1):
            loop.train()
            recording.step()
        raise KeyboardInterrupt
    assert present(recording.info).exit_status == 130
    assert recording.scan.verdict == "doubled"


def test_no_step_is_said() -> None:
    with pytest.warns(RuntimeWarning, match=r"step\(\) of the recording was never called"):  # noqa: SIM117
        with record() as recording:
            Loop(1).train()
    with pytest.raises(RunError, match="gave no trace") as caught:
        _ = recording.scan
    assert caught.value.code == "E309"
    assert "never called" in str(caught.value)


def test_too_few_steps_are_said_with_what_would_fit() -> None:
    with pytest.warns(RuntimeWarning, match="made 3 steps"):
        recording = recorded(Loop(1), 3, timing_steps=10)
    with pytest.raises(RunError) as caught:
        _ = recording.scan
    asked = present(re.search(r"record\((.*?)\)", str(caught.value)))
    fits = dict(re.findall(r"(\w+)=(\d+)", asked[1]))
    assert fits == {"steps": "1", "warmup": "1", "timing_steps": "0"}
    again = recorded(Loop(1), 3, **{name: int(number) for name, number in fits.items()})
    assert again.scan.verdict == "full"


def test_another_profiler_is_named() -> None:
    loop = Loop(2)
    with (
        pytest.warns(RuntimeWarning, match="a torch profiler itself"),
        torch.profiler.profile(),
    ):
        recording = recorded(loop)
    with pytest.raises(RunError, match="a torch profiler itself"):
        _ = recording.scan


def test_another_profiler_is_given_way_to() -> None:
    loop = Loop(2)
    with record() as recording:
        for step in range(20):
            if step == 5:  # in the middle of our own
                with torch.profiler.profile() as theirs:
                    loop.train()
            else:
                loop.train()
            recording.step()
    assert any(event.key == "aten::relu" for event in theirs.key_averages())
    assert recording.scan.verdict == "doubled"
    assert any("profiler itself" in text for text in recording.scan.result.warnings)


def test_one_at_a_time() -> None:
    with record() as recording:
        with pytest.raises(UsageError, match="another recording") as caught, record():
            pass
        assert caught.value.code == "E230"
        for _ in range(STEPS):
            recording.step()
    with pytest.warns(RuntimeWarning):
        recorded(Loop(0), 1)


def test_under_run_it_says_who_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recompute_scan.record.recording.is_recorded", lambda: True)
    with pytest.raises(UsageError, match="recompute-scan run"), record():
        pass


@pytest.mark.parametrize("use", [lambda one: one.step(), lambda one: one.scan])
def test_not_before_it_has_begun(use: Callable[[Recording], object]) -> None:
    with pytest.raises(UsageError, match="E231"):
        use(record())


def test_no_scan_while_it_is_under_way() -> None:
    loop = Loop(1)
    with record() as recording:
        loop.train()
        recording.step()
        with pytest.raises(UsageError, match="has not ended"):
            _ = recording.scan
        for _ in range(STEPS - 1):
            loop.train()
            recording.step()
        assert recording.scan.verdict == "full"


@pytest.mark.parametrize("options", [{"steps": 0}, {"warmup": 0}, {"timing_steps": -1}])
def test_impossible_counts_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="E204"):
        record(**options)


def test_a_folder_holds_what_run_leaves(tmp_path: Path, doubled: Recording) -> None:
    folder = tmp_path / "out"
    scan = recorded(Loop(2), folder=folder).scan
    assert {path.name for path in folder.iterdir()} == {
        "trace-rank0.json.gz",
        "stacks-rank0.json.gz",
        "run-rank0.json",
        "result.json",
        "report.html",
    }
    assert json.loads((folder / "result.json").read_text())["verdict"] == "doubled"
    assert rs.analyze(folder) == scan
    recorded(Loop(1), folder=str(folder))  # what was there goes
    compared = rs.compare(doubled.scan, folder)
    assert (compared.before.verdict, compared.after.verdict) == ("doubled", "full")


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="E206"), record(folder=tmp_path / "file"):
        pass


def test_a_folder_of_its_own_goes_with_the_scan() -> None:
    recording = recorded(Loop(1))
    scan = recording.scan
    del recording
    gc.collect()
    folder = Path(scan.traces[0])
    assert len(copy.copy(scan).trace.events) > 100
    assert folder.is_dir()
    del scan
    gc.collect()
    assert not folder.exists()


RANKS = """\
import sys, torch, torch.distributed as dist, recompute_scan as rs
sys.path.insert(0, sys.argv[1])
from tests.record.test_recording import Loop
dist.init_process_group("gloo")
loop, seen = Loop(2), []
with rs.record(steps=1, warmup=2, timing_steps=2, folder="out") as recording:
    while not recording.done:
        loop.train()
        dist.all_reduce(torch.ones(1))
        recording.step()
        seen.append(recording.done)
scan = recording.scan
sys.stdout.write(f"{dist.get_rank()} {len(seen)} {scan.verdict} {len(scan.result.ranks)}\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_is_done_after_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    root = str(Path(__file__).resolve().parents[2])
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = run_plain(tmp_path, *command, "--nproc-per-node=3", "train.py", root)
    assert done.returncode == 0, done.stderr
    # The first and the last rank record, the one between them counts.
    assert sorted(done.stdout.splitlines()) == [f"{rank} 7 doubled 2" for rank in range(3)]
    assert (tmp_path / "out" / "report.html").exists()
