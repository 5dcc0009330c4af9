"""Errors, with the words a person needs and the status a shell needs.

ScanError
├── UsageError        2   asked for something that makes no sense
├── MissingExtra      2   a package that this command needs is not installed
├── InputError        3   a file that cannot be used
└── RunError          3   a run that gave nothing to analyse

Every error says what happened, why (where known) and what to try; each code has a
paragraph in ``docs/messages.md``.
"""

from __future__ import annotations

from collections.abc import Collection

from recompute_scan.terminal import inert


class ScanError(Exception):
    """An error for a person: ``code``, what, why and what to try.

    Attributes:
        code: Stable identifier such as ``E301``; see ``docs/messages.md``.
        what: What happened, one sentence.
        why: The cause, or ``None`` where it is not known.
        hint: What to try next, or ``None``.
        exit_status: What the command line ends with.
    """

    exit_status = 70

    def __init__(
        self, code: str, what: str, *, why: str | None = None, hint: str | None = None
    ) -> None:
        # Exception's own is not called: args stay as given, and pickle makes the error of them.
        self.code = code
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        # Names of files and words of others stand in all of them: a line each, whatever they hold.
        parts = [f"{inert(self.what)} [{self.code}]"]
        if self.why:
            parts.append(f"why: {inert(self.why)}")
        if self.hint:
            parts.append(f"try: {inert(self.hint)}")
        return "\n".join(parts)


def how_to_add(extra: str) -> str:
    """The command that installs an extra, from a checkout: no package index has this package, and
    anybody may take a name that is free there.
    """
    return f'in the checkout of recompute-scan: pip install ".[{extra}]"'


def meant(word: str, known: Collection[str]) -> str:
    """The beginning of a hint: known words that differ in the end or in few letters, if any do."""
    import difflib  # noqa: PLC0415 - few words are wrong

    near = [one for one in known if len(word) > 1 and one.startswith(word[:-1])]
    near = near or difflib.get_close_matches(word, known, cutoff=0.75)
    return f"did you mean {' or '.join(near[:3])}? " if near else ""


class UsageError(ScanError):
    """The command was asked for something that makes no sense (status 2)."""

    exit_status = 2


class MissingExtra(UsageError):
    """A package that only some commands need is not installed (status 2)."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            "E201",
            f"{purpose} needs {package}, which is not installed.",
            hint=how_to_add(extra),
        )


class InputError(ScanError):
    """An input that cannot be used (status 3)."""

    exit_status = 3


class RunError(ScanError):
    """A run that gave nothing to analyse (status 3)."""

    exit_status = 3
