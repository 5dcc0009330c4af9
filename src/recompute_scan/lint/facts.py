"""What a file says, and what follows from it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Variant = Literal["reentrant", "non-reentrant", "default", "unknown"]
Severity = Literal["error", "warning", "info"]

# The rules: code, name, severity.
RULES: dict[str, tuple[str, Severity]] = {
    "RS601": ("will-double", "error"),
    "RS602": ("may-double", "warning"),
    "RS603": ("two-switches", "warning"),
    "RS604": ("will-fail", "error"),
    "RS605": ("changes-gradients", "info"),
    "RS606": ("idle-setting", "info"),
}


class Switch(Struct, frozen=True):
    """A statement that switches checkpointing on.

    Attributes:
        kind: ``model``, a library's own switch, or ``wrapper``, around its layers.
        variant: Which of torch's two, where the file says so.
        line: Where.
        subject: The expression that is checkpointed, as written; ``None`` where it is not told.
        scope: Names of the functions and classes around the statement.
        branch: Conditions and loops around it, each with the arm that it is in.
        certain: It covers a library's decoder layers whole, as far as the file tells.
    """

    kind: Literal["model", "wrapper"]
    variant: Variant
    line: int
    subject: str | None = None
    scope: tuple[str, ...] = ()
    branch: tuple[tuple[int, str], ...] = ()
    certain: bool = False


class Found(Struct, frozen=True, order=True):
    """One finding: the line to change, what is so, why, and what to do."""

    file: str
    line: int
    code: str
    title: str
    why: str
    fix: str

    @property
    def name(self) -> str:
        """The rule's name."""
        return RULES[self.code][0]

    @property
    def severity(self) -> Severity:
        """How certain and how bad it is."""
        return RULES[self.code][1]


class Setting(Struct, frozen=True):
    """One value of a configuration file or command line: its keys from the root on."""

    path: tuple[str, ...]
    value: object
    line: int


class Unreadable(Exception):
    """A file that is not read, and why."""
