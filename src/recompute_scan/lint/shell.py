"""Launch commands in a shell script: their arguments as settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from msgspec import Struct

from recompute_scan.lint.facts import Setting

_LAUNCHERS = re.compile(r"\baccelerate\s+launch\b|\btorchrun\b|\bpython3?\b|\bdeepspeed\b")


class Launch(Struct, frozen=True):
    """One command that starts a training: its line, its script, its arguments."""

    line: int
    script: str | None
    settings: tuple[Setting, ...]

    def get(self, name: str) -> Setting | None:
        """The last value of an argument, which is what counts."""
        return next((s for s in reversed(self.settings) if s.path == (name,)), None)


def read_shell(text: str) -> Iterator[Launch]:
    """The launch commands of a shell script. What holds quotes over lines is left out."""
    start, command = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not command:
            start = number
        if line.endswith("\\"):
            command += line[:-1] + " "
            continue
        command += line
        if _LAUNCHERS.search(command):
            try:
                words = shlex.split(command, comments=True)
            except ValueError:
                words = []
            if words:
                yield _launch(words, start)
        command = ""


def _launch(words: list[str], line: int) -> Launch:
    settings = []
    script = next((word for word in words if word.endswith(".py")), None)
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[number + 1] if number + 1 < len(words) else "--"
        # A flag alone is on.
        given: object = value if equals else True if following.startswith("-") else following
        settings.append(Setting((name.replace("-", "_"),), given, line))
    return Launch(line, script, tuple(settings))
