"""The reported cases: their truths, what ``run`` answers, and whether the answer agrees.

A case is a folder of ``cases/`` with ``train.py`` and ``truth.json``: ``source``, ``truth`` (one
sentence), ``established`` (how it was found), ``expected`` and, where it is not
``run --steps 5 -o out train.py``, ``command`` and ``environment``. The script may import the
modules of ``cases/shared``. A case that differs from another in a few lines has no script: ``of``
names the other case, and ``changes`` are the texts to replace in its ``train.py``.

Keys of ``expected``, all of which must hold: ``verdict``, ``verdict_in``, ``verdict_not_in``;
``recompute_per_backward`` (a number or the allowed ones; not compared where the verdict is
``inconclusive``), ``at_most``; ``findings`` (all of them), ``findings_any``, ``findings_not``,
``findings_not_error`` (none of them an error at high confidence); ``text``, ``text_any`` and
``text_not`` (regular expressions on the output and on the texts of the result), ``printed``,
``printed_not`` (on the output alone), ``diff_removes``, ``diff_removes_not`` (on the lines that
fixes remove), ``status``, ``if_verdict`` (further keys by verdict), ``any_of`` (a list of such
sets, one of which must hold).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("cases")
_COMMAND = ["run", "--steps", "5", "-o", "out", "train.py"]
_CODE = re.compile(r"RS\d{3}")


@dataclass(frozen=True)
class Answer:
    """What one command answered."""

    status: int
    printed: str
    result: dict[str, Any]

    @property
    def said(self) -> str:
        """The answer in one line: verdict, count and codes."""
        count = self.result.get("recompute_per_backward")
        shown = "-" if count is None else f"{count:g}"
        return f"{self.result.get('verdict')} {shown} {','.join(self.codes) or '-'}"

    @property
    def codes(self) -> list[str]:
        """Codes of the findings and of the diagnosis, and those that begin a line of the output."""
        found = {finding["code"] for finding in self.result.get("findings") or []}
        found |= {text for text in _texts(self.result.get("crash")) if _CODE.fullmatch(text)}
        found |= set(re.findall(r"^\s*(RS\d{3}) [a-z-]+ \(", self.printed, re.MULTILINE))
        if not self.result:
            found |= set(_CODE.findall(self.printed))
        return sorted(found)

    @property
    def removed(self) -> str:
        """The lines that the diffs of the fixes take out."""
        fixes = (finding.get("fix") or {} for finding in self.result.get("findings") or [])
        lines = (line for fix in fixes for line in (fix.get("diff") or "").split("\n"))
        return "\n".join(line for line in lines if re.match("-(?!--)", line))


def names() -> list[str]:
    """The cases, by their folders' names."""
    return sorted(path.parent.name for path in FOLDER.glob("*/truth.json"))


def truth_of(name: str) -> dict[str, Any]:
    """What is known of a case."""
    held = json.loads((FOLDER / name / "truth.json").read_text(encoding="utf-8"))
    assert isinstance(held, dict)
    return held


def answer_to(name: str, folder: Path) -> Answer:
    """What recompute-scan answers to a copy of the case in this folder, which must not exist."""
    truth = truth_of(name)
    shutil.copytree(FOLDER / truth.get("of", name), folder)
    shutil.copytree(FOLDER / "shared", folder, dirs_exist_ok=True)
    script = folder / "train.py"
    for old, new in truth.get("changes", ()):
        text = script.read_text(encoding="utf-8")
        assert old in text, f"{name}: {old!r} is not in the script of {truth['of']}"
        script.write_text(text.replace(old, new), encoding="utf-8")
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "recompute_scan", *truth.get("command", _COMMAND)],
        cwd=folder,
        env={**os.environ, "PATH": os.pathsep.join(paths), **truth.get("environment", {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
    )
    path = folder / "out" / "result.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return Answer(done.returncode, done.stdout, result)


def disagreements(answer: Answer, expected: dict[str, Any]) -> list[str]:
    """What in the answer is not as expected, each in a few words; empty where all of it is."""
    verdict, count = answer.result.get("verdict"), answer.result.get("recompute_per_backward")
    printed = " ".join(answer.printed.split())
    whole = " ".join([printed, *(" ".join(text.split()) for text in _texts(answer.result))])
    sure = {
        finding["code"]
        for finding in answer.result.get("findings") or []
        if finding["severity"] == "error" and finding["confidence"] == "high"
    }
    counts = expected.get("recompute_per_backward")
    allowed = counts if isinstance(counts, list) else [counts]

    def holds(key: str, value: Any) -> bool:
        match key:
            case "verdict" | "verdict_in":
                return verdict in (value if isinstance(value, list) else [value])
            case "verdict_not_in":
                return verdict not in value
            case "recompute_per_backward":
                near = (count is not None and abs(count - one) < 0.051 for one in allowed)
                return verdict == "inconclusive" or any(near)
            case "at_most" | "recompute_at_most":
                return count is None or count <= value + 0.051
            case "findings":
                return set(value) <= set(answer.codes)
            case "findings_any":
                return bool(set(value) & set(answer.codes))
            case "findings_not":
                return not set(value) & set(answer.codes)
            case "findings_not_error":
                return not set(value) & sure
            case "text" | "printed":
                return all(re.search(one, whole if key == "text" else printed) for one in value)
            case "text_any":
                return any(re.search(one, whole) for one in value)
            case "text_not" | "printed_not":
                where = whole if key == "text_not" else printed
                return not any(re.search(one, where) for one in value)
            case "diff_removes":
                return bool(re.search(value, answer.removed))
            case "diff_removes_not":
                return not re.search(value, answer.removed)
            case "status" | "rc":
                return answer.status == int(value)
            case "if_verdict":
                return not disagreements(answer, value.get(verdict, {}))
            case "any_of":
                return any(not disagreements(answer, one) for one in value)
        raise ValueError(key)

    return [
        f"{answer.said}: {key} is not {value}"
        for key, value in expected.items()
        if value is not None and not holds(key, value)
    ]


def _texts(value: Any) -> Iterator[str]:
    """The texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
