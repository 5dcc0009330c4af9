"""A small job broken in every way that jobs break: what is to be reported, and what kept.

The job is ``small_job.py`` under ``recompute-scan run``: one step to warm up, two timed, one to
warm the profiler up, two profiled, one with stacks. The full disk and the read-only folder are
mounts of their own, and need root.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from recompute_scan.report.finding_words import UNKNOWN_CAUSE

JOB = str(Path(__file__).with_name("small_job.py"))
TOOL = (sys.executable, "-m", "recompute_scan")
OPTIONS = ("--steps", "2", "--warmup", "1", "--timing-steps", "2")
TIMEOUT_S = 200
# Steps of the job, from 0: in the timed ones, the second profiled one, and the one with stacks.
TIMED, PROFILED, STACKS = "2", "5", "6"


@dataclass(frozen=True)
class Fault:
    """One way to break the job.

    Attributes:
        name: What was broken.
        job: Arguments of the job.
        status: What the tool must end with.
        said: What its output must match.
        traces: Ranks whose trace must be there.
        timed: Ranks whose step times must be.
        options: Further options of ``run``.
        launcher: What stands before the tool, if anything.
        act: What to do to the started process, once steps were timed.
        mount: Options for a mount of its own as the output folder.
        after: A command of the tool that tells what was recorded, where the run cannot.
    """

    name: str
    job: tuple[str, ...]
    status: int
    said: str
    traces: tuple[int, ...]
    timed: tuple[int, ...] = (0, 1)
    options: tuple[str, ...] = ("--nproc-per-node", "2")
    launcher: tuple[str, ...] = TOOL
    act: Callable[[int], None] | None = None
    mount: str | None = None
    after: tuple[str, ...] = ()


def fault(kind: str, step: str = STACKS, rank: str = "1") -> tuple[str, ...]:
    return "--fault", kind, "--rank", rank, "--step", step


def to_tool(number: int) -> Callable[[int], None]:
    return lambda process: os.kill(process, number)


def to_all(number: int) -> Callable[[int], None]:
    return lambda process: os.killpg(process, number)


SLOW = ("--sleep", "0.05")
TWO = ("--nproc-per-node", "2")
LONG = (*TWO, "--steps", "100")
BELOW = ("--", "torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
CLOSED = ("sh", "-c", 'exec "$@" >&-', "sh", *TOOL)
WORDLESS = r"Rank 1\s+ended\s+without a message after \d steps?"
AT_ONCE = r"Rank 1\s+ended\s+without a message"
DOUBLED = "Verdict: doubled"
EXEC = r"replaces its process with another program(?s:.)*another program"
OUTSIDE = "The run was ended from outside"
BOTH = (0, 1)


def single(name: str, kind: str, step: str, said: str, status: int = 0) -> Fault:
    """A fault of a job of one process, which keeps its trace and its step times."""
    job = fault(kind, step, rank="0") if kind else ()
    return Fault(name, job, status, said, (0,), timed=(0,), options=())


def ended(name: str, act: Callable[[int], None], status: int, said: str = "") -> Fault:
    """A job of two ranks that gets a signal while it is profiled."""
    return Fault(name, SLOW, status, said, (), options=LONG, act=act)


FAULTS = (
    Fault("kill -9 of a rank at once", fault("kill", "0"), 137, AT_ONCE, (), timed=()),
    Fault("kill -9 of a rank while timing", fault("kill", TIMED), 137, WORDLESS, (), timed=()),
    Fault("kill -9 of a rank while profiling", fault("kill", PROFILED), 137, WORDLESS, ()),
    Fault("kill -9 of a rank, trace written", fault("kill"), 137, WORDLESS, BOTH),
    Fault("the same under `run -- torchrun`", fault("kill"), 1, WORDLESS, BOTH, options=BELOW),
    Fault(
        "the same, ranks started with spawn", ("--spawn", "2", *fault("kill")), 1,
        WORDLESS, BOTH, options=(),
    ),
    replace(
        single("kill -9 of a single process", "kill", STACKS, DOUBLED, 137),
        after=("analyze", "out"),
    ),
    Fault("os._exit(5) in a rank", fault("os-exit"), 5, "Rank 1 ended itself", BOTH),
    Fault("a rank raises", fault("raise"), 1, "Rank 1 raised ValueError", BOTH),
    Fault("a rank calls sys.exit(3)", fault("exit"), 3, "Rank 1 ended itself", BOTH),
    Fault("a rank ends early", fault("end"), 1, r"rank\s+1\s+had\s+ended", BOTH),
    Fault(
        "a rank hangs", fault("hang"), 124, "The run hung", BOTH, options=(*TWO, "--timeout", "6")
    ),
    single("the script runs another program with exec", "exec", STACKS, EXEC),
    single("an import hook of the script raises", "no-import", TIMED, DOUBLED),
    replace(single("standard output is closed", "", "", ""), launcher=CLOSED),
    ended("Ctrl-C to the whole job", to_all(signal.SIGINT), 130),
    ended("SIGINT to the tool alone", to_tool(signal.SIGINT), 130),
    ended("SIGTERM to the tool", to_tool(signal.SIGTERM), 143, OUTSIDE),
    Fault("the disk is full, stacks don't fit", (), 0, DOUBLED, BOTH, mount="size=480k"),
    Fault("the disk is full, the report doesn't fit", (), 2, DOUBLED, BOTH, mount="size=280k"),
    Fault("the disk is full", (), 2, "why: No space left", (), timed=(), mount="size=4k"),
    Fault("the output folder is read-only", (), 2, "why: Read-only", (), timed=(), mount="ro"),
)  # fmt: skip


# The step in which the job ends early, by what it is for; before it the first one is counted.
PHASES = {
    "timed": "2",
    "warming the profiler": "3",
    "profiled": "5",
    "stacks": "6",
    "compared": "7",
}
ENDS = {"interrupt": 130, "terminate": 143, "end": 0, "raise": 1, "kill": 137}
EARLY = tuple(
    Fault(
        f"{kind}, {phase}", (*SLOW, *fault(kind, step, "0")), status,
        DOUBLED, (0,) * (step > "4"), (0,), options=(),
        after=("analyze", "out") if kind == "kill" and step > "5" else (),
    )
    for kind, status in ENDS.items()
    for phase, step in PHASES.items()
    if kind != "kill" or step > "5"  # else nobody is left to report, and the record is there
)  # fmt: skip


def break_job(one: Fault) -> tuple[str, tuple[str, ...]]:
    """What is wrong, empty where nothing is, and the row's cells."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        with _mounted(out, one.mount) if one.mount else nullcontext():
            status, said = _run(one, folder, out)
            if one.after:
                done = subprocess.run(
                    [*TOOL, *one.after], cwd=folder, capture_output=True, text=True, check=False
                )
                said += done.stdout
            traces = _ranks(out, "trace-rank*.json.gz")
            timed = _timed(out)
            left = [path.name for path in out.iterdir() if ".part" in path.name]
    wrong = []
    if status != one.status:
        wrong.append(f"status {status}, not {one.status}")
    if re.search(one.said, said) is None:
        wrong.append(f"nothing that matches {one.said!r}")
    if not set(one.traces) <= set(traces) or not set(one.timed) <= set(timed):
        wrong.append(f"kept: traces {traces}, step times {timed}")
    if left:
        wrong.append(f"left: {left}")
    cells = (str(status), _reported(said), _listed(traces), _listed(timed))
    return f"{one.name}: {'; '.join(wrong)}\n{said[-3000:]}" if wrong else "", cells


def _run(one: Fault, folder: Path, out: Path) -> tuple[int, str]:
    own = [word for word in one.options if one.options is not BELOW]
    below = list(one.options) if one.options is BELOW else []
    command = [*one.launcher, "run", *OPTIONS, *own, "-o", "out", *below, JOB, *one.job]
    with (folder / "said").open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(),
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A shell's background jobs ignore it, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        try:
            if one.act is not None:
                _when_timed(process, out)
                one.act(process.pid)
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            alive = _end_session(process.pid)
            process.wait()
    said = (folder / "said").read_text(errors="replace")
    if alive:
        return status, f"{said}\nLEFT RUNNING: {alive}"
    return (128 - status if status < -1 else status), said


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def _when_timed(process: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(_timed(out)) < 2 and process.poll() is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    time.sleep(1)  # into the profiled steps


def _end_session(session: int) -> int:
    """Number of processes that were still there, which are killed."""
    alive = 0
    for _ in range(20):
        alive = _alive(session)
        if not alive:
            return 0
        time.sleep(0.1)
    os.killpg(session, signal.SIGKILL)
    return alive


def _alive(group: int) -> int:
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += int(fields[2]) == group and fields[0] != "Z"
    return found


def _ranks(out: Path, pattern: str) -> list[int]:
    return sorted(int(re.sub(r"\D", "", path.name)) for path in out.glob(pattern))


def _timed(out: Path) -> list[int]:
    records = [*out.glob("run-rank*.json"), *out.glob("so-far-rank*.json")]
    told = [json.loads(path.read_text()) for path in records]
    return sorted({one["rank"] for one in told if one["timed_steps_ms"]})


def _reported(said: str) -> str:
    """The failure in a sentence, and the verdict, as printed."""
    parts = []
    for begin, end in (
        ("Run: ", "\n\n"),
        ("recompute-scan: ", "[E"),
        ("why: ", "\n"),
        ("Verdict: ", "\n"),
    ):
        at = said.find(begin)
        if at >= 0:
            text = " ".join(said[at:].partition(end)[0].split()).replace("|", "/")
            parts.append(text.replace(UNKNOWN_CAUSE, ""))
    return "; ".join(part.strip() for part in parts) or "nothing"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
