"""What the commands print, for ``docs/transcripts.md``: ``python docs/transcripts.py``.

Each is run as a shell runs it, at 80 columns and without colour, in a folder of the repository's
examples and traces. A test runs all but the recording again and compares.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "transcripts.md"
_LOG = ROOT / "tests" / "diagnose" / "corpus" / "known" / "RS204-guarded-save.log"


@dataclass(frozen=True)
class Transcript:
    """One command below its heading; ``recorded`` where it prints other times every time."""

    title: str
    command: str
    recorded: bool = False


TRANSCRIPTS = (
    Transcript("Record a script", "recompute-scan run --steps 5 train.py", recorded=True),
    Transcript("Read a trace", "recompute-scan analyze traces/doubled_llama_fsdp"),
    Transcript(
        "Compare two runs",
        "recompute-scan compare traces/doubled_llama_fsdp traces/repaired_llama_fsdp",
    ),
    Transcript(
        "Plan checkpoints for a limit",
        "recompute-scan plan --memory 22MB train.py",
        recorded=True,
    ),
    Transcript("Refuse it in CI", "recompute-scan check traces/doubled_llama_fsdp"),
    Transcript("Explain a log", "recompute-scan explain crash.log"),
    Transcript("Explain a code", "recompute-scan explain E202"),
    Transcript("Errors: an unknown option", "recompute-scan run --step 5 train.py"),
    Transcript("Errors: an unknown launcher", "recompute-scan run -- nosuchlauncher"),
    Transcript("Errors: no trace", "recompute-scan analyze missing.json"),
)
_HEAD = """\
# Transcripts

What the commands print on a terminal of 80 columns. Generated: `python docs/transcripts.py`.
"""


def printed(command: str, folder: Path) -> str:
    """What a command prints, errors among it, in the order of a terminal."""
    _, *arguments = shlex.split(command)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("FORCE_COLOR", "COLUMNS", "RECOMPUTE_SCAN_DEBUG")
    }
    done = subprocess.run(  # noqa: S603 - a command of this file
        [sys.executable, "-m", "recompute_scan", *arguments],
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        timeout=600,
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def prepare(folder: Path) -> None:
    """What a reader might have: the repository's examples and traces, a script and a log."""
    for name in ("examples", "traces"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "train.py").write_bytes((ROOT / "examples" / "plain_pytorch.py").read_bytes())
    (folder / "crash.log").write_bytes(_LOG.read_bytes())


def section(one: Transcript, folder: Path) -> str:
    """The heading, the command and what it prints, as Markdown."""
    return f"\n## {one.title}\n\n```text\n$ {one.command}\n{printed(one.command, folder)}\n```\n"


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        PAGE.write_text(_HEAD + "".join(section(one, folder) for one in TRANSCRIPTS), "utf-8")


if __name__ == "__main__":
    main()
