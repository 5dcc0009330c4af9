"""What to run after a report: the same recording with the fix, and a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recompute_scan.result.run_record import NextCommand


_AFTER = "-after"
_MEASURING = ("--verify", "--without-checkpointing")


def commands_after(
    words: Sequence[str],
    output: Path | None,
    folder: Path,
    *,
    verify: bool,
    script: str = "",
) -> tuple[NextCommand, ...]:
    """What measures the fix, what compares gradients with those without checkpoints, what records
    again once the fix is applied, what compares the two recordings.

    The first two are there only where ``verify`` says that they can be done. The third writes into
    a folder of its own, so that the recording before the fix stays.

    Args:
        words: The command line behind the program's name, ``run`` first.
        output: The folder that was asked for, if one was.
        folder: The folder that was written.
        verify: Whether the script can be run with the fix in memory.
        script: The script: what is before it are options of ours.
    """
    from recompute_scan.result.run_record import NextCommand

    begin, *rest = words
    before = seen_from_here(folder)
    after = f"{before}{_AFTER}"
    measuring = _recording(rest, script)
    found = [
        NextCommand("record", _command(begin, _recording(_into(rest, output, after), script))),
        NextCommand("compare", _command("compare", [str(before), after])),
    ]
    if verify:
        found[:0] = [
            NextCommand("measure", _command(begin, [_MEASURING[0], *measuring])),
            NextCommand("compare-gradients", _command(begin, [*_MEASURING, *measuring])),
        ]
    return tuple(found)


def _command(begin: str, words: Sequence[str]) -> str:
    return shlex.join(["recompute-scan", begin, *words])


def _recording(words: Sequence[str], script: str) -> list[str]:
    """The words without what measures a fix, which takes many runs."""
    end = words.index(script) if script in words else len(words)
    return [*(word for word in words[:end] if word not in _MEASURING), *words[end:]]


def _into(rest: Sequence[str], output: Path | None, after: str) -> list[str]:
    """The words with another output folder; the first that names it is the option's."""
    if output is not None:
        for at, word in enumerate(rest):
            option, joined, value = word.partition("=")
            if option == "--output" and joined and Path(value) == output:
                return [*rest[:at], f"--output={after}", *rest[at + 1 :]]
            if word in ("-o", "--output") and Path(*rest[at + 1 : at + 2]) == output:
                return [*rest[: at + 1], after, *rest[at + 2 :]]
            if word.startswith("-o") and Path(word[2:]) == output:
                return [*rest[:at], f"-o{after}", *rest[at + 1 :]]
    return ["-o", after, *rest]


def seen_from_here(folder: Path) -> Path:
    """The path from the current directory, where it is below that."""
    try:
        return folder.relative_to(Path.cwd())
    except (OSError, ValueError):  # elsewhere, or the script has removed where it was
        return folder
