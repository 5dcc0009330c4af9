"""What is recorded when, and what is kept when a script does not play along."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recompute_scan.record.profiler import ProfilerWindow
from recompute_scan.record.steps import Plan, Seen, shortfall
from tests.record.runs import (
    LAYERS,
    Recorded,
    plain_environment,
    record_script,
    record_target,
    recording_command,
    run_plain,
    script_lines,
    write_script,
)

LOOP = (
    LAYERS
    + """\
model, data = nn.Sequential(Layer(), Layer()), torch.randn(4, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def train(steps):
    for step in range(steps):
        loss = checkpoint(model, data, use_reentrant=False).sum()
        loss.backward()
        print("loss", step, loss.item(), flush=True)
        optimizer.step()
        optimizer.zero_grad()

"""
)

pytestmark = pytest.mark.slow


def losses(recorded: Recorded) -> int:
    return recorded.stdout.count("loss")


def test_the_phases_in_order_and_an_orderly_end(tmp_path: Path) -> None:
    script = LOOP + (
        "import atexit\n"
        "atexit.register(print, 'at exit')\n"
        "try:\n    train(100)\nfinally:\n    print('cleaned up')\n"
    )
    recorded = record_script(tmp_path, script, warmup=3, timing_steps=4, steps=2)

    # 3 to warm up, 4 timed, 1 to warm the profiler up, 2 profiled, 1 with stacks, 1
    # compared.
    assert losses(recorded) == 12
    assert recorded.stdout.endswith("cleaned up\nat exit\n")
    assert (recorded.status, recorded.stderr) == (0, "")
    info = recorded.info
    assert (info.status, info.message, info.exit_status) == ("complete", None, 0)
    assert (info.warmup_steps, info.profiled_steps, info.device) == (3, 2, "cpu")
    assert len(info.timed_steps_ms) == 4
    assert all(0 < milliseconds < 1000 for milliseconds in info.timed_steps_ms)
    assert info.environment["target"] == "train.py"
    assert info.warnings == ()

    trace, stacks = recorded.trace(), recorded.trace("stacks-rank0.json.gz")
    assert (len(trace.steps), len(stacks.steps)) == (2, 1)
    assert not any(e.get("cat") == "python_function" for e in trace.events)
    frames = {e["name"] for e in stacks.events if e.get("cat") == "python_function"}
    assert any(name.startswith("train.py(") or "/train.py(" in name for name in frames)
    assert any("Input Dims" in e.get("args", {}) for e in trace.events)
    assert [annotation.module_class for annotation in trace.regions] == ["Sequential"] * 2
    assert sorted(path.name for path in recorded.output.iterdir()) == [
        "run-rank0.json",
        "stacks-rank0.json.gz",
        "trace-rank0.json.gz",
    ]


@pytest.mark.parametrize("made", [2, 3, 5])
def test_the_options_it_suggests_fit(tmp_path: Path, made: int) -> None:
    script = LOOP + f"train({made})\nprint('end')\n"
    short = record_script(tmp_path, script, warmup=3, timing_steps=10, steps=5)
    assert (short.status, short.info.status) == (0, "ended-early")
    assert short.info.trace is None
    assert short.info.message == (
        f"The script made {made} optimizer steps; 21 were wanted. Try --quick, or a longer run."
    )
    # What `--quick` asks for.
    again = record_script(tmp_path, script, warmup=1, steps=1, stacks=False, fidelity=False)
    assert (again.info.status, again.info.profiled_steps) == ("complete", 1)
    assert "stopped the script after its step 2 (--keep-going lets it run on)" in again.told


def test_a_script_that_ends_inside_the_window(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, LOOP + "train(4)\n", steps=5)
    info = recorded.info
    assert (recorded.status, info.status, info.profiled_steps) == (0, "ended-early", 2)
    assert info.message == (
        "The script made 4 optimizer steps; 9 were wanted. 2 of 5 could be profiled. Try --quick, "
        "or a longer run."
    )
    assert len(recorded.trace().regions) == 2


def test_a_script_that_raises_keeps_its_trace(tmp_path: Path) -> None:
    script = LOOP + "train(3)\nraise ValueError('lost')\n"
    recorded = record_script(tmp_path, script, steps=5)
    info = recorded.info
    assert (recorded.status, info.status, info.exit_status) == (1, "failed", 1)
    assert (info.message or "").startswith("The script raised ValueError: lost. The script made 3")
    assert recorded.stderr.endswith("    raise ValueError('lost')\nValueError: lost\n")
    assert recorded.stderr.count("File ") == 1
    assert len(recorded.trace().steps) == 2  # the second is cut short
    assert info.profiled_steps == 1


def test_an_interrupt_keeps_its_trace(tmp_path: Path) -> None:
    write_script(tmp_path, LOOP.replace("loss.backward()", "loss.backward(); time.sleep(0.1)"))
    with (tmp_path / "train.py").open("a") as file:
        # A shell without job control starts its background jobs with interrupts ignored.
        file.write("import signal, time\n")
        file.write("signal.signal(signal.SIGINT, signal.default_int_handler)\n")
        file.write("train(1000)\n")
    process = subprocess.Popen(
        recording_command(tmp_path, "train.py", steps=900, warmup=1, timing_steps=0),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
    assert process.stdout is not None
    while "loss 4" not in process.stdout.readline():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    recorded = Recorded(process.returncode, "", "", tmp_path / "out")
    assert (recorded.status, recorded.info.status) == (130, "failed")
    assert (recorded.info.message or "").startswith("The script was interrupted.")
    assert recorded.info.profiled_steps >= 3
    assert len(recorded.trace().regions) >= 3


def test_no_optimizer_step(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for stale in ("trace-rank0.json.gz", "run-rank0.json", "run-rank1.json", "trace-rank1.json.gz"):
        (tmp_path / "out" / stale).write_text("from an earlier run")
    recorded = record_script(tmp_path, "print('end')\n")
    info = recorded.info
    assert (recorded.status, recorded.stdout, info.status) == (0, "end\n", "ended-early")
    assert "made no optimizer step" in (info.message or "")
    assert "recompute_scan.step()" in (info.message or "")
    assert [path.name for path in recorded.output.iterdir()] == ["run-rank0.json"]


def test_data_loader_workers_end_with_the_script(tmp_path: Path) -> None:
    script = LAYERS + (
        "from torch.utils.data import DataLoader\n"
        "model, data = Layer(), [torch.randn(8) for _ in range(400)]\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "if __name__ == '__main__':\n"
        "    for batch in DataLoader(data, batch_size=4, num_workers=2):\n"
        "        model(batch).sum().backward()\n"
        "        optimizer.step()\n"
    )
    write_script(tmp_path, script)
    check = write_script(
        tmp_path,
        f"""\
        import multiprocessing, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import driver
        status = driver.main()
        print(status, multiprocessing.active_children())
        """,
        "check.py",
    )
    command = recording_command(tmp_path, "train.py", steps=2, warmup=2, timing_steps=0)
    done = run_plain(tmp_path, str(check), *command[2:])
    assert (done.stdout, script_lines(done.stderr)) == ("0 []\n", [])


@pytest.mark.parametrize(
    ("options", "code"),
    [({"steps": 0}, "E204"), ({"warmup": 0}, "E204"), ({"output": "train.py/out"}, "E206")],
    ids=["steps", "warmup", "output"],
)
def test_wrong_use(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    write_script(tmp_path, "print('never')\n")
    recorded = record_target(tmp_path, "train.py", **options)
    assert (recorded.status, recorded.stdout) == (2, "")
    assert f"[{code}]" in recorded.stderr


PLAN = Plan(3, 2, 3)
WITHOUT_STACKS = (
    "The script made 9 optimizer steps; 10 were wanted. Only the Python stacks of the "
    "checkpoint calls are missing."
)


@pytest.mark.parametrize(
    ("seen", "said", "not_said"),
    [
        (Seen(made=20, profiled=3, stacks=True), None, None),
        (Seen(made=9, profiled=3, stacks=False), WITHOUT_STACKS, "longer run"),
        # The script's own profiler takes the blame where steps were enough.
        (Seen(80, profiled=0, stacks=False, waited=True), "torch profiler itself", "longer run"),
        (Seen(made=4, profiled=0, stacks=False, waited=True), "longer run", None),
        (Seen(PLAN.least, profiled=0, stacks=False), f"takes up to {PLAN.wanted}.", "were wanted"),
    ],
)
def test_what_is_missing_is_named(seen: Seen, said: str | None, not_said: str | None) -> None:
    text = shortfall(PLAN, seen)
    assert (text is None) == (said is None)
    assert said is None or said in (text or "")
    assert not_said is None or not_said not in (text or "")


def test_a_window_that_another_profiler_cancelled_holds_no_trace() -> None:
    window = ProfilerWindow(lead=0, steps=1, device="cpu", stacks=False)
    window.start()
    other = torch.profiler.profile()
    other.start()
    other.stop()
    window.stop()
    assert not window.holds_trace


def test_a_profile_function_that_is_set_in_a_window_stays() -> None:
    def own(*_: object) -> None:
        pass

    window = ProfilerWindow(lead=0, steps=1, device="cpu", stacks=True)
    window.start()
    sys.setprofile(own)
    window.stop()
    found = sys.getprofile()
    sys.setprofile(None)
    assert found is own
