"""A script that is stopped ends soon, whatever it has left behind: threads, processes, timers.

Each form trains forty steps without us. Recorded and stopped, it prints a beginning of what it
prints without us, ends with 0, and within seconds of the report.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.record.runs import run_jobs, tool

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

FORMS = {
    # The main thread waits for the one that trains.
    "queue": "q = queue.Queue()\nthreading.Thread(target=lambda: (train(), q.put(1)), daemon=True)"
    ".start()\nq.get()\nprint('done')",
    "event": "e = threading.Event()\nthreading.Thread(target=lambda: (train(), e.set())).start()\n"
    "e.wait()\nprint('done')",
    "condition": "c = threading.Condition()\ndone = []\ndef work():\n    train()\n    with c:\n"
    "        done.append(1)\n        c.notify()\nthreading.Thread(target=work).start()\n"
    "with c:\n    c.wait_for(lambda: done)\nprint('done')",
    "joined": "in_thread().join()\nprint('done')",
    "not joined": "in_thread()",
    "future": "with ThreadPoolExecutor(1) as pool:\n    pool.submit(train).result()\nprint('done')",
    "sleeps": "t = in_thread(daemon=True)\nwhile t.is_alive():\n    time.sleep(100)",
    "pipe": "r, w = os.pipe()\nthreading.Thread(target=lambda: (train(), os.write(w, b'x')), "
    "daemon=True).start()\nos.read(r, 1)\nprint('done')",
    # Threads that are no daemons.
    "listener": "q = queue.Queue()\nthreading.Thread(target=listen, args=(q,)).start()\ntrain()\n"
    "q.put(None)",
    "timer": "t = threading.Timer(600, print)\nt.start()\ntrain()\nt.cancel()",
    "pool": "q = queue.Queue()\npool = ThreadPoolExecutor(1)\npool.submit(listen, q)\ntrain()\n"
    "q.put(None)",
    "loop": "stop = threading.Event()\ndef beat():\n    while not stop.is_set():\n"
    "        time.sleep(0.05)\nthreading.Thread(target=beat).start()\ntrain()\nstop.set()",
    "producer": "q = queue.Queue(2)\ndef fill():\n    for number in range(40):\n"
    "        q.put(number)\nthreading.Thread(target=fill).start()\ntrainer = Trainer()\n"
    "for _ in range(40):\n    say(q.get(), trainer.step())",
    # What cleans up waits.
    "finally": "q = queue.Queue()\nt = threading.Thread(target=listen, args=(q,))\nt.start()\n"
    "try:\n    train()\n    q.put(None)\nfinally:\n    t.join()",
    "pool around": "q = queue.Queue()\nwith ThreadPoolExecutor(1) as pool:\n"
    "    pool.submit(listen, q)\n    train()\n    q.put(None)",
    # Child processes that listen for the end.
    "process": "c = multiprocessing.get_context('fork')\nq = c.Queue()\n"
    "p = c.Process(target=listen, args=(q,))\np.start()\ntrain()\nq.put(None)\np.join()",
    "connection": "c = multiprocessing.get_context('fork')\nours, theirs = c.Pipe()\ndef wait():\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    theirs.recv()\n"
    "p = c.Process(target=wait)\np.start()\ntrain()\nours.send(1)\np.join()",
    "two processes": "c = multiprocessing.get_context('fork')\nq = c.Queue()\n"
    "all = [c.Process(target=listen, args=(q,)) for _ in range(2)]\n[p.start() for p in all]\n"
    "train()\n[q.put(None) for _ in all]\n[p.join() for p in all]",
    "process joined in finally": "c = multiprocessing.get_context('fork')\nq = c.Queue()\n"
    "p = c.Process(target=listen, args=(q,))\np.start()\ntry:\n    train()\n    q.put(None)\n"
    "finally:\n    p.join()",
    "process at exit": "c = multiprocessing.get_context('fork')\ne = c.Event()\n"
    "p = c.Process(target=e.wait)\np.start()\ntrain()\ne.set()",
    "ended child": "c = multiprocessing.get_context('fork')\n"
    "p = c.Process(target=time.sleep, args=(600,))\np.start()\np.terminate()\np.join()\n"
    "print(p.exitcode, signal.getsignal(signal.SIGTERM))\ntrain()",
    # The processes train, and the main one waits for their answers.
    "answer": "c = multiprocessing.get_context('fork')\nq = c.Queue()\ndef work():\n    train()\n"
    "    q.put(1)\np = c.Process(target=work)\np.start()\nq.get()\np.join()",
    # Timers that would strike the report.
    "alarm": "signal.signal(signal.SIGALRM, lambda *_: os._exit(9))\nsignal.alarm(3600)\ntrain()\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.0)",
    "itimer": "def late(*_):\n    raise RuntimeError('late')\n"
    "signal.signal(signal.SIGPROF, late)\nsignal.setitimer(signal.ITIMER_PROF, 3600)\ntrain()",
    "dump": "faulthandler.dump_traceback_later(3600, exit=True)\ntrain()\n"
    "faulthandler.cancel_dump_traceback_later()",
    # What waits for a while, as a loader of torch's does for a worker, goes on.
    "waits": "c = multiprocessing.get_context('fork')\n"
    "p = c.Process(target=time.sleep, args=(600,), daemon=True)\np.start()\n"
    "atexit.register(print, 'left')\ntry:\n    train()\nfinally:\n    p.join(5)",
    # It catches whatever would stop it, and goes on.
    "swallows": "trainer = Trainer()\nfor number in range(200):\n    try:\n"
    "        say(number, trainer.step())\n    except BaseException:\n        pass\nprint('done')",
    # What is left for the end is done.
    "at exit": "atexit.register(print, 'left')\ntrain(40)",
}
# What must still be printed, whatever else is not.
LAST = {"waits": "left\n", "at exit": "left\n"}
Ended = tuple[int, float, float | None]
SAMPLE = {
    *("queue", "not joined", "listener", "finally", "process", "connection", "alarm"),
    *("swallows", "waits", "at exit", "ended child"),
}


def run_forms(names: list[str], folder: Path) -> dict[str, list[Ended]]:
    """Status, seconds, and seconds from the report on, of each without us and recorded."""
    jobs: list[dict[str, Any]] = []
    for name in names:
        script, output = folder / f"{name}.py", folder / f"{name}.d"
        script.write_text(BEGIN + FORMS[name] + "\n")
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
    chosen = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    folder = tmp_path_factory.mktemp("endings")
    return folder, run_forms([name for name in FORMS if name in chosen], folder)


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
    words = ["run", "--steps", "1", "--warmup", "1", "--timing-steps", "1", "-o", "out", "s.py"]
    ended = tool(tmp_path, *words, PYTHONPATH=str(Path(__file__).parent / "scripts"))
    assert ended.returncode in (status, -(status - 128)), ended.stderr
    assert "E702" not in ended.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert not any("bug" in warning for warning in result["warnings"])
