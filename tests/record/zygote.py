"""Runs scripts in forks of one process that has torch already: ``python zygote.py JOBS_JSON``.

A job is run as ``python SCRIPT`` would run it, or recorded; in either case the process then ends by
itself, as the interpreter ends. For each, a line of JSON is printed: its exit status, negative for
a signal, the seconds that it took, and those behind its report, ``null`` without one. A job's file
``report`` is made when its report would be printed.
"""

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

from recompute_scan.record.children import record
from recompute_scan.record.options import RunOptions

# The scripts of tests import `tiny`, wherever they are.
sys.path.append(str(Path(__file__).parent / "scripts"))


def _wait(child, report):
    began, reported = time.monotonic(), None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        now = time.monotonic()
        if reported is None and report and Path(report).exists():
            reported = now
        if done:
            behind = None if reported is None else now - reported
            return os.waitstatus_to_exitcode(status), now - began, behind
        if now > began + LIMIT_S:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)


def _become(job):
    os.setsid()
    for number, place in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        file = os.open(place, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1)
    os.chdir(Path(job["script"]).parent)


job = None
for one in json.loads(Path(sys.argv[1]).read_text()):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        job = one
        break
    print(json.dumps(_wait(child, one.get("report"))), flush=True)
    try:
        os.killpg(child, signal.SIGKILL)  # what it may have left
    except ProcessLookupError:
        pass
if job is not None:
    _become(job)
    name = Path(job["script"]).name
    if job["options"] is None:
        sys.argv[:] = [name]
        sys.path[0] = str(Path.cwd())
        __file__ = str(Path.cwd() / name)
        exec(compile(Path(name).read_text(), __file__, "exec", dont_inherit=True))
    else:
        job["options"]["output"] = Path(job["options"]["output"])
        report = Path(job["report"]) if "report" in job else None
        on_exit = None if report is None else lambda _: report.touch()
        info = record(RunOptions(name, False, (), **job["options"]), on_exit=on_exit)
        if on_exit is not None:
            on_exit(info)
        sys.exit(info.exit_status)
