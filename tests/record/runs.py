"""Running real scripts under the recorder in processes of their own, and reading what they left."""

import atexit
import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import pytest
from msgspec.structs import replace

import recompute_scan
from recompute_scan.annotations import RegionAnnotation, parse_recompute, parse_region
from recompute_scan.result.run_record import RunInfo, read_run_info, run_info_name
from tests.present import present

# The shortest recording that has everything.
QUICK = ("--steps", "1", "--warmup", "1", "--timing-steps", "1")
# What the recorder says in a log: the first word, each phase, and that it has stopped the script.
OURS = re.compile(r"recompute-scan: (step \d+ of |\d\d:\d\d:\d\d step |stopped the script after)")
DRIVER = Path(__file__).with_name("driver.py")
ZYGOTE = DRIVER.with_name("zygote.py")
Ran = subprocess.CompletedProcess[str]
TORCHRUN = (
    sys.executable,
    *("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
    "--nproc-per-node=2",
)

# Put in front of test scripts that train: a layer that counts how often its forward runs.
LAYERS = """\
import functools, json, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.manual_seed(0)
RUNS = {"forward": 0, "in_backward": 0}

class Layer(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        backward = torch._C._current_graph_task_id() != -1
        RUNS["in_backward" if backward else "forward"] += 1
        return self.dropout(self.down(torch.relu(self.up(x)))) + x

"""


@dataclass(frozen=True)
class Trace:
    """The ranges of a trace that the recorder put there."""

    events: list[dict[str, Any]]

    def ranges(self, prefix: str) -> list[dict[str, Any]]:
        found = [e for e in self.events if e.get("ph") == "X" and e["name"].startswith(prefix)]
        return sorted(found, key=lambda e: float(e["ts"]))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.ranges("ProfilerStep#")

    @property
    def regions(self) -> list[RegionAnnotation]:
        annotations = [parse_region(e["name"]) for e in self.ranges("recompute_scan.region")]
        assert None not in annotations
        return [annotation for annotation in annotations if annotation is not None]

    @property
    def recomputes(self) -> list[int]:
        calls = [parse_recompute(e["name"]) for e in self.ranges("recompute_scan.recompute")]
        assert None not in calls
        return [call for call in calls if call is not None]


@dataclass(frozen=True)
class Recorded:
    """What a recorded script printed, how it ended, and the folder it left.

    `told` is what the recorder said, which `stderr` is without.
    """

    status: int
    stdout: str
    stderr: str
    output: Path
    told: str = ""

    @property
    def info(self) -> RunInfo:
        return self.account(0)

    def account(self, rank: int) -> RunInfo:
        return read_run_info(self.output / run_info_name(rank))

    def trace(self, name: str = "trace-rank0.json.gz") -> Trace:
        with gzip.open(self.output / name) as file:
            return Trace(json.load(file)["traceEvents"])


def script_lines(stderr: str) -> list[str]:
    """What the script wrote, without what the recorder said."""
    return [line for line in stderr.splitlines() if not OURS.match(line)]


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    folder.mkdir(exist_ok=True)
    path.write_text(dedent(text))
    return path


def record_script(
    folder: Path,
    text: str,
    *args: str,
    steps: int = 2,
    warmup: int = 2,
    timing_steps: int = 0,
    launcher: tuple[str, ...] = (),
    **options: Any,
) -> Recorded:
    """Write the script as ``train.py`` into the folder, record it there, wait for its end."""
    write_script(folder, text)
    options |= {"steps": steps, "warmup": warmup, "timing_steps": timing_steps}
    return record_target(folder, "train.py", *args, launcher=launcher, **options)


def record_target(
    folder: Path, target: str, *args: str, launcher: tuple[str, ...] = (), **options: Any
) -> Recorded:
    """Record it in the folder; without a launcher in a process that has imported torch before."""
    if launcher:
        command = recording_command(folder, target, *args, launcher=launcher, **options)
        done = run_plain(folder, *command[1:])
    else:
        chosen = {"output": str(folder / "out"), **options, "target": target, "args": list(args)}
        done = _forked({"script": str(folder / target), "options": chosen})
    lines = done.stderr.splitlines(keepends=True)
    told = [line for line in lines if OURS.match(line)]
    stderr = "".join(line for line in lines if line not in told)
    return Recorded(done.returncode, done.stdout, stderr, folder / "out", "".join(told))


def _forked(job: dict[str, Any], **environment: str) -> Ran:
    with TemporaryDirectory() as place:
        files = {name: f"{place}/{name}" for name in ("out", "err")}
        job = {**job, **files, "environment": {**plain_environment(), **environment}}
        zygote = _zygote()
        present(zygote.stdin).write(json.dumps(job) + "\n")
        present(zygote.stdin).flush()
        status = json.loads(present(zygote.stdout).readline())[0]
        out, err = (Path(file).read_text() for file in files.values())
        return subprocess.CompletedProcess([], status, out, err)


def forked_tool(folder: Path, *words: str | Path, **environment: str) -> Ran:
    """The command line as ``tool`` runs it, in a process that has imported torch before."""
    return _forked({"folder": str(folder), "command": [*map(str, words)]}, **environment)


def forked_script(script: str | Path, *args: str) -> Ran:
    """The script as Python runs it in its folder, in a process that has imported torch before."""
    return _forked({"script": str(script), "options": None, "args": args})


@cache
def _zygote() -> subprocess.Popen[str]:
    """A process that forks recordings until this one ends."""
    zygote = subprocess.Popen(
        [sys.executable, str(ZYGOTE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
    atexit.register(zygote.communicate)
    return zygote


def recording_command(
    folder: Path, target: str, *args: str, launcher: tuple[str, ...] = (), **options: Any
) -> list[str]:
    chosen = {"is_module": False, "output": str(folder / "out"), **options}
    chosen.update(target=target, args=list(args))
    python = launcher or (sys.executable,)
    return [*python, str(DRIVER), json.dumps(chosen)]


def run_plain(folder: Path, *command: str | Path, **environment: str) -> Ran:
    """Python in this folder, with these variables besides."""
    return run_within(500, folder, *command, **environment)


def run_within(timeout_s: float, folder: Path, *command: str | Path, **environment: str) -> Ran:
    """The same with another limit than that of most."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**plain_environment(), **environment},
    )


def tool(folder: Path, *words: str | Path, **environment: str) -> Ran:
    """The command line in this folder, with these variables besides."""
    return run_plain(folder, "-m", "recompute_scan", *words, **environment)


def run_jobs(
    jobs: list[dict[str, Any]], folder: Path, abreast: int = 1
) -> list[tuple[int, float, float | None]]:
    """What ``zygote.py`` prints of each job; the folder gets the list of them."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, str(ZYGOTE), str(path), str(abreast)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=plain_environment()
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def chosen_names(request: pytest.FixtureRequest) -> set[object]:
    """Values of ``name`` in the tests of this session: what a fixture of many has to run."""
    return {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }


def run_info(rank: int = 0, **changed: Any) -> RunInfo:
    """What a complete recording of one rank leaves, but for what is changed."""
    usual = RunInfo(rank, 1, "complete", 0, "cpu", 1, (1.5,), 1, f"trace-rank{rank}.json.gz", None)
    return replace(usual, **changed)


def plain_environment() -> dict[str, str]:
    dropped = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH", "PYTHONSAFEPATH"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    # The package that is tested here, wherever it was imported from.
    source = str(Path(recompute_scan.__file__).parents[1])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
