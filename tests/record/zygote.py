"""Runs scripts in forks of one process that has torch already: ``python zygote.py JOBS_JSON N``.

N run at once; without arguments, each line of the input is a job. A job is run as ``python SCRIPT``
would run it, or recorded, or is a command line of ours; in each case the process then ends by
itself, as the interpreter ends.
For each, a line of JSON is printed: its exit status, negative for a signal, the seconds that it
took, and those behind its report, ``null`` without one. A job's file ``report`` is made when its
report would be printed.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed
from torch.utils.checkpoint import checkpoint

LIMIT_S = 120

# Once for all: what torch imports with the first step takes longer than any of the scripts.
_weights = torch.nn.Linear(2, 2)
_optimizer = torch.optim.SGD(_weights.parameters(), lr=0.1)
checkpoint(_weights, torch.ones(2, 2), use_reentrant=False).sum().backward()
_optimizer.step()
del _weights, _optimizer

from recompute_scan.errors import ScanError
from recompute_scan.record.children import record
from recompute_scan.record.options import RunOptions

# The scripts of tests import `tiny`, wherever they are.
sys.path.append(str(Path(__file__).parent / "scripts"))


class _Child:
    """A job that runs: its process, when it began, and when its report came."""

    def __init__(self, pid, job):
        self.pid, self.report = pid, job.get("report")
        self.began, self.reported = time.monotonic(), None

    def ended(self):
        """What is printed of it, once it has ended."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        now = time.monotonic()
        if self.reported is None and self.report and Path(self.report).exists():
            self.reported = now
        if now > self.began + LIMIT_S or done:
            try:
                os.killpg(self.pid, signal.SIGKILL)  # or what it may have left
            except ProcessLookupError:
                pass
        if not done:
            return None
        behind = None if self.reported is None else now - self.reported
        return os.waitstatus_to_exitcode(status), now - self.began, behind


def _run(jobs, abreast):
    """The job, in its own process; ``None`` in this one, when all have been run."""
    results, running, number = {}, {}, -1
    for number, job in enumerate(jobs):
        child = os.fork()
        if child == 0:
            return job
        running[number] = _Child(child, job)
        _collect(running, results, abreast - 1)
    _collect(running, results, 0)
    return None


def _collect(running, results, left):
    """Waits until so few run, and prints what has ended in the order of the jobs."""
    while len(running) > left:
        for number, child in list(running.items()):
            if (ended := child.ended()) is not None:
                results[number] = ended
                del running[number]
        for number in sorted(results):
            if all(number < other for other in running):
                print(json.dumps(results.pop(number)), flush=True)
        if len(running) > left:
            time.sleep(0.02)


def _become(job):
    os.setsid()
    for number, place in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        file = os.open(place, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    if "environment" in job:
        os.environ.clear()
        os.environ.update(job["environment"])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1)
    os.chdir(job["folder"])


gc.collect()
gc.freeze()  # each recording looks through all objects
# A file of jobs and how many run at once, or a job in each line of the input.
if sys.argv[1:]:
    job = _run(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
else:
    job = _run(map(json.loads, sys.stdin), 1)
if job is not None:
    job.setdefault("folder", str(Path(job.get("script", ".")).parent))
    _become(job)
    name = Path(job.get("script", "")).name
    if "command" in job:
        from recompute_scan.cli import main

        sys.argv[:] = ["recompute-scan", *job["command"]]
        sys.path[0] = str(Path(main.__code__.co_filename).parents[2])
        sys.exit(main())
    elif job["options"] is None:
        gc.unfreeze()  # this module's names are the script's: let its files be closed at the end
        sys.argv[:] = [name, *job.get("args", ())]
        sys.path[0] = str(Path.cwd())
        __file__ = str(Path.cwd() / name)
        exec(compile(Path(name).read_text(), __file__, "exec", dont_inherit=True))
    else:
        options = {"target": name, "is_module": False, "args": (), **job["options"]}
        options["args"], options["output"] = tuple(options["args"]), Path(options["output"])
        on_exit = (lambda _: Path(job["report"]).touch()) if "report" in job else None
        try:
            info = record(RunOptions(**options), on_exit=on_exit)
        except ScanError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_status)
        if on_exit is not None:
            on_exit(info)
        sys.exit(info.exit_status)
