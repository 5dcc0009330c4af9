"""The README does what it says: its commands run, and print what stands below them.

Each line of a ``console`` block that begins with ``$`` is run, in a folder that has the
repository's examples and traces, a ``train.py`` and a ``trace.json.gz``; those of the pages on
recording, reading and measuring too. Lines below a command
are its output to the letter, but for ``…`` on a line of its own, which stands for any lines.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from recompute_scan.cli.run import run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = [
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("recording.md", "trace-formats.md", "verify.md")
]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "notebooks/*.md", "traces/**/*.md")
    for page in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# `make release-check` runs these commands with an installed wheel.
PYTHON = os.environ.get("RECOMPUTE_SCAN_PYTHON", sys.executable)

# Its layers are checkpointed by two switches, so that there is a fix to apply.
SCRIPT = """\
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + checkpoint(self.mlp, x, use_reentrant=False)


model = nn.Sequential(*[Layer() for _ in range(3)])
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

NOT_RUN = {
    "pip install": "the environment that runs the tests is installed already",
}


@dataclass(frozen=True)
class Command:
    line: str
    output: tuple[str, ...]


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in _FENCE.findall(page) if kind == language]


def commands(page: str) -> list[Command]:
    found: list[Command] = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *output = part.rstrip("\n").split("\n")
            found.append(Command(line, tuple(output)))
    return found


def is_run(command: Command) -> bool:
    return not any(command.line.startswith(name) for name in NOT_RUN)


RUN = [command for command in commands(README) if is_run(command)]
RUN_OF_DOCS = [command for page in DOCS for command in commands(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader might stand: a checkout, with a script and a trace of their own."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("examples", "traces"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "train.py").write_text(SCRIPT)
    trace = ROOT / "traces" / "public" / "mi300x-resnet-checkpointed.json.gz"
    shutil.copy(trace, folder / "trace.json.gz")
    log = ROOT / "tests" / "diagnose" / "corpus" / "known" / "RS204-guarded-save.log"
    shutil.copy(log, folder / "crash.log")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=[command.line for command in RUN])
def test_command(command: Command, folder: Path) -> None:
    _run(command, folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_OF_DOCS, ids=[command.line for command in RUN_OF_DOCS])
def test_docs(command: Command, folder: Path) -> None:
    _run(command, folder)


def _run(command: Command, folder: Path) -> None:
    program, *arguments = shlex.split(command.line)
    assert program == "recompute-scan"
    done = subprocess.run(
        [PYTHON, "-m", "recompute_scan", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        # Two busy threads on a core that others use too take many times as long as one.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    if command.output:
        missing = first_missing(command.output, done.stdout.splitlines())
        assert missing is None, f"not printed (any more): {missing!r}\n{done.stdout}"


def test_it_shows_the_doubled_example_as_printed() -> None:
    assert any("Verdict: doubled" in line for command in RUN for line in command.output)


def test_what_is_not_run_is_named_and_there() -> None:
    left_out = [command.line for command in commands(README) if not is_run(command)]
    assert all(any(line.startswith(name) for line in left_out) for name in NOT_RUN)
    # A command in a block of another kind would escape these tests.
    assert {kind for kind, _ in _FENCE.findall(README)} == {"console", "python"}


def test_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (reading,) = blocks(README, "python")
    names: dict[str, object] = {}
    exec(reading, names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "doubled 2.0"
    assert sum("model.layers." in line for line in printed) == 4
    assert type(names["figure"]).__name__ == "Figure"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if heading:
            assert heading in headings(other), target


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them: lower case, punctuation dropped, spaces to hyphens."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_steps_of_run_are_its_defaults() -> None:
    defaults = {option.name: option.default for option in run.params}
    rows = re.findall(r"^\| (\d+) \|[^|]*\(`--([\w-]+)`\) \|$", DOCS[0], re.MULTILINE)
    assert {name: int(steps) for steps, name in rows} == {
        name: defaults[name.replace("-", "_")] for name in ("warmup", "timing-steps", "steps")
    }


def first_missing(expected: tuple[str, ...], printed: list[str]) -> str | None:
    """The first expected line that does not follow as it should; ``None`` if all do."""
    at, skipping = 0, False
    for line in expected:
        if line == "…":
            skipping = True
        elif not skipping:
            if at >= len(printed) or printed[at] != line:
                return line
            at += 1
        else:
            if line not in printed[at:]:
                return line
            at, skipping = printed.index(line, at) + 1, False
    return None if skipping or at == len(printed) else f"(nothing after) {printed[at]}"


def test_the_comparison_of_outputs_sees_differences() -> None:
    printed = ["a", "b", "c", "d"]
    assert first_missing(("a", "…", "c", "d"), printed) is None
    assert first_missing(("a", "…"), printed) is None
    assert first_missing(("a", "c", "…"), printed) == "c"
    assert first_missing(("…", "c", "b", "d"), printed) == "b"
    assert first_missing(("a", "b", "c"), printed) == "(nothing after) d"
