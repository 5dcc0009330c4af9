"""The five reported failures, in several forms and with the versions they came with.

Each row is a script that fails, and its twin without the fault, both under `recompute-scan run`:
the code that was expected, the one found, and what the twin got. A version of a library that isn't
installed is put into a folder for the time of the run, without what it depends on. An older torch
gets an environment (``_environments.py`` has which) with the packages of its day, five to seven
gigabytes, which is removed again.

  python -m benchmarks live-failures cache save_hang  those whose script's name holds a word
  python -m benchmarks live-failures --torch 2.4      with an older torch

The status is 1 where an answer differs.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from tests.diagnose.cases import HUNG, Case, Ended, run_case

from benchmarks._environments import VERSIONS, Environment
from benchmarks._frame import ROOT, Table, benchmark, wanted, words

# What each version is made of.
LIBRARIES = {
    "transformers 4.40": ("transformers==4.40.2", "tokenizers==0.19.1", "huggingface_hub==0.23.5"),
    "transformers 4.45": ("transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.25.2"),
    "lightning 2.2.1": ("lightning==2.2.1", "setuptools<80"),
}


@dataclass(frozen=True)
class Failure:
    """One row.

    Attributes:
        reported: What was reported.
        case: The script, and the code that is right.
        library: A version that it runs with, or a library whose installed version it runs with.
    """

    reported: str
    case: Case
    library: str = ""


CACHE = "the key-value cache grows in the recompute"
WEIGHTS = "Lightning saves weights only, sharded"
STATE = "FSDP gathers an optimizer's state"
FLAT = "a weight of FSDP is flat"
SAVE = "one rank saves, and the job hangs"

FAILURES = (
    Failure(CACHE, Case("kv_cache", "RS101")),
    Failure(CACHE, Case("forms/cache_by_hand", "RS101", ranks=2)),
    *(
        Failure(CACHE, case, library)
        for library in ("transformers 4.40", "transformers 4.45", "transformers")
        for case in (
            Case("forms/cache_llama", "RS110"),
            Case("forms/cache_sharded", "RS110", ranks=2),
        )
    ),
    *(
        Failure(WEIGHTS, Case(script, code, ranks=2, status=int(bool(code))), library)
        # The installed version has no such fault: it gets no finding, either way.
        for library, code in (("lightning 2.2.1", "RS201"), ("lightning", ""))
        for script in (
            "weights_only_save",
            "forms/weights_only_units",
            "forms/weights_only_subclass",
        )
    ),
    Failure(STATE, Case("optimizer_dtype", "RS202", ranks=2)),
    Failure(STATE, Case("forms/state_of_one_rank", "RS202", ranks=2)),
    Failure(STATE, Case("forms/state_of_units", "RS202", ranks=2)),
    Failure(FLAT, Case("fsdp_weight", "RS117", ranks=2)),
    Failure(FLAT, Case("forms/weight_by_method", "RS117", ranks=2)),
    Failure(FLAT, Case("forms/weight_of_reference", "RS117", ranks=2)),
    Failure(SAVE, Case("save_hang", "RS204", ranks=2, status=HUNG, hangs=True)),
    Failure(SAVE, Case("forms/save_distributed", "RS204", ranks=2, status=HUNG, hangs=True)),
    Failure(SAVE, Case("forms/save_and_train", "RS210", ranks=2, status=HUNG, hangs=True)),
    Failure(SAVE, Case("forms/save_no_barrier", "RS210", ranks=2, status=HUNG, hangs=True)),
)


# What the scripts need beside torch and transformers, and what reads their results.
BESIDE = ("lightning", "psutil", "pytest")


@benchmark
@words()
@click.option("--torch", type=click.Choice([one.name for one in VERSIONS if one.fsdp]))
def main(words: Sequence[str], torch: str | None) -> int:
    return with_torch(torch, words) if torch else run(words)


def with_torch(name: str, words: Sequence[str]) -> int:
    """Run those with another torch."""
    (version,) = (one for one in VERSIONS if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder, "environment"), Path(folder, "scratch"))
        made = environment.make((*version.packages, *BESIDE), version.python)
        if made.status:
            print(made.output, file=sys.stderr)
            return made.status
        command = [environment.python, "-m", "benchmarks", "live-failures", *words]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


def run(words: Sequence[str]) -> int:
    """Run those with this torch; 1 where an answer differs."""
    wrong = 0
    print(f"torch {importlib.metadata.version('torch')}\n")
    heads = ("reported", "script", "ranks", "with", "expected", "found", "repaired twin")
    table = Table(dict.fromkeys(heads, "<"), markdown=True)
    with tempfile.TemporaryDirectory() as folder:
        for one in FAILURES:
            if not wanted(one.case.script, words):
                continue
            first = libraries(one.library, Path(folder))
            found = answer(one.case, first)
            twin = answer(replace(one.case, code="", status=0, hangs=False, repaired=True), first)
            right = found == (one.case.code, one.case.status) and twin == ("", 0)
            wrong += not right
            about = (one.case.script.removeprefix("forms/"), one.case.ranks, named(one.library))
            expected = (one.case.code or "none", said(found), said(twin))
            table.row(one.reported, *about, *expected, note="" if right else " <- differs")
    print(f"\n{wrong} differ")
    return int(wrong > 0)


def answer(case: Case, first: Path | None) -> tuple[str, int]:
    """The code of the first finding, if any, and the status."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended: Ended = run_case(case, Path(folder), first=first)
        except subprocess.TimeoutExpired:
            return "did not end", -1
        return ended.code or "", ended.status


def said(found: tuple[str, int]) -> str:
    code, status = found
    return f"{code or 'none'}, status {status}"


def named(library: str) -> str:
    """The library with its version, as in the table."""
    if library in LIBRARIES:
        return LIBRARIES[library][0].replace("==", " ")
    return f"{library} {importlib.metadata.version(library)}" if library else "torch alone"


def libraries(library: str, folder: Path) -> Path | None:
    """The folder that holds this version, made if it isn't there."""
    if library not in LIBRARIES:
        return None
    path = folder / library.replace(" ", "-")
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(path)]
        subprocess.run([*pip, *LIBRARIES[library]], check=True, capture_output=True)
    return path
