"""Scripts that fail under `run`, and logs of failures: the code expected and found.

Some scripts have other forms, and these have repaired twins, which get no code. The logs are those
written for each known failure, and failures that are none of them; those from public threads, in
parts; and written ones. Only the part that is called unseen is: all others have been taught from.

With ``--reported`` the five reported failures, each in several forms and with the versions it came
with, beside a twin without the fault. An older torch gets an environment (``_environments.py`` has
which), five to seven gigabytes, which is removed again.

  python -m benchmarks diagnoses              all of them
  python -m benchmarks diagnoses kv_cache     some scripts
  python -m benchmarks diagnoses logs         the logs alone
  python -m benchmarks diagnoses --reported cache save_hang
  python -m benchmarks diagnoses --reported --torch 2.4

The status is 1 where an answer differs.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from tests.diagnose.cases import CASES, FORMS, REPAIRED, Case, Ended, run_case
from tests.diagnose.corpus import KNOWN, UNRELATED, answer, diagnosed, expected
from tests.diagnose.public import OUTCOMES, UNSEEN, public_logs, scores, written_logs
from tests.diagnose.reported import FAILURES, libraries, named

from benchmarks._environments import VERSIONS, Environment
from benchmarks._frame import ROOT, Table, benchmark, wanted, words

RULES = ("src/recompute_scan/diagnose", "src/recompute_scan/frameworks")


@benchmark
@words()
@click.option("--reported", "live", is_flag=True, help="The reported failures, and their twins.")
@click.option("--torch", type=click.Choice([one.name for one in VERSIONS if one.fsdp]))
def main(words: Sequence[str], live: bool, torch: str | None) -> int:
    if torch:
        return with_torch(torch, ["--reported"] * live + [*words])
    if live:
        return reported(words)
    wrong = 0
    if "logs" not in words:
        wrong += scripts(words)
    if not words or "logs" in words:
        missed = [path.name for path in KNOWN if answer(diagnosed(path)) != expected(path)]
        guessed = [path.name for path in UNRELATED if diagnosed(path).cause is not None]
        print(
            f"logs: {len(KNOWN)} of known failures, {len(missed)} not or wrongly recognised; "
            f"{len(UNRELATED)} of others, {len(guessed)} wrongly recognised"
        )
        for name in (*missed, *guessed):
            print(f"  {name}")
        wrong += threads() + len(missed) + len(guessed)
    return int(wrong > 0)


def scripts(words: Sequence[str]) -> int:
    """Run those; the number of answers that differ."""
    wrong = 0
    columns = {"case": "<28", "ranks": ">5", "status": ">6", "expected": "<8", "found": "<8"}
    table = Table(columns)
    for case in (*CASES, *FORMS, *REPAIRED):
        if words and case.script not in words:
            continue
        name = case.script.removeprefix("forms/") + " repaired" * case.repaired
        if case.missing is not None:
            print(f"{name:28} {case.ranks:5}  {case.missing}; its log is among the logs below")
            continue
        with tempfile.TemporaryDirectory() as folder:
            ended = run_case(case, Path(folder))
            found = ended.code or ""
        same = (found, ended.status) == (case.code, case.status)
        wrong += not same
        note = "" if same else "  <- differs"
        table.row(name, case.ranks, ended.status, case.code or None, found or None, note=note)
    return wrong


def threads() -> int:
    """Score the logs from public threads and the written ones; the number of wrong answers."""
    public, written = public_logs(), written_logs()
    logs = [*public, *written]
    print(f"logs from {len(public)} public threads, and {len(written)} written ones:")
    table = Table(
        {"part": "<16", "cause": "<12", "logs": ">5", "right": ">6", "none": ">6", "wrong": ">6"}
    )
    for score in scores(logs):
        table.row(score.half, score.group, score.logs, *(score.outcomes[one] for one in OUTCOMES))
    print(since_labelled())
    said_wrongly = [one for one in logs if one.outcome() == "wrong"]
    for one in said_wrongly:
        print(f"  {one.thread}: {one.label}, and said {answer(one.found())}")
    return len(said_wrongly)


def since_labelled() -> str:
    """How the unseen part stands to the rules, by git: a rule that is younger may know it."""
    labelled = _git("log", "-1", "--format=%h of %cs", "--", str(UNSEEN))
    if not labelled:
        return "unseen: not committed yet, so nothing shows that it was labelled first"
    younger = _git("log", "--format=%h", f"{labelled.split()[0]}..HEAD", "--", *RULES).split()
    return f"unseen: labelled and frozen by {labelled}; commits to the rules since: {len(younger)}"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


# What the scripts need beside torch and transformers, and what reads their results.
BESIDE = ("lightning", "psutil", "pytest")


def with_torch(name: str, words: Sequence[str]) -> int:
    """Run those with another torch."""
    (version,) = (one for one in VERSIONS if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder, "environment"), Path(folder, "scratch"))
        made = environment.make((*version.packages, *BESIDE), version.python)
        if made.status:
            print(made.output, file=sys.stderr)
            return made.status
        command = [environment.python, "-m", "benchmarks", "diagnoses", *words]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


def reported(words: Sequence[str]) -> int:
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
            found = outcome(one.case, first)
            twin = outcome(replace(one.case, code="", status=0, hangs=False, repaired=True), first)
            right = found == (one.case.code, one.case.status) and twin == ("", 0)
            wrong += not right
            about = (one.case.script.removeprefix("forms/"), one.case.ranks, named(one.library))
            expected = (one.case.code or "none", said(found), said(twin))
            table.row(one.reported, *about, *expected, note="" if right else " <- differs")
    print(f"\n{wrong} differ")
    return int(wrong > 0)


def outcome(case: Case, first: Path | None) -> tuple[str, int]:
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
