"""What to run after a report: the same recording with the fix, and a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

_AFTER = "-after"
_MEASURING = ("--verify", "--without-checkpointing")


def commands_after(
    words: Sequence[str],
    output: Path | None,
    folder: Path,
    *,
    verify: bool,
    script: str = "",
) -> tuple[str, ...]:
    """What measures the fix, what records again once it is applied, what compares the two.

    The first is there only where ``verify`` says that it can be done. The second writes into a
    folder of its own, so that the recording before the fix stays.

    Args:
        words: The command line behind the program's name, ``run`` first.
        output: The folder that was asked for, if one was.
        folder: The folder that was written.
        verify: Whether the script can be run with the fix in memory.
        script: The script: what is before it are options of ours.
    """
    begin, *rest = words
    before = seen_from_here(folder)
    after = f"{before}{_AFTER}"
    measured = shlex.join(["recompute-scan", begin, "--verify", *rest])
    again = shlex.join(["recompute-scan", begin, *_recording(_into(rest, output, after), script)])
    compared = shlex.join(["recompute-scan", "compare", str(before), after])
    return (*((measured,) if verify else ()), again, compared)


def _recording(words: list[str], script: str) -> list[str]:
    """The words without what measures a fix, which takes many runs."""
    end = words.index(script) if script in words else len(words)
    return [word for word in words[:end] if word not in _MEASURING] + words[end:]


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
