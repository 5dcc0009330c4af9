#!/usr/bin/env python3
"""Whether a commit's message has a subject like ``cost: Attribute work to its removal``.

    .ci/commit_message.py FILE                       as git's hook `commit-msg` calls it
    git log -1 --format=%B | .ci/commit_message.py   a message from standard input

The subject has a scope (a word in lower case, a colon and a space) and at most 72 characters, and a
body stands behind an empty line. Merges, and what git itself begins with, are let through. As a
hook: ``ln -s ../../.ci/commit_message.py .git/hooks/commit-msg``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
_SUBJECT = re.compile(r"[a-z][a-z0-9_/-]*: \S.*")
_OF_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
# Below this line git shows the changes to who writes the message.
_SCISSORS = "------------------------ >8 ------------------------"


def faults(message: str) -> list[str]:
    """What is wrong with a message, one sentence each."""
    kept, _, _ = message.partition(f"# {_SCISSORS}")
    lines = [line.rstrip() for line in kept.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        del lines[0]
    subject = lines[0] if lines else ""
    if subject.startswith(_OF_GIT):
        return []
    found = []
    if not _SUBJECT.fullmatch(subject):
        found.append(f"The subject needs a scope, as in `lint: Say why`: {subject!r}.")
    if len(subject) > LONGEST:
        found.append(f"The subject has {len(subject)} characters; {LONGEST} is the most.")
    if len(lines) > 1 and lines[1]:
        found.append("An empty line belongs between the subject and the body.")
    return found


def main() -> int:
    """Check the message in the file that is named, or from standard input."""
    named = sys.argv[1:]
    text = Path(named[0]).read_text(encoding="utf-8") if named else sys.stdin.read()
    found = faults(text)
    print("".join(f"{one}\n" for one in found), end="", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
