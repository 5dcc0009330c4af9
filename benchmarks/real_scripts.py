"""Training scripts that people have, run on tiny models: the verdict beside a count of its own.

    python benchmarks/real_scripts.py SOURCES                    every row
    python benchmarks/real_scripts.py SOURCES nanoGPT TRL        those whose name begins so
    python benchmarks/real_scripts.py SOURCES --write TABLE.md   the table goes there as well
    python benchmarks/real_scripts.py SOURCES --environments DIR --keep FOLDER

SOURCES holds clones, bare or not, under the names of the repositories; what runs is taken from the
commit that ``real_rows.py`` pins. DIR holds the environments; one that is not there is made with
the packages pinned there. FOLDER gets what the tool wrote. Nothing is fetched from a hub.

Each script runs three times: as it is; as it is with ``counting_main.py`` counting; and whole
under ``recompute-scan run --keep-going``, where it has to end with the same status and print the
same losses to the last digit. Where it doubles, the run is one with ``--verify``, and the diffs
that the report offers are applied to a copy, which is counted again;
faster is the least processor time of a step.

Ends with 1 where a verdict differs from the count, where a script that runs without us fails with
us or prints other losses, where a fix leaves a doubled checkpoint, and where fewer than 14 rows of
all ran.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import Environment, Ran
from benchmarks.real_rows import PACKAGES, PYTHON, ROWS, Row
from benchmarks.real_rows_elsewhere import ELSEWHERE

HERE = Path(__file__).resolve().parent
COUNTER = str(HERE / "counting_main.py")
TIMEOUT_S = 420
FEWEST = 14
_LOSS = re.compile(
    r"(?:loss|accuracy)(?: train)?['\"]?\s*[:=|]?\s*['\"]?(-?\d+\.\d+(?:e-?\d+)?|nan)",
    re.IGNORECASE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


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
        self._clone = sources / row.source.name if row.source else None
        self._environment = Environment(environments / row.packages, scratch)

    def prepare(self) -> None:
        """The pinned files, and what the row changes in them.

        Raises:
            subprocess.CalledProcessError: The clone is not there, or not at hand at that commit.
        """
        (self.tree / self.row.where).mkdir(parents=True)
        if self._clone is not None and self.row.source is not None:
            archive = ["git", "-C", str(self._clone), "archive", self.row.source.commit]
            packed = self.scratch / "tree.tar"
            with packed.open("wb") as into:
                subprocess.run(
                    [*archive, *self.row.paths], check=True, stdout=into, stderr=subprocess.DEVNULL
                )
            subprocess.run(["tar", "xf", str(packed)], cwd=self.tree, check=True)
        if self.row.copied:
            packages = Path(self._environment.python).parent.parent.glob("lib/*/site-packages")
            shutil.copytree(next(packages) / self.row.copied, self.tree / self.row.copied)
        for change in (self.row.data, self.row.change):
            if change is not None:
                change(self.tree / self.row.where, self.inputs)

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
            **dict(self.row.variables),
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
        return Outcome("", f"status {plain.status}: {last_line(plain)}")
    counting, counted = work.count("counted")
    if counting.status or not counted or not counted["modules"]:
        return Outcome("", f"not counted, status {counting.status}: {last_line(counting)}")
    truth = f"{counted['most']:.2g} in {counted['share']:.0%} of {counted['modules']}"
    doubled = counted["most"] >= 1.5
    scan = work.scratch / "scan"
    options = ["--verify", "--timing-steps", "6"] if doubled else ["--timing-steps", "1"]
    tool = ["-m", "recompute_scan", "run", "--steps", "2", "--warmup", "1", "--keep-going"]
    ours = work.run("ours", [*tool, *options, "-o", str(scan)])
    result = scan / "result.json"
    if ours.status != plain.status or not result.exists():
        said = f"status {ours.status}: {last_line(ours)}"
        return Outcome(truth, said, wrong="fails with us")
    found = json.loads(result.read_text())
    losses, same = same_losses(plain, counting, ours)
    wrong = [] if agrees(found, counted) else ["verdict"]
    wrong += [] if same else ["losses"]
    fix = ",".join(_found(found))
    if doubled:
        mended, right = _mended(work, found, counted)
        fix, wrong = f"{fix}: {mended}", [*wrong, *([] if right else ["fix"])]
    said = f"{found['verdict']} {found['recompute_per_backward']}"
    return Outcome(truth, said, losses, fix, ", ".join(wrong))


def last_line(ran: Ran) -> str:
    """The last error of a program, or the last that it said."""
    lines = [line.strip() for line in ran.output.splitlines() if line.strip()]
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    # What torchrun says of its processes' errors comes last, and says less.
    errors = [line for line in errors if "ChildFailedError" not in line] or errors
    return _COLOURS.sub("", (errors or lines or ["no output"])[-1])[:200]


def same_losses(plain: Ran, counting: Ran, ours: Ran) -> tuple[str, bool]:
    """What the losses say, and whether nothing speaks against us."""
    first, second, third = (
        _LOSS.findall(_COLOURS.sub("", ran.output)) for ran in (plain, counting, ours)
    )
    if not first:
        return "none printed", True
    if first[-1:] != second[-1:]:
        return "differ from run to run without us", True
    # Ours prints its report behind those of the script; a progress bar shows some or others.
    compared = first if first == second else first[-1:]
    if third[: len(compared)] == compared or (len(compared) == 1 and first[-1] in third):
        return f"same {len(compared)}, last {first[-1]}", True
    return f"{first[-1]} without us, {third[-1:]} with us", False


def agrees(found: dict[str, Any], counted: dict[str, Any]) -> bool:
    """Whether the verdict is the one that the count asks for, and its number too."""
    most = counted["most"]
    if most == 0:
        return bool(found["verdict"] == "none")
    if most >= 1.5:
        per_backward = found["recompute_per_backward"]
        return bool(found["verdict"] == "doubled" and abs(per_backward - most) < 0.5)
    return found["verdict"] in ("partial", "full")


def _found(result: dict[str, Any]) -> list[str]:
    return [one["code"] for one in result["findings"]]


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
        work.row = work.row._replace(command=work.row.mended)
    elif not _applied(diffs[0], work):
        return f"{text}; the diff does not apply", False
    ran, again = work.count("mended")
    if ran.status or not again:
        return f"{text}; mended: status {ran.status}, {last_line(ran)}", False
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


def main() -> int:
    """Print a line for each row as it is done, and the counts."""
    parser = argparse.ArgumentParser(description="Real training scripts, with and without us.")
    parser.add_argument("sources", type=Path)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--environments", type=Path, default=Path("/tmp/real-environments"))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for what the tool wrote")
    given = parser.parse_intermixed_args()
    every = (*ROWS, *ELSEWHERE)
    rows = [row for row in every if not given.rows or row.name.startswith(tuple(given.rows))]
    folder = given.environments.resolve()
    lines = ["| script | changed | counted | said | losses | fix | right |", "|" + " --- |" * 7]
    print("\n".join(lines), flush=True)
    ran = wrong = 0
    with tempfile.TemporaryDirectory(prefix="real") as kept:
        inputs = Path(kept) / "inputs"
        for name in dict.fromkeys(row.packages for row in rows):
            environment = Environment(folder / name, Path(kept) / name)
            if not Path(environment.python).exists():
                made = environment.make(PACKAGES[name], PYTHON)
                if made.status:
                    print(f"No environment {name}: {last_line(made)}", file=sys.stderr)
            if not inputs.exists():
                for script in ("real_inputs.py", "real_pictures.py"):
                    if script == "real_inputs.py" or name == "newest":
                        environment.run([environment.python, str(HERE / script), str(inputs)])
        for row in rows:
            with tempfile.TemporaryDirectory(prefix="row") as scratch:
                outcome = attempt(Work(row, given.sources.resolve(), folder, inputs, Path(scratch)))
                if given.keep and Path(scratch, "scan").exists():
                    shutil.copytree(Path(scratch, "scan"), given.keep / row.name.replace("/", "_"))
            ran += bool(outcome.truth)
            wrong += bool(outcome.wrong)
            changed = "yes" if row.change is not None else "no"
            right = outcome.wrong.upper() or ("yes" if outcome.truth else "did not run")
            cells = (row.name, changed, *outcome[:4], right)
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
            print(lines[-1], flush=True)
    unchanged = sum(row.change is None for row in rows)
    lines.append(f"\n{ran} of {len(rows)} rows ran ({unchanged} unchanged): {wrong} wrong.")
    print(lines[-1])
    if given.write:
        given.write.write_text("\n".join(lines) + "\n")
    return int(wrong > 0 or (not given.rows and ran < FEWEST))


if __name__ == "__main__":
    sys.exit(main())
