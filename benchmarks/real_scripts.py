"""Training scripts that people have, on tiny models: the verdict beside a count of its own.

SOURCES holds clones, bare or not, under the names of the repositories; what runs is taken from the
commit that ``tests/real/rows.yaml`` pins. The environments' folder holds one for each set of
packages there, and gets what is missing. Nothing is fetched from a hub.

Each script runs three times: as it is; as it is with ``tests/real/counting.py`` counting; and whole
under `recompute-scan run --keep-going`, where it has to end with the same status and print the same
losses to the last digit. Where it doubles, the run is one with ``--verify``, and the diffs that the
report offers are applied to a copy, which is counted again; faster is the least processor time of a
step.

  python -m benchmarks real-scripts SOURCES                every row
  python -m benchmarks real-scripts SOURCES nanoGPT TRL    the rows whose name begins so

The status is 1 where a verdict differs from the count, where a script that runs without us fails
with us or prints other losses, where a fix leaves a doubled checkpoint, and where fewer than 14 of
all rows ran.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from tests.real.judging import agrees, last_line, same_losses
from tests.real.rows import COUNTER, INPUTS, PACKAGES, PYTHON, ROWS, SOURCES, Row, put

from benchmarks._environments import Environment
from benchmarks._frame import Ran, Table, benchmark, folder_option

TIMEOUT_S = 420
FEWEST = 14


class Outcome(NamedTuple):
    """What one row gave; ``wrong`` says what is not as it should be, and is empty where all is.

    Without a ``truth`` the script does not run here without us, and ``said`` is its error.
    """

    truth: str
    said: str
    losses: str = ""
    fix: str = ""
    wrong: str = ""


class Work:
    """A row's folder, its environment, and the ways to run it.

    Args:
        row: Which one.
        sources: Where the clones are.
        environments: Where the environments are.
        inputs: Texts, models and pictures.
        scratch: An empty folder.
    """

    def __init__(
        self, row: Row, sources: Path, environments: Path, inputs: Path, scratch: Path
    ) -> None:
        self.row = row
        self.inputs = inputs
        self.scratch = scratch
        self.tree = scratch / "work"
        self._clone = sources / row.source
        self._environment = Environment(environments / row.packages, scratch)

    def prepare(self) -> None:
        """The pinned files, and what the row changes in them.

        Raises:
            subprocess.CalledProcessError: The clone is not there, or not at hand at that commit.
            ValueError: The files are not the version that the row is for.
        """
        folder = self.tree / self.row.where
        folder.mkdir(parents=True)
        if self.row.source:
            commit = SOURCES[self.row.source].commit
            archive = ["git", "-C", str(self._clone), "archive", commit, *self.row.paths]
            packed = self.scratch / "tree.tar"
            with packed.open("wb") as into:
                subprocess.run(archive, check=True, stdout=into, stderr=subprocess.DEVNULL)
            subprocess.run(["tar", "xf", str(packed)], cwd=self.tree, check=True)
        if self.row.copied:
            packages = Path(self._environment.python).parent.parent.glob("lib/*/site-packages")
            shutil.copytree(next(packages) / self.row.copied, self.tree / self.row.copied)
        put(self.row, folder, self.inputs)

    def run(self, name: str, before: Sequence[str]) -> Ran:
        """The row's command, with a runner before it, and an output folder of that name."""
        out = self.scratch / name
        out.mkdir()
        python = self._environment.python
        given = [
            part.replace("{in}", str(self.inputs)).replace("{out}", str(out))
            for part in self.row.command
        ]
        several = self.row.ranks > 1
        if "recompute_scan" in before:
            ranks = [f"--nproc-per-node={self.row.ranks}"] if several else []
            ahead = [python, *before, *ranks]
        else:
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={self.row.ranks}"]
            ahead = [python, *(torchrun if several else ()), *before]
        paths = [self.tree / self.row.where, *(self.tree / path for path in self.row.python_path)]
        variables = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.scratch / "hub"),
            "WANDB_MODE": "disabled",
            # A progress bar shows every step.
            "TQDM_MININTERVAL": "0",
            "PYTHONPATH": ":".join(map(str, paths)),
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
            **self.row.variables,
        }
        where = f"work/{self.row.where}"
        return self._environment.run(
            [*ahead, *given], folder=where, timeout_s=TIMEOUT_S, variables=variables
        )

    def count(self, name: str) -> tuple[Ran, dict[str, Any] | None]:
        """Run it beside the counter: how it ended, and of all ranks the one with most."""
        counts = self.scratch / f"{name}.json"
        ran = self.run(name, [COUNTER, str(counts)])
        found = [json.loads(path.read_text()) for path in self.scratch.glob(f"{name}.json*")]
        return ran, max(found, key=lambda one: float(one["most"]), default=None)


def attempt(work: Work) -> Outcome:
    """All runs of one row."""
    try:
        work.prepare()
    except (subprocess.CalledProcessError, ValueError) as error:
        return Outcome("", str(error).splitlines()[0])
    plain = work.run("plain", ())
    if plain.status:
        return Outcome("", f"status {plain.status}: {last_line(plain.output)}")
    counting, counted = work.count("counted")
    if counting.status or not counted or not counted["modules"]:
        return Outcome("", f"not counted, status {counting.status}: {last_line(counting.output)}")
    truth = f"{counted['most']:.2g} in {counted['share']:.0%} of {counted['modules']}"
    doubled = counted["most"] >= 1.5
    scan = work.scratch / "scan"
    options = ["--verify", "--timing-steps", "6"] if doubled else ["--timing-steps", "1"]
    tool = ["-m", "recompute_scan", "run", "--steps", "2", "--warmup", "1", "--keep-going"]
    ours = work.run("ours", [*tool, *options, "-o", str(scan)])
    result = scan / "result.json"
    if ours.status != plain.status or not result.exists():
        said = f"status {ours.status}: {last_line(ours.output)}"
        return Outcome(truth, said, wrong="fails with us")
    found = json.loads(result.read_text())
    losses, same = same_losses(plain.output, counting.output, ours.output)
    wrong = [] if agrees(found, counted) else ["verdict"]
    wrong += [] if same else ["losses"]
    fix = ",".join(one["code"] for one in found["findings"])
    if doubled:
        mended, right = _mended(work, found, counted)
        fix, wrong = f"{fix}: {mended}", [*wrong, *([] if right else ["fix"])]
    said = f"{found['verdict']} {found['recompute_per_backward']}"
    return Outcome(truth, said, losses, fix, ", ".join(wrong))


def _mended(work: Work, result: dict[str, Any], counted: dict[str, Any]) -> tuple[str, bool]:
    """What became of a doubled script with the fix: as measured by us, and as counted."""
    verified = result.get("verified") or {}
    text = f"verify {verified.get('outcome')}"
    if verified.get("saving_pct") is not None:
        text += f" {verified['saving_pct']:.0f} %"
    fixes = [one["fix"] for one in result["findings"] if one["fix"]]
    diffs = [fix["diff"] for fix in fixes if fix["diff"]]
    if not diffs and not work.row.mended:
        return f"{text}; no diff", False
    shutil.rmtree(work.tree)
    work.prepare()
    if not diffs:
        text += f"; {fixes[0]['summary']}"
        work.row = replace(work.row, command=work.row.mended)
    elif not _applied(diffs[0], work):
        return f"{text}; the diff does not apply", False
    ran, again = work.count("mended")
    if ran.status or not again:
        return f"{text}; mended: status {ran.status}, {last_line(ran.output)}", False
    # The least: other work on the machine only ever adds to a step's processor time.
    before, after = (min(one["step_s"][1:]) for one in (counted, again))
    text += f"; mended: {again['most']:.2g} in {again['share']:.0%}, {after / before:.2f} of a step"
    return text, again["most"] < 1.5 and after < before


def _applied(diff: str, work: Work) -> bool:
    """Whether the diff fits the files as they are, below the script's folder or the source's."""
    patch = work.scratch / "fix.diff"
    patch.write_text(diff)
    command = ["patch", "-p1", "--batch", "-i", str(patch)]
    folders = (work.tree / work.row.where, work.tree)
    return any(
        not subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode
        for folder in folders
    )


@benchmark
@click.argument("sources", type=click.Path(path_type=Path, exists=True))
@click.argument("rows", nargs=-1)
@folder_option("--environments", text="Where the environments are [/tmp/real-environments].")
@folder_option("--keep", text="Where what the tool wrote stays.")
def main(sources: Path, rows: Sequence[str], environments: Path | None, keep: Path | None) -> int:
    chosen = [row for row in ROWS if not rows or row.name.startswith(tuple(rows))]
    folder = (environments or Path("/tmp/real-environments")).resolve()
    heads = ("script", "changed", "counted", "said", "losses", "fix", "right")
    table = Table(dict.fromkeys(heads, "<"), markdown=True)
    ran = wrong = 0
    with tempfile.TemporaryDirectory(prefix="real") as kept:
        inputs = Path(kept) / "inputs"
        for name in dict.fromkeys(row.packages for row in chosen):
            environment = Environment(folder / name, Path(kept) / name)
            if not Path(environment.python).exists():
                made = environment.make(PACKAGES[name], PYTHON)
                if made.status:
                    print(f"No environment {name}: {last_line(made.output)}", file=sys.stderr)
            if not inputs.exists():
                environment.run([environment.python, INPUTS, str(inputs)])
        for row in chosen:
            with tempfile.TemporaryDirectory(prefix="row") as scratch:
                outcome = attempt(Work(row, sources.resolve(), folder, inputs, Path(scratch)))
                if keep and Path(scratch, "scan").exists():
                    shutil.copytree(Path(scratch, "scan"), keep / row.name.replace("/", "_"))
            ran += bool(outcome.truth)
            wrong += bool(outcome.wrong)
            right = outcome.wrong.upper() or ("yes" if outcome.truth else "did not run")
            cells = (row.name, "yes" if row.change else "no", *outcome[:4], right)
            table.row(*(cell.replace("|", "/") for cell in cells))
    unchanged = sum(not row.change for row in chosen)
    print(f"\n{ran} of {len(chosen)} rows ran ({unchanged} unchanged): {wrong} wrong.")
    return int(wrong > 0 or (not rows and ran < FEWEST))
