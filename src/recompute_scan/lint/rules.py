"""Switches in files, and the findings that follow from them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.frameworks.base import Variant

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


class CheckpointSwitch(Struct, frozen=True):
    """A statement that switches checkpointing on.

    Attributes:
        kind: ``model``, a library's own switch, ``wrapper``, around its layers, or ``call``, a
            call of torch's function.
        variant: Which of torch's two, where the file says so.
        line: Where.
        subject: The expression that is checkpointed, as written; ``None`` where it is unknown.
        scope: Names of the functions and classes around the statement.
        branch: Conditions and loops around it, each with the arm that it is in.
        certain: It covers a library's decoder layers whole, as far as the file shows.
        around: The class that a wrapper is put around, as its ``check_fn`` has it.
        where: For a wrapper that is not in the script, what wraps, in words.
    """

    kind: Literal["model", "wrapper", "call"]
    variant: Variant
    line: int
    subject: str | None = None
    scope: tuple[str, ...] = ()
    branch: tuple[tuple[int, str], ...] = ()
    certain: bool = False
    where: str = ""
    around: str = ""

    def moved(self, call: CalledHelper, subject: str, *, certain: bool) -> CheckpointSwitch:
        """The same switch, at the call of the helper that it is in."""
        return replace(
            self,
            line=call.line,
            subject=subject,
            scope=call.scope,
            branch=call.branch,
            certain=certain,
        )


class CalledHelper(Struct, frozen=True):
    """A call that may switch checkpointing on: the function, its arguments, its place."""

    name: str
    line: int
    given: tuple[str, ...]
    scope: tuple[str, ...]
    branch: tuple[tuple[int, str], ...]


class Pinned(Struct, frozen=True):
    """The behavior of the version of transformers that is pinned or installed.

    Attributes:
        default: The variant of ``gradient_checkpointing_enable()``: reentrant before 5.
        source: Where the version is from, in words; empty where none is known.
        refuses: Its Trainer refuses ``gradient_checkpointing`` together with FSDP's, from 4.33 on
            (read in 4.31, 4.32, 4.33, 4.34, 4.35, 4.57, 5.0 and 5.23).
    """

    default: Variant = "default"
    refuses: bool = True
    source: str = ""


class Found(Struct, frozen=True, order=True):
    """One finding: the line to change, what is so, why, and what to do.

    ``edit`` is what to do as an edit of that line, where one is enough: delete the statement, or
    set the value to false.
    """

    file: str
    line: int
    code: str
    title: str
    why: str
    fix: str
    edit: Literal["", "delete", "off"] = ""

    @property
    def name(self) -> str:
        """The rule's name."""
        return RULES[self.code][0]

    @property
    def severity(self) -> Severity:
        """How certain and how bad it is."""
        return RULES[self.code][1]


class Unreadable(Exception):
    """A file that is not read, and why."""
