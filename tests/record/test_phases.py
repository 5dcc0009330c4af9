"""What is recorded when, and what is kept when a script does not play along."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

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
STOP_AFTER = "train(100)\nprint('end')\n"

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


def test_keep_going_runs_to_the_end(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, LOOP + "train(9)\nprint('end')\n", keep_going=True)
    assert losses(recorded) == 9
    assert recorded.stdout.endswith("end\n")
    assert recorded.info.status == "complete"


def test_what_the_script_prints_is_what_it_prints_alone(tmp_path: Path) -> None:
    script = LOOP + "import warnings\nwarnings.warn('careful')\ntrain(9)\n"
    write_script(tmp_path, script)
    plain = run_plain(tmp_path, "train.py")
    recorded = record_target(tmp_path, "train.py", steps=2, keep_going=True)
    assert recorded.stdout == plain.stdout  # the losses too, to the last digit
    assert recorded.stderr == plain.stderr


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
    assert "stopped the script after its step 2 (--keep-going goes on)" in again.told


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


def test_an_exit_inside_a_layer_keeps_its_trace(tmp_path: Path) -> None:
    script = (
        LOOP
        + "def hook(*_):\n    if RUNS['forward'] > 8:\n        sys.exit(9)\n"
        + "model[0].register_forward_hook(hook)\n"
        + STOP_AFTER
    )
    recorded = record_script(tmp_path, script, steps=5)
    assert (recorded.status, recorded.info.exit_status) == (9, 9)
    assert (recorded.info.message or "").startswith("The script ended with exit status 9. ")
    assert recorded.info.profiled_steps == 2


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


def test_a_profiler_of_the_scripts_own(tmp_path: Path) -> None:
    script = LOOP + (
        "from torch.profiler import profile, schedule\n"
        "with profile() as first:\n    train(4)\n"
        "train(3)\n"
        "with profile() as second:\n    train(1)\n"
        "print(len(first.events()) > 0, len(second.events()) > 0)\n"
        "train(100)\n"
    )
    recorded = record_script(tmp_path, script, steps=6)
    said = [line for line in recorded.stderr.splitlines() if not line.startswith("USDT:")]
    assert (recorded.status, said) == (0, [])  # Kineto's lines are of the script's profilers
    assert "True True\n" in recorded.stdout
    assert recorded.info.status == "complete"
    assert len(recorded.trace().steps) == 6
    assert "a torch profiler itself" in " ".join(recorded.info.warnings)


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


def test_a_complete_recording_lacks_nothing() -> None:
    assert shortfall(Plan(3, 10, 5), Seen(made=20, profiled=5, stacks=True)) is None


def test_missing_stacks_alone() -> None:
    text = shortfall(Plan(3, 0, 5), Seen(made=8, profiled=5, stacks=False))
    assert text == (
        "The script made 8 optimizer steps; 9 were wanted. Only the Python stacks of the "
        "checkpoint calls are missing."
    )


def test_the_scripts_own_profiler_is_named_where_steps_were_enough() -> None:
    plan = Plan(2, 2, 3)
    text = shortfall(plan, Seen(made=80, profiled=0, stacks=False, waited=True))
    assert text is not None
    assert "torch profiler itself" in text
    assert "longer run" not in text
    short = shortfall(plan, Seen(made=4, profiled=0, stacks=False, waited=True))
    assert short is not None
    assert "longer run" in short
