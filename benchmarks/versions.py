"""Make an environment for each version of torch, see that all is right there, and remove it.

    python benchmarks/versions.py                     all versions, one after the other
    python benchmarks/versions.py --only 2.2 newest   some of them
    python benchmarks/versions.py --again             those that were seen before, too

Each row of the table is one version, each column what was run under it: the examples alone and
in two processes, the order of a widely used recipe (``tests/versions/finetuning.py``),
``record()``, the callback for Hugging Face's Trainer, the losses with and without ``run``, those of
a step that is compiled, too, layers compiled with their checkpoint (``graphs``), ``--verify``, and
the cases of ``benchmarks/accuracy.py``, marked and unmarked. Ends with 1 where one is not right.

One environment is on the disk at a time: five to seven gigabytes up to torch 2.10, whose wheels
bring CUDA's libraries and run on a CPU too. What each check said is kept in
``build/versions/VERSION.json`` with the end of its output, and is not asked again; so a table
that was interrupted goes on where it stood.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, VERSIONS, Environment, Version

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
        program = str(ROOT / "benchmarks" / "accuracy.py")
        # Times as this version writes them.
        chosen = ("--group", "core", "distributed", "--evidence", evidence, "--times", "ns")
        ran = environment.run([environment.python, program, *chosen], folder=folder)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and print the table; the status is 1 where something is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [version.name for version in VERSIONS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--again", action="store_true", help="ask what was asked before, too")
    options = parser.parse_args(arguments)
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = [version for version in VERSIONS if version.name in options.only]
    for version in chosen:
        _see(version, options.checks, options.again)
    return 0 if print_table(chosen, options.checks) else 1


def print_table(versions: Sequence[Version], checks: Sequence[str]) -> bool:
    """A row for each version; whether all in it is right."""
    rows = [_kept(version) for version in versions]
    print("| torch | transformers | Python |", " | ".join(checks), "|")
    print("|---|---|---|" + "---|" * len(checks))
    for version, row in zip(versions, rows, strict=True):
        about = row.get("about", {})
        seen = row.get("checks", {})
        cells = [_cell(seen.get(name)) if _has(version, name) else "-" for name in checks]
        facts = [about.get(name, "") for name in ("torch", "transformers", "python")]
        print(f"| {facts[0] or version.name} | {facts[1]} | {facts[2]} |", " | ".join(cells), "|")
    return all(
        row.get("checks", {}).get(name, {}).get("right")
        for version, row in zip(versions, rows, strict=True)
        for name in checks
        if _has(version, name)
    )


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
            began = time.monotonic()
            right, output = CHECKS[name](environment, name.replace(" ", "-"))
            seconds = time.monotonic() - began
            done[name] = {"right": right, "seconds": round(seconds), "output": output[-OUTPUT:]}
            if not right:
                done[name]["said"] = output[:OUTPUT]
            _path(version).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            print(f"{version.name}: {name} {_cell(done[name])} ({seconds:.0f} s)", flush=True)
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


def _result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _kept(version: Version) -> dict[str, Any]:
    path = _path(version)
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _path(version: Version) -> Path:
    return KEPT / f"{version.name}.json"


if __name__ == "__main__":
    sys.exit(main())
