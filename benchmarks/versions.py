"""Every torch from 2.1 on, each in an environment made for it: whether all is right there.

Each row of the table is one version, each column what was run under it: the examples alone and in
two processes, the order of a widely used recipe (``tests/versions/finetuning.py``), ``record()``,
the callback for Hugging Face's Trainer, the losses with and without `run`, those of a step that is
compiled, too, layers compiled with their checkpoint (``graphs``), ``--verify``, and the cases of
`accuracy`, marked and unmarked.

One environment is on the disk at a time: five to seven gigabytes up to torch 2.10, whose wheels
bring CUDA's libraries and run on a CPU too. What each check said is kept in
``build/versions/VERSION.json`` with the end of its output, and is not asked again.

  python -m benchmarks versions --only 2.2,newest   some of them
  python -m benchmarks versions --again             what was seen before, too

The status is 1 where one is not right.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks._environments import VERSIONS, Environment, Version
from benchmarks._frame import ROOT, Table, benchmark, some

KEPT = ROOT / "build" / "versions"
SCRIPTS = ROOT / "tests" / "versions"
OUTPUT = 4000
RESULT = "result.json"


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
Check = Callable[[Environment, str], tuple[bool, str]]
SMALL = ("--batch-size", "1", "--sequence-length", "32")
TOOL = ("-m", "recompute_scan", "run", "--steps", "2", "--warmup", "2", "--timing-steps", "2")


def recorded(
    script: Path,
    arguments: Sequence[str],
    expected: str,
    processes: int = 1,
    named: int | None = None,
) -> Check:
    """``run`` gives that answer with high confidence, and names as many lines as it should.

    Args:
        script: What is recorded.
        arguments: Its own.
        expected: ``doubled``, or ``full``.
        processes: How many torchrun starts.
        named: How many lines of the script asked for checkpoints; 2 where it is doubled.
    """

    def check(environment: Environment, folder: str) -> tuple[bool, str]:
        command = [environment.python, *(TWO if processes > 1 else ()), *TOOL]
        ran = environment.run([*command, "-o", "out", str(script), *arguments], folder=folder)
        result = _result(environment.scratch / folder / "out")
        sites = {
            checkpoint["call_site"]
            for region in result.get("regions", [])
            for checkpoint in region["checkpoints"]
        }
        recomputes = 2.0 if expected == "doubled" else 1.0
        lines = [site for site in sites if script.name in (site or "")]
        all_named = len(sites) == len(lines) == (named or int(recomputes))
        said = (result.get("verdict"), result.get("recompute_per_backward"))
        sure = result.get("confidence") == "high"
        good = said == (expected, recomputes) and all_named and sure and ran.status == 0
        return good, f"{said} {result.get('confidence')} {sorted(map(str, sites))}\n{ran.output}"

    return check


def recipe(*arguments: str) -> Check:
    """By ``run`` and from traces of the recipe's own profiler: doubled, as reported, or full.

    From transformers 5 on its switch is non-reentrant: both checkpoints are there, and the layers
    run again once.
    """

    def check(environment: Environment, folder: str) -> tuple[bool, str]:
        once = int(_about(environment)["transformers"].partition(".")[0]) >= 5
        expected = "full" if arguments or once else "doubled"
        named = 1 if arguments else 2
        good, said = recorded(RECIPE, arguments, expected, 2, named=named)(environment, folder)
        plain = environment.scratch / folder / "plain"
        plain.mkdir()
        own = (*arguments, "--steps", "6", "--profile", str(plain))
        environment.run([environment.python, *TWO, str(RECIPE), *own])
        analyze = ("-m", "recompute_scan", "analyze", str(plain), "--format", "json")
        told = environment.run([environment.python, *analyze, "--output", str(plain / RESULT)])
        result = _result(plain)
        answer = tuple(
            result.get(name) for name in ("verdict", "recompute_per_backward", "confidence")
        )
        right = answer == (expected, 2.0 if expected == "doubled" else 1.0, "high")
        return good and right, f"from its own traces: {answer}\n{said}\n{told.output}"

    return check


def prints(command: Sequence[str], last: str) -> Check:
    """A program ends well, and this is in the last line that it prints."""

    def check(environment: Environment, folder: str) -> tuple[bool, str]:
        ran = environment.run([environment.python, *command], folder=folder)
        lines = [line for line in ran.output.splitlines() if line.strip()]
        return ran.status == 0 and last in (lines or [""])[-1], ran.output

    return check


def same_losses(script: Path) -> Check:
    """Under ``run`` every loss has the bits that it has without, and nothing of ours fails."""

    def check(environment: Environment, folder: str) -> tuple[bool, str]:
        alone = environment.run([environment.python, str(script)], folder=folder)
        command = [environment.python, *TOOL, "--keep-going", "-o", "out", str(script)]
        under = environment.run(command, folder=folder)
        losses = [
            [line for line in ran.output.splitlines() if LOSSES.match(line)]
            for ran in (alone, under)
        ]
        same = losses[0] == losses[1] and len(losses[0]) > 0
        good = same and not alone.status and not under.status and "[E70" not in under.output
        return good, under.output

    return check


def verified(environment: Environment, folder: str) -> tuple[bool, str]:
    """``--verify`` takes the fix in memory, and the losses stay equal."""
    command = [environment.python, *TOOL, "--verify", "-o", "out", str(SCRIPTS / "loop.py")]
    ran = environment.run(command, folder=folder)
    measured = _result(environment.scratch / folder / "out").get("verified") or {}
    return measured.get("losses_equal") is True, f"{measured.get('outcome')}\n{ran.output}"


def graphs(*arguments: str) -> Check:
    """What the compiler recomputes is told, or before torch 2.10 that it is not, and since when."""
    expected = "doubled" if arguments else "full"

    def check(environment: Environment, folder: str) -> tuple[bool, str]:
        major, minor, *_ = _about(environment)["torch"].split(".")
        if (int(major), int(minor)) >= GRAPHS_NAME_CHECKPOINTS:
            return recorded(LAYERS, arguments, expected)(environment, folder)
        command = [environment.python, *TOOL, "-o", "out", str(LAYERS), *arguments]
        ran = environment.run(command, folder=folder)
        result = _result(environment.scratch / folder / "out")
        told = result.get("verdict") == "inconclusive" and "torch 2.10" in ran.output
        return told and ran.status == 0, f"{result.get('reason')}\n{ran.output}"

    return check


def accuracy(evidence: str) -> Check:
    """Every core and distributed case, and each answer right."""

    def check(environment: Environment, folder: str) -> tuple[bool, str]:
        # Times as this version writes them.
        chosen = ("--group", "core,distributed", "--evidence", evidence, "--times", "ns")
        command = [environment.python, "-m", "benchmarks", "accuracy", *chosen]
        ran = environment.run(command, folder=folder, variables={"PYTHONPATH": str(ROOT)})
        wrong = [line for line in ran.output.splitlines() if line.endswith(" NO")]
        end = ran.output.rstrip().rpartition("\n")[2]
        return ran.status == 0 and end.endswith("right"), "\n".join([*wrong, end, ran.output])

    return check


DOUBLED, REPAIRED = (
    ROOT / "examples" / f"{name}_llama_fsdp.py" for name in ("doubled", "repaired")
)
PLAIN = ROOT / "examples" / "plain_pytorch.py"
RECIPE = SCRIPTS / "finetuning.py"
LAYERS = SCRIPTS / "compiled_layers.py"
GRAPHS_NAME_CHECKPOINTS = (2, 10)
# As the loop prints them, and the scripts beside it.
LOSSES = re.compile(r"loss |-?0x")
CHECKS: dict[str, Check] = {
    "plain": recorded(PLAIN, ("--checkpoint", "twice", *SMALL), "doubled"),
    "doubled": recorded(DOUBLED, SMALL, "doubled"),
    "repaired": recorded(REPAIRED, SMALL, "full"),
    "doubled x2": recorded(DOUBLED, SMALL, "doubled", 2),
    "repaired x2": recorded(REPAIRED, SMALL, "full", 2),
    "recipe x2": recipe(),
    "recipe once x2": recipe("--once"),
    "record()": prints([str(SCRIPTS / "loop.py"), "--record", "out"], '"verdict": "doubled"'),
    "callback": prints([str(SCRIPTS / "trainer.py"), "out"], "doubled"),
    "losses": same_losses(SCRIPTS / "loop.py"),
    "compiled": same_losses(ROOT / "tests" / "record" / "scripts" / "compiled_steps.py"),
    "graphs": graphs(),
    "graphs twice": graphs("--twice"),
    "verify": verified,
    "unmarked": accuracy("autograd"),
    "marked": accuracy("annotated"),
}
NEED_FSDP = tuple(name for name in CHECKS if name.startswith(("doubled", "repaired", "recipe")))


@benchmark
@some("--only", [version.name for version in VERSIONS], text="Versions of torch.")
@some("--checks", CHECKS, text="What is run.")
@click.option("--again", is_flag=True, help="Ask what was asked before, too.")
def main(only: Sequence[str], checks: Sequence[str], again: bool) -> int:
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = [version for version in VERSIONS if version.name in only]
    for version in chosen:
        _see(version, checks, again)
    heads = ("torch", "transformers", "Python", *checks)
    table = Table(dict.fromkeys(heads, "<"), markdown=True)
    right = True
    for version in chosen:
        row = _kept(version)
        seen = row.get("checks", {})
        cells = [_cell(seen.get(name)) if _has(version, name) else "-" for name in checks]
        about = {"torch": version.name, **row.get("about", {})}
        table.row(*(about.get(name, "") for name in ("torch", "transformers", "python")), *cells)
        right &= set(cells) <= {"right", "-"}
    return int(not right)


def _has(version: Version, check: str) -> bool:
    """Whether there is something to see."""
    return version.fsdp or check not in NEED_FSDP


def _cell(said: dict[str, Any] | None) -> str:
    return "not run" if said is None else "right" if said["right"] else "WRONG"


def _see(version: Version, checks: Sequence[str], again: bool) -> None:
    row = {} if again else _kept(version)
    done = row.setdefault("checks", {})
    wanted = [name for name in checks if _has(version, name)]
    missing = [name for name in wanted if not done.get(name, {}).get("right")]
    if not missing:
        return
    environment = Environment(KEPT / "environment", KEPT / "scratch")
    try:
        made = environment.make(version.packages, version.python)
        print(f"{version.name}: environment made in {made.seconds:.0f} s", flush=True)
        if made.status:
            print(made.output, file=sys.stderr)
            return
        row["about"] = _about(environment)
        for name in missing:
            right, output = CHECKS[name](environment, name.replace(" ", "-"))
            done[name] = {"right": right, "output": output[-OUTPUT:]}
            if not right:
                done[name]["said"] = output[:OUTPUT]
            _path(version).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            print(f"{version.name}: {name} {_cell(done[name])}", flush=True)
    finally:
        environment.remove()


def _about(environment: Environment) -> dict[str, str]:
    program = (
        "import json, platform, torch, transformers\n"
        "print(json.dumps({'torch': torch.__version__, 'python': platform.python_version(),\n"
        "                  'transformers': transformers.__version__}))"
    )
    said = environment.run([environment.python, "-W", "ignore", "-c", program]).output
    facts: dict[str, str] = json.loads(said.splitlines()[-1])
    return facts


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _result(folder: Path) -> dict[str, Any]:
    return _read(folder / RESULT)


def _kept(version: Version) -> dict[str, Any]:
    return _read(_path(version))


def _path(version: Version) -> Path:
    return KEPT / f"{version.name}.json"
