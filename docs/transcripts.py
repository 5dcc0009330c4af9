"""What the commands print, for ``docs/transcripts.md``: ``python docs/transcripts.py``.

Each is run as a shell runs it, at 80 columns and without colour, in a folder of the repository's
examples and traces. A test runs all but the recording again and compares.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "transcripts.md"
_LOG = ROOT / "tests" / "diagnose" / "corpus" / "known" / "RS204-guarded-save.log"


# Lines of an answer; what is asked for in full, or lists something, may be longer.
MOST_LINES = 15


@dataclass(frozen=True)
class Transcript:
    """One command below its heading; ``recorded`` where it prints other times every time, and
    ``full`` where it is not to fit into :data:`MOST_LINES`.
    """

    title: str
    command: str
    recorded: bool = False
    full: bool = False


TRANSCRIPTS = (
    Transcript("Record a script", "recompute-scan run --steps 5 train.py", recorded=True),
    Transcript("Record a script that fails", "recompute-scan run crash.py", recorded=True),
    Transcript("Verdict: doubled", "recompute-scan analyze traces/doubled_llama_fsdp"),
    Transcript("Verdict: full", "recompute-scan analyze traces/repaired_llama_fsdp"),
    Transcript("Verdict: partial", "recompute-scan run partial.py", recorded=True),
    Transcript("Verdict: none", "recompute-scan analyze traces/plain_none"),
    Transcript(
        "Verdict: inconclusive",
        "recompute-scan analyze traces/public/h100-nanogpt-compiled.json.gz",
    ),
    Transcript("Several ranks", "recompute-scan analyze traces/public"),
    Transcript("In one line", "recompute-scan analyze -q traces/doubled_llama_fsdp"),
    Transcript(
        "With the evidence", "recompute-scan analyze -v traces/doubled_llama_fsdp", full=True
    ),
    Transcript("Show the fix", "recompute-scan fix traces/doubled_llama_fsdp"),
    Transcript(
        "Compare two runs",
        "recompute-scan compare traces/doubled_llama_fsdp traces/repaired_llama_fsdp",
    ),
    Transcript(
        "Plan checkpoints for a limit",
        "recompute-scan plan --memory 22MB train.py",
        recorded=True,
    ),
    Transcript("List runs", "recompute-scan runs", recorded=True),
    Transcript("Refuse it in CI", "recompute-scan check traces/doubled_llama_fsdp"),
    Transcript("Read scripts alone", "recompute-scan lint examples/doubled_llama_fsdp.py"),
    Transcript("Explain a log", "recompute-scan explain crash.log"),
    Transcript("Explain a finding", "recompute-scan explain RS001"),
    Transcript("Explain a failure", "recompute-scan explain RS101"),
    Transcript("Explain a message", "recompute-scan explain E202"),
    Transcript("Errors: an unknown command", "recompute-scan anlyze trace.json"),
    Transcript("Errors: an unknown option", "recompute-scan run --step 5 train.py"),
    Transcript("Errors: an unknown launcher", "recompute-scan run -- nosuchlauncher"),
    Transcript("Errors: no trace", "recompute-scan analyze missing.json"),
    Transcript("Errors: no such finding", "recompute-scan explain RS01"),
)
# Every second block is checkpointed.
_PARTIAL = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)
for _ in range(30):
    x = torch.randn(64, 64)
    for number, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_CRASH = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

layer, calls = nn.Linear(8, 8), []


def block(x):
    calls.append(x)
    return layer(x[: len(calls)]).relu().square()


checkpoint(block, torch.randn(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
"""
_HEAD = """\
# Transcripts

The output of the commands on a terminal of 80 columns. Generated: `python docs/transcripts.py`.
"""


def printed(command: str, folder: Path) -> str:
    """What a command prints, errors among it, in the order of a terminal."""
    _, *arguments = shlex.split(command)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("FORCE_COLOR", "COLUMNS") and not name.startswith("RECOMPUTE_SCAN_")
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
    text = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    # Of the script's traceback, paths and all.
    return re.sub(r"^Traceback .*?(?=^Run: )", "…\n", text, flags=re.DOTALL | re.MULTILINE)


def prepare(folder: Path) -> None:
    """What a reader might have: the repository's examples and traces, a script and a log."""
    for name in ("examples", "traces"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "train.py").write_bytes((ROOT / "examples" / "plain_pytorch.py").read_bytes())
    (folder / "partial.py").write_text(_PARTIAL, "utf-8")
    (folder / "crash.py").write_text(_CRASH, "utf-8")
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
