"""One boundary per training step, however many optimizers a script steps and wherever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import recompute_scan
from recompute_scan import _step
from recompute_scan.record import profiler, steps
from recompute_scan.record.steps import StepCounter, wait_for_gpus
from tests.present import present
from tests.record.runs import LAYERS, Recorded, record_script

EXPLICIT = "recompute_scan.step()"


def ends(events: str) -> str:
    """The events after which the counter says that a step has ended, once it has settled.

    Everything up to the last change of mind is left out, as the recorder leaves it out.
    """
    counter = StepCounter()
    kept: list[str] = []
    for place, event in enumerate(events):
        changed, ended = counter.saw(event)
        if changed:
            kept = []
        if ended:
            kept.append(f"{event}{place}")
    return " ".join(kept)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("AAAA", "A0 A1 A2 A3"),
        ("DGDGDG", "G1 G3 G5"),
        ("DDDDDGDDDDDGDDDDDG", "G5 G11 G17"),
        ("GDDDGDDDGDDD", "G4 G8"),
        ("ABCABCABC", "C2 C5 C8"),
        ("AAAABBBB", "B4 B5 B6 B7"),  # a new optimizer for a second stage
    ],
)
def test_the_rarest_optimizer_ends_the_step(events: str, expected: str) -> None:
    assert ends(events) == expected


def test_a_new_optimizer_takes_the_place_of_one_that_is_no_more() -> None:
    counter = StepCounter()
    for number in range(12):  # a client each, of four steps
        seen = [counter.saw(f"client {number}") for _ in range(4)]
        assert seen == [(False, True)] * 4
        counter.gone(f"client {number}")
        if number == 5:
            counter.freeze()
    assert counter.steps == 48


def test_optimizers_of_an_inner_loop_come_and_go() -> None:
    counter = StepCounter()
    ended = []
    for task in range(6):
        for _ in range(3):
            counter.saw(f"inner {task}")
        counter.gone(f"inner {task}")
        ended.append(counter.saw("outer")[1])
    # It takes the place of the first inner one, until the counts show which is the rarer.
    assert ended[3:] == [True] * 3


def test_another_optimizer_at_the_same_address() -> None:
    counter = StepCounter()
    counter.saw(7)
    counter.gone(7)
    assert counter.saw(7) == (False, True)
    assert counter.saw(8) == (True, True)  # another beside it, and rarer


def test_steps_count_the_ender_alone() -> None:
    counter = StepCounter()
    for event in "DDDGDDDGDDDG":
        counter.saw(event)
    assert counter.steps == 3


def test_a_frozen_counter_ignores_newcomers() -> None:
    counter = StepCounter()
    counter.saw("A")
    counter.freeze()
    assert counter.saw("B") == (False, False)
    assert counter.saw("A") == (False, True)
    assert counter.steps == 2


def test_an_explicit_step_replaces_optimizers_even_when_frozen() -> None:
    counter = StepCounter()
    counter.saw("A")
    counter.freeze()
    assert counter.saw(EXPLICIT) == (True, True)
    assert counter.saw("A") == (False, False)
    assert counter.saw(EXPLICIT) == (False, True)
    assert (counter.steps, counter.explicit) == (2, True)


def test_outside_a_recording_a_step_does_nothing() -> None:
    recompute_scan.step()
    assert not _step.listeners


ACCUMULATION = """\
model, data = Layer(), torch.randn(4, 8)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
for batch in range(100):
    model(data).sum().backward()
    if batch % 4 == 3:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""

GAN = """\
generator, critic, data = Layer(), Layer(), torch.randn(4, 8)
slow = torch.optim.SGD(generator.parameters(), 0.01)
fast = torch.optim.Adam(critic.parameters())
for _ in range(100):
    for _ in range(3):
        critic(data).sum().backward()
        fast.step()
    generator(data).sum().backward()
    slow.step()
"""

IN_BACKWARD = """\
model, data = nn.Sequential(Layer(), Layer()), torch.randn(4, 8)
optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}

def hook(p):
    assert torch._C._current_graph_task_id() != -1
    optimizers[p].step()
    p.grad = None

for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for _ in range(100):
    model(data).sum().backward()
"""

WRAPPING = """\
class Wrapping(torch.optim.Adagrad):
    def step(self, closure=None):
        return super().step(closure)

model, data = nn.Linear(8, 8), torch.randn(4, 8)
optimizer = Wrapping(model.parameters(), 0.01)
compiled = torch.compile(model, backend="eager")

def closure():
    loss = compiled(data).sum()
    loss.backward()
    return loss

for _ in range(100):
    optimizer.step(closure)
"""

EXPLICITLY = """\
import recompute_scan
from recompute_scan import _step
model, data = Layer(), torch.randn(4, 8)
other = torch.optim.SGD([nn.Parameter(torch.ones(1, requires_grad=True))], 0.1)
for _ in range(100):
    for _ in range(2):
        model(data).sum().backward()
        other.step()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None
    recompute_scan.step()
"""


def per_step(recorded: Recorded, name: str) -> list[int]:
    """How often a range of this name begins in each profiled step."""
    trace = recorded.trace()
    counts: Counter[int] = Counter()
    for event in trace.ranges(name):
        for index, step in enumerate(trace.steps):
            if step["ts"] <= event["ts"] < step["ts"] + step["dur"]:
                counts[index] += 1
    return [counts[index] for index in range(len(trace.steps))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name", "expected"),
    [
        (ACCUMULATION, "aten::relu", 4),
        (GAN, "Optimizer.step#", 4),
        (IN_BACKWARD, "Optimizer.step#SGD", 8),
        (WRAPPING, "Optimizer.step#", 1),
        (EXPLICITLY, "Optimizer.step#SGD", 2),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)
def test_a_profiled_step_is_one_of_the_scripts(
    tmp_path: Path, script: str, name: str, expected: int
) -> None:
    recorded = record_script(
        tmp_path, LAYERS + script + "print('end')\n", timing_steps=2, warmup=2, steps=3
    )
    assert (recorded.status, recorded.stdout, recorded.stderr) == (0, "", "")
    assert (recorded.info.status, recorded.info.profiled_steps) == ("complete", 3)
    assert len(recorded.info.timed_steps_ms) == 2
    assert per_step(recorded, name) == [expected] * 3


class Gpus:
    """Two GPUs that are not there; only the first is used. Keeps what was asked of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.captures = False
        self.broken = ""
        started: dict[str, Any] = {"is_available": True, "is_initialized": True, "device_count": 2}
        started |= {"mem_get_info": (1, 1), "current_device": 0}
        for name, value in started.items():
            patch.setattr(torch.cuda, name, lambda value=value: value)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        patch.setattr(torch.cuda, "synchronize", self._synchronize)
        patch.setattr(torch.cuda, "get_device_name", lambda: self.ask("name"))
        patch.setattr(torch.cuda, "Event", lambda **_: _Event(self))
        patch.setattr(steps, "_HAS_CONTEXT", lambda device: device == 0)
        cpu = torch.profiler.ProfilerActivity.CPU
        xpu = torch.profiler.ProfilerActivity.XPU  # which torch itself finds missing
        patch.setattr(profiler, "ProfilerActivity", SimpleNamespace(CPU=cpu, CUDA=xpu))
        start = torch.profiler.profile.start_trace

        def start_trace(one: Any) -> None:
            self.asked.append("stacks" if one.with_stack else "trace")
            start(one)

        patch.setattr(torch.profiler.profile, "start_trace", start_trace)

    def _synchronize(self, device: int) -> None:
        self.ask(f"wait {device}")

    def ask(self, what: str) -> str:
        assert not self.captures
        self.asked.append(what)
        if self.broken:
            raise RuntimeError(self.broken)
        return "a GPU"


class _Event:
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def record(self) -> None:
        self._gpus.ask("mark")

    def synchronize(self) -> None:
        self._gpus.ask("wait for mark")

    def elapsed_time(self, _: _Event) -> float:
        return 1.0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def trained(recording: Any, number: int, between: Callable[[int], None] = lambda _: None) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(number):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
        recording.step()


def test_each_recording_begins_on_an_idle_gpu_and_timed_steps_wait_for_none(gpus: Gpus) -> None:
    with recompute_scan.record(steps=2, warmup=1, timing_steps=2) as recording:
        trained(recording, 8)
    assert recording.info is not None
    assert (recording.info.device, recording.info.profiled_steps) == ("cuda", 2)
    assert recording.info.timed_steps_ms == (1.0, 1.0)
    marks = ["mark", "mark", "mark", "wait for mark"]
    assert gpus.asked == [*marks, "wait 0", "trace", "wait 0", "stacks", "name"]


def test_what_is_captured_is_no_step_and_nothing_waits_meanwhile(gpus: Gpus) -> None:
    def capture(step: int) -> None:
        gpus.captures = step in (1, 3, 6)  # before it is timed, while it is, and while profiled

    with recompute_scan.record(steps=2, warmup=1, timing_steps=2) as recording:
        trained(recording, 10, capture)
    assert present(recording.info).bug is None
    assert present(recording.info).profiled_steps == 2
    assert gpus.asked.count("wait 0") == 2
    gpus.captures = True
    wait_for_gpus()
    assert gpus.asked.count("wait 0") == 2


@pytest.mark.parametrize("timing_steps", [0, 2])
def test_a_gpu_that_has_failed_is_the_scripts_to_meet(
    gpus: Gpus, capfd: pytest.CaptureFixture[str], timing_steps: int
) -> None:
    def fail(step: int) -> None:
        if step == 1:
            gpus.broken = (
                "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"
            )

    recording = recompute_scan.record(steps=2, warmup=2, timing_steps=timing_steps)
    with pytest.warns(RuntimeWarning, match="gave no trace"), recording:
        trained(recording, 6, fail)
    assert present(recording.info).bug is None
    assert present(recording.info).message == (
        "Recording ended when the GPU failed: RuntimeError: CUDA error: device-side assert "
        "triggered."
    )
    assert "E702" not in capfd.readouterr().err


def test_a_gpu_that_nobody_has_begun_with_is_left_alone(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    wait_for_gpus()
    assert gpus.asked == []
