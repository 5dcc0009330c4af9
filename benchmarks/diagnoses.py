"""Scripts that fail under `run`, and logs of failures: the code expected and found.

Some scripts have other forms, and these have repaired twins, which get no code. Then the logs:
those written for each known failure, and failures that are none of them; those from public threads,
for the half that the rules were built on, the half that was kept aside, those collected later, and
those that are unseen; and written ones, in two parts likewise. Only the part that is called unseen
is: all others have been taught from.

  python -m benchmarks diagnoses              all of them
  python -m benchmarks diagnoses kv_cache     some scripts
  python -m benchmarks diagnoses logs         the logs alone

The status is 1 where an answer differs.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.diagnose.cases import CASES, FORMS, REPAIRED, run_case
from tests.diagnose.corpus import KNOWN, UNRELATED, answer, diagnosed, expected
from tests.diagnose.public import OUTCOMES, UNSEEN, public_logs, scores, written_logs

from benchmarks._frame import ROOT, Table, benchmark, words

RULES = ("src/recompute_scan/diagnose", "src/recompute_scan/frameworks")


@benchmark
@words()
def main(words: Sequence[str]) -> int:
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
