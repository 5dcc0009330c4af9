"""What a commit's message has to look like, as the hook says it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "commit_message.py"
LONG = "lint: " + 67 * "x"


def told(message: str, *named: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *named], input=message, capture_output=True, text=True
    )
    assert done.returncode == int(bool(done.stderr))
    assert not done.stdout
    return done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "lint: Make the error of nothing to read in one place\n",
        "cost: Attribute work after a block to its removal\n\nWhy, in as many lines as it takes.\n",
        "pre-commit: Add a hook\n\n# Please enter the commit message\n# for your changes.\n",
        "# A comment first.\n\n" + LONG[:72],
        "docs: Show\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n",
        "Merge branch 'bench'\n",
        'Revert "a subject that is longer than the seventy-two characters that are allowed"\n',
    ],
)
def test_what_is_let_through(message: str) -> None:
    assert not told(message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("", "needs a scope"),
        ("Words\n", "needs a scope"),
        ("Cost: Attribute work\n", "needs a scope"),
        ("cost:Attribute work\n", "needs a scope"),
        ("lint and cost: Say why\n", "needs a scope"),
        (LONG, "73 characters"),
        ("lint: Say why\nand how\n", "empty line"),
    ],
)
def test_what_is_refused(message: str, words: str) -> None:
    assert words in told(message)


def test_git_names_a_file(tmp_path: Path) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text("Words\n", encoding="utf-8")
    assert "needs a scope" in told("", str(file))
    file.write_text("tests: Say it\n", encoding="utf-8")
    assert not told("", str(file))


def test_the_hooks_name_what_is_there() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (local,) = yaml.safe_load(text)["repos"]
    entries = {hook["id"]: hook["entry"].split() for hook in local["hooks"]}
    assert entries.keys() == {"ruff-format", "ruff-check", "codespell", "commit-message"}
    assert (ROOT / entries["commit-message"][1]) == SCRIPT
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert {"ruff", "codespell"} <= {line.partition("==")[0] for line in pinned.splitlines()}
