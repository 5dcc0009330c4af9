"""A script that is stopped ends soon, whatever it has left behind: threads, processes, timers.

Each form trains forty steps without us. Recorded and stopped, it prints a beginning of what it
prints without us, ends with 0, and within seconds of the report.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.record.runs import QUICK, chosen_names, forked_tool, run_jobs

BEGIN = """\
import atexit, faulthandler, multiprocessing, os, queue, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from tiny import Trainer, say

def train(steps=40):
    trainer = Trainer()
    for number in range(steps):
        say(number, trainer.step())

def listen(waiting):
    while waiting.get() is not None:
        pass

def in_thread(**how):
    thread = threading.Thread(target=train, **how)
    thread.start()
    return thread
"""

FORMS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("endings.yaml").read_text("utf-8"))
# What must still be printed, whatever else is not.
LAST = {"waits": "left\n", "at exit": "left\n"}
Ended = tuple[int, float, float | None]
# One of each kind.
SAMPLE = {"queue", "listener", "finally", "process", "alarm", "swallows", "waits", "at exit"}


def run_forms(names: list[str], folder: Path) -> dict[str, list[Ended]]:
    """Status, seconds, and seconds from the report on, of each without us and recorded."""
    jobs: list[dict[str, Any]] = []
    for name in names:
        script, output = folder / f"{name}.py", folder / f"{name}.d"
        script.write_text(BEGIN + FORMS[name])
        few = {"steps": 1, "warmup": 1, "timing_steps": 1, "output": str(output)}
        for number, options in enumerate((None, few)):
            files = {end: str(folder / f"{name}{number}.{end}") for end in ("out", "err")}
            jobs.append({"script": str(script), "options": options, **files})
        jobs[-1]["report"] = str(output / "done")
    found = run_jobs(jobs, folder, 3)
    return dict(
        zip(names, ([*pair] for pair in zip(found[::2], found[1::2], strict=True)), strict=True)
    )


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[Ended]]]:
    folder = tmp_path_factory.mktemp("endings")
    return folder, run_forms([name for name in FORMS if name in chosen_names(request)], folder)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in FORMS],
)
def test_a_stopped_script_ends_soon(name: str, ended: tuple[Path, dict[str, list[Ended]]]) -> None:
    folder, found = ended
    plain, recorded = found[name]
    err = (folder / f"{name}1.err").read_text()
    assert plain[0] == 0
    assert recorded[0] == 0, err
    before, out = ((folder / f"{name}{which}.out").read_text() for which in (0, 1))
    last = LAST.get(name, "")
    assert out.endswith(last)
    assert len(out) > len(last)
    assert before.startswith(out.removesuffix(last))
    assert len(out) < len(before)  # it was stopped
    assert "Traceback" not in err
    account = json.loads((folder / f"{name}.d" / "run-rank0.json").read_text())
    assert account["bug"] is None
    assert account["status"] == "complete"
    # Six seconds in which nothing moves, one for child processes, and what Python takes to end,
    # which on a busy machine is most of what it takes without us.
    assert recorded[2] is not None
    assert recorded[2] < 13 + plain[1]


ABRUPT = {
    "SIGTERM at its last statement": ("train(1)\nos.kill(os.getpid(), signal.SIGTERM)", 143),
    "standard streams closed": (
        "t = Trainer()\nos.close(1)\nos.close(2)\nfor _ in range(40):\n    t.step()",
        0,
    ),
}


@pytest.mark.parametrize("name", ABRUPT)
def test_an_abrupt_end_has_its_status_and_a_report(name: str, tmp_path: Path) -> None:
    text, status = ABRUPT[name]
    script = tmp_path / "s.py"
    script.write_text(BEGIN + text + "\n")
    ended = forked_tool(tmp_path, "run", *QUICK, "-o", "out", "s.py")
    assert ended.returncode in (status, -(status - 128)), ended.stderr
    assert "E702" not in ended.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert not any("bug" in warning for warning in result["warnings"])
