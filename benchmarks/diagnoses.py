"""Run every script that fails under ``recompute-scan run``, and print the code expected and found.

Of some there are other forms, and repaired twins of these, which get no code.

    python benchmarks/diagnoses.py              all of them
    python benchmarks/diagnoses.py kv_cache     some
    python benchmarks/diagnoses.py logs         the logs alone

Then the logs: those written for each known failure, and failures that are none of them; and those
from public threads, for the half that the rules were built on, the half that was kept aside, those
collected later, and those that are unseen; and written ones, in two parts likewise. Only the part
that is called unseen is: of the others, all have been taught from.
Ends with 1 where an answer differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.diagnose.cases import CASES, FORMS, REPAIRED, run_case
from tests.diagnose.corpus import KNOWN, UNRELATED, answer, diagnosed, expected
from tests.diagnose.public import OUTCOMES, UNSEEN, public_logs, scores, written_logs

ROOT = Path(__file__).resolve().parent.parent
RULES = ("src/recompute_scan/diagnose", "src/recompute_scan/frameworks")


def main(wanted: list[str]) -> int:
    wrong = scripts(wanted) if wanted != ["logs"] else 0
    if wanted and wanted != ["logs"]:
        return int(wrong > 0)
    missed = [path.name for path in KNOWN if answer(diagnosed(path)) != expected(path)]
    guessed = [path.name for path in UNRELATED if diagnosed(path).cause is not None]
    print(
        f"logs: {len(KNOWN)} of known failures, {len(missed)} not or wrongly recognised; "
        f"{len(UNRELATED)} of others, {len(guessed)} wrongly recognised"
    )
    for name in (*missed, *guessed):
        print(f"  {name}")
    wrong += threads()
    return int(wrong > 0 or bool(missed) or bool(guessed))


def scripts(wanted: list[str]) -> int:
    """Run those; the number of answers that differ."""
    wrong = 0
    print(f"{'case':<28}{'ranks':>5}  {'status':>6}  {'expected':<9}{'found':<9}")
    for case in (*CASES, *FORMS, *REPAIRED):
        if wanted and case.script not in wanted:
            continue
        twin = " repaired" if case.repaired else ""
        head = f"{case.script.removeprefix('forms/') + twin:<28}{case.ranks:>5}"
        if case.missing is not None:
            print(f"{head}  {case.missing}; its log is among the logs below")
            continue
        with tempfile.TemporaryDirectory() as folder:
            ended = run_case(case, Path(folder))
            found = ended.code or ""
        same = (found, ended.status) == (case.code, case.status)
        wrong += not same
        note = "" if same else "  <- differs"
        print(
            f"{head}  {ended.status:>6}  {case.code or '-':<9}{found or '-':<9}{note}", flush=True
        )
    return wrong


def threads() -> int:
    """Score the logs from public threads and the written ones; the number of wrong answers."""
    public, written = public_logs(), written_logs()
    logs = [*public, *written]
    print(f"logs from {len(public)} public threads, and {len(written)} written ones:")
    print(f"{'part':<16}{'cause':<12}{'logs':>5}{'right':>7}{'none':>6}{'wrong':>7}")
    for score in scores(logs):
        right, none, wrong = (score.outcomes[name] for name in OUTCOMES)
        print(f"{score.half:<16}{score.group:<12}{score.logs:>5}{right:>7}{none:>6}{wrong:>7}")
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
