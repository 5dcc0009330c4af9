"""Every launcher that the documentation names: how it starts an example, and what must come out.

The doubled and the repaired Llama of ``examples/`` are trained under each, unchanged;
``counted_example.py`` counts how often a layer's forward runs in the backward pass, and the verdict
must say the same. Two nodes are network namespaces, and need root.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

JOB = str(Path(__file__).with_name("counted_example.py"))
OPTIONS = ("--steps", "1", "--warmup", "1", "--timing-steps", "1")
RUN = (sys.executable, "-m", "recompute_scan", "run", *OPTIONS)
TIMEOUT_S = 300
EXPECTED = {"doubled": ("doubled", 2.0), "repaired": ("full", 1.0)}
# The nodes' network: two ends of one cable.
NODES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Launcher:
    """One way to start an example.

    Attributes:
        name: The command, shortened.
        processes: How many run it.
        commands: Made from the example and a free port; one a node.
        needs: A program that must be there.
        nodes: Whether each command has a network namespace of its own.
    """

    name: str
    processes: int
    commands: Callable[[str, int], list[list[str]]]
    needs: str = sys.executable
    nodes: bool = False


@dataclass(frozen=True)
class Answer:
    """What one launch gave, beside what was counted."""

    verdict: str
    recomputes: float | None
    ranks: tuple[int, ...]
    counted: tuple[float, ...]
    status: int
    reports: int
    error: str

    def right(self, example: str, processes: int) -> bool:
        verdict, recomputes = EXPECTED[example]
        return (
            (self.verdict, self.recomputes) == (verdict, recomputes)
            and self.counted == (recomputes,) * processes
            and self.ranks == tuple(sorted({0, processes - 1}))
            and (self.status, self.reports) == (0, 1)
        )


def alone(example: str, port: int) -> list[list[str]]:
    return [[*RUN, "-o", "out", JOB, example, "--port", str(port)]]


def own_launcher(processes: int) -> Callable[[str, int], list[list[str]]]:
    return lambda example, _: [
        [*RUN, "--nproc-per-node", str(processes), "-o", "out", JOB, example]
    ]


def module_of_torchrun(example: str, _: int) -> list[list[str]]:
    return [[*torchrun(2), "-m", "recompute_scan", "run", *OPTIONS, "-o", "out", JOB, example]]


def below(*launcher: str) -> Callable[[str, int], list[list[str]]]:
    return lambda example, port: [
        [*RUN, "-o", "out", "--", *launcher, JOB, example, "--port", str(port)]
    ]


def spawning(example: str, port: int) -> list[list[str]]:
    return [[*RUN, "-o", "out", JOB, example, "--spawn", "2", "--port", str(port)]]


def two_nodes(*, shared: bool) -> Callable[[str, int], list[list[str]]]:
    def commands(example: str, port: int) -> list[list[str]]:
        return [
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(node), "--nproc-per-node", "1"),
                *("--master-addr", NODES[0], "--master-port", str(port)),
                *("-m", "recompute_scan", "run", *OPTIONS),
                *("-o", "out" if shared or node == 0 else "other", JOB, example),
            ]
            for node in (0, 1)
        ]

    return commands


def torchrun(processes: int) -> tuple[str, ...]:
    return (
        *("torchrun", "--standalone", "--local-addr=127.0.0.1"),
        f"--nproc-per-node={processes}",
    )


ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
LAUNCHERS = (
    Launcher("run", 1, alone),
    Launcher("run --nproc-per-node 2", 2, own_launcher(2)),
    Launcher("run --nproc-per-node 4", 4, own_launcher(4)),
    Launcher("torchrun -m recompute_scan run", 2, module_of_torchrun, "torchrun"),
    Launcher("run -- torchrun", 2, below(*torchrun(2)), "torchrun"),
    Launcher("run -- accelerate launch", 2, below(*ACCELERATE), "accelerate"),
    Launcher("run -- deepspeed", 2, below("deepspeed", "--num_accelerators", "2"), "deepspeed"),
    Launcher("run -- mpirun", 2, below(*MPIRUN), "mpirun"),
    Launcher("run -- srun", 2, below("srun", "-n", "2", sys.executable), "srun"),
    Launcher("run, torch.multiprocessing.spawn", 2, spawning),
    Launcher("torchrun on 2 nodes, shared folder", 2, two_nodes(shared=True), "ip", nodes=True),
    Launcher("torchrun on 2 nodes, private folders", 2, two_nodes(shared=False), "ip", nodes=True),
)


def environment() -> dict[str, str]:
    """One thread a process, and the programs of this Python first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def launch(launcher: Launcher, example: str) -> Answer:
    """Start the example this way, wait for its end, read what it left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefixes: Sequence[Sequence[str]] = ((),)
        if launcher.nodes:
            prefixes = stack.enter_context(two_namespaces())
        started: list[subprocess.Popen[bytes]] = []
        for prefix, command in zip(prefixes, launcher.commands(example, free_port()), strict=True):
            log = stack.enter_context((folder / f"log{len(started)}").open("w+"))
            process = subprocess.Popen(
                [*prefix, *command], cwd=folder, env=environment(), stdout=log, stderr=log
            )
            started.append(stack.enter_context(process))
        try:
            status = max(process.wait(TIMEOUT_S) for process in started)
        except subprocess.TimeoutExpired:
            status = -1
            for process in started:
                process.kill()
        said = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log*")))
        return _answer(folder, status, said)


def _answer(folder: Path, status: int, said: str) -> Answer:
    result = {}
    if (folder / "out" / "result.json").exists():
        result = json.loads((folder / "out" / "result.json").read_text())
    truths = [json.loads(path.read_text()) for path in sorted(folder.glob("truth-rank*.json"))]
    return Answer(
        verdict=result.get("verdict", "none given"),
        recomputes=result.get("recompute_per_backward"),
        ranks=tuple(rank["rank"] for rank in result.get("ranks", ())),
        counted=tuple(one["in_backward"] / one["forward"] for one in truths),
        status=status,
        reports=said.count("Verdict: "),
        error=said[-2000:],
    )


def missing(launcher: Launcher) -> str | None:
    """Why it cannot be tried here."""
    if shutil.which(launcher.needs, path=environment()["PATH"]) is None:
        return f"not at hand: {launcher.needs} is not installed"
    if launcher.nodes and os.geteuid() != 0:
        return "not at hand: namespaces need root"
    return None


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def two_namespaces() -> Iterator[list[list[str]]]:
    """Two hosts with name, network and address of their own: what to put before a command."""
    names = [f"recompute-scan-{os.getpid()}-{node}" for node in (0, 1)]
    ends = [f"rs{os.getpid() % 100_000}n{node}" for node in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1])
        _ip("link", "set", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, NODES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [
            [
                *("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"),
                f'hostname node{node}; GLOO_SOCKET_IFNAME={end} exec "$0" "$@"',
            ]
            for node, (name, end) in enumerate(zip(names, ends, strict=True))
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
