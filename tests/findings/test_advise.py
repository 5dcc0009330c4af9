"""Which checkpoint stays, and a diff that really takes the other one out."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from recompute_scan.advise import advise_removal, title_of
from recompute_scan.advise.diff import removal_diff
from recompute_scan.advise.registry import MECHANISMS, find_mechanism
from recompute_scan.result import Checkpoint
from recompute_scan.run_info import Source

CALL = "model.enable()"


def source_of(text: str, statement: str, alone: bool = False, around: int = 3) -> Source:
    """The statement in a file's text as `run` would have noted it."""
    lines = text.splitlines()
    wanted = statement.splitlines()
    begin = next(
        n for n in range(len(lines)) if [x.strip() for x in lines[n : n + len(wanted)]] == wanted
    )
    end = begin + len(wanted) - 1
    first, last = max(0, begin - around), min(len(lines) - 1, end + around)
    return Source(first + 1, "\n".join(lines[first : last + 1]), begin + 1, end + 1, alone, True)


@pytest.mark.parametrize(
    ("before", "after", "alone"),
    [
        ("a = 1\nmodel.enable()\nb = 2\n", "a = 1\nb = 2\n", False),
        ("model.enable()\nb = 2\nc = 3\nd = 4\ne = 5\n", "b = 2\nc = 3\nd = 4\ne = 5\n", False),
        ("a = 1\nb = 2\nmodel.enable()\n", "a = 1\nb = 2\n", False),
        ("model.enable()\n", "", False),
        ("if big:\n    model.enable()\nb = 2\n", "if big:\n    pass\nb = 2\n", True),
        ("a = 1\nmodel.enable()\nmodel.enable()\n", "a = 1\nmodel.enable()\n", False),
        ("a = 1\n\n\tx = 1\n\n\nmodel.enable()\n\n\n", "a = 1\n\n\tx = 1\n\n\n\n\n", False),
        ("é = 'ü'\nmodel.enable()\nb = '漢'\n", "é = 'ü'\nb = '漢'\n", False),
    ],
    ids=["plain", "first", "last", "only-line", "sole-in-block", "twice", "blank", "unicode"],
)
@pytest.mark.parametrize("tool", ["git", "patch"])
def test_the_diff_applies(tmp_path: Path, before: str, after: str, alone: bool, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    apply = {"git": ["git", "apply", "-"], "patch": ["patch", "-p1"]}[tool]
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "train.py"
    file.write_text(before, encoding="utf-8")
    diff = removal_diff("src/train.py:2", source_of(before, CALL, alone))
    done = subprocess.run(apply, input=diff.encode(), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert (file.read_text(encoding="utf-8") if file.exists() else "") == after


def test_a_statement_of_several_lines_goes_whole(tmp_path: Path) -> None:
    before = (
        "def build():\n    model = make()\n    apply(\n        model,\n    )\n    return model\n"
    )
    source = source_of(before, "apply(\nmodel,\n)")
    (tmp_path / "train.py").write_text(before)
    diff = removal_diff("train.py:3", source)
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True)
    after = (tmp_path / "train.py").read_text()
    assert after == "def build():\n    model = make()\n    return model\n"
    ast.parse(after)


def test_an_absolute_path_is_not_prefixed() -> None:
    diff = removal_diff("/home/me/train.py:1", source_of("model.enable()\nb = 2\n", CALL))
    assert diff.splitlines()[:2] == ["--- /home/me/train.py", "+++ /home/me/train.py"]


N, R = "non-reentrant", "reentrant"


def checkpoint(depth: int, mechanism: str | None, variant: str | None = N) -> Checkpoint:
    return Checkpoint(depth, variant, mechanism, f"train.py:{depth + 1}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outer", "inner", "kept", "dropped"),
    [
        (("fsdp-wrapper", N), ("hf-gradient-checkpointing", R), 0, 1),
        (("hf-gradient-checkpointing", N), ("fsdp-wrapper", R), 1, 0),
        (("fsdp-wrapper", N), ("composable-checkpoint", N), 0, 1),
        (("torch-checkpoint", N), ("hf-gradient-checkpointing", R), 1, 0),
        (("checkpoint-sequential", R), ("torch-checkpoint", N), 0, 1),
        # Of two equal ones the non-reentrant, and of two equal in that too the outer one.
        (("torch-checkpoint", R), ("torch-checkpoint", N), 1, 0),
        (("torch-checkpoint", N), ("torch-checkpoint", R), 0, 1),
        (("torch-checkpoint", R), ("torch-checkpoint", R), 0, 1),
        # What is not known is never told to stay.
        (("of-tomorrow", N), ("torch-checkpoint", R), 1, None),
    ],
)
def test_which_one_stays(
    outer: tuple[str, str], inner: tuple[str, str], kept: int, dropped: int | None
) -> None:
    stack = (checkpoint(0, *outer), checkpoint(1, *inner))
    fix = advise_removal(stack, {})
    assert fix is not None
    if dropped is None:
        assert (fix.diff, fix.disposition) == (None, "review")
        return
    assert fix.keep.startswith(title_of(stack[kept].mechanism))
    assert fix.remove == f"{title_of(stack[dropped].mechanism)} at train.py:{dropped + 1}"


def test_one_checkpoint_needs_no_fix() -> None:
    assert advise_removal((checkpoint(0, "fsdp-wrapper"),), {}) is None
    assert advise_removal((), {}) is None


def test_two_unknown_checkpoints_get_general_advice() -> None:
    fix = advise_removal((checkpoint(0, None), checkpoint(1, None)), {})
    assert fix is not None
    assert (fix.diff, fix.disposition) == (None, "review")


@pytest.mark.parametrize(("whole_lines", "has_diff"), [(True, True), (False, False)])
def test_a_line_that_holds_more_is_not_deleted(whole_lines: bool, has_diff: bool) -> None:
    source = Source(1, "model.enable(); train()", 1, 1, False, whole_lines)
    stack = (checkpoint(1, "fsdp-wrapper"), checkpoint(0, "hf-gradient-checkpointing"))
    fix = advise_removal(stack, {"train.py:1": source})
    assert fix is not None
    assert (fix.diff is not None) == has_diff


def test_a_call_whose_result_is_used_is_not_deleted() -> None:
    source = Source(1, "x = checkpoint(f, x)", 1, 1, False, True)
    stack = (checkpoint(1, "fsdp-wrapper"), checkpoint(0, "torch-checkpoint"))
    fix = advise_removal(stack, {"train.py:1": source})
    assert fix is not None
    assert fix.diff is None


def test_mechanisms_have_names_of_their_own() -> None:
    names = [mechanism.name for mechanism in MECHANISMS]
    assert len(set(names)) == len(names)
    assert [find_mechanism(name) for name in names] == list(MECHANISMS)
    assert find_mechanism("of-tomorrow") is find_mechanism(None) is None
    assert title_of("of-tomorrow") == "of-tomorrow"
    assert title_of(None)
