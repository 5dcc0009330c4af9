"""How to take one checkpoint out, in a sentence: in the words of the line, and of the version."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct, field

from recompute_scan.cost.footprint import Levels
from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.known import find_mechanism
from recompute_scan.frameworks.mechanism import FEWER, Mechanism, Rename
from recompute_scan.result import Checkpoint
from recompute_scan.run_info import Source
from recompute_scan.units import is_before

_LINE = re.compile(r"(?P<file>.+):\d+", re.DOTALL)


class RunFacts(Struct, frozen=True):
    """A run as far as it is known.

    Attributes:
        versions: Installed versions by the distribution's name; other facts may be beside them.
        sharded: Whether FSDP is at work in the trace.
        levels: What either of two levels of checkpoints keeps out of memory, where that is known.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    sharded: bool = False
    levels: Levels | None = None

    def has(self, package: str, since: str) -> bool | None:
        """Whether the package is of this version or newer; ``None`` where that is not known."""
        before = is_before(self.versions.get(package, ""), since)
        return None if before is None else not before


UNKNOWN_RUN = RunFacts()

NOT_READ = "The file of that line could not be read, so there is no diff to check."


def title(checkpoint: Checkpoint, mechanism: Mechanism | None) -> str:
    """What a person calls the checkpoint."""
    text = mechanism.title if mechanism else checkpoint.mechanism
    text = text or "a checkpoint of unknown origin"
    return f"{text} (`{checkpoint.function}`)" if checkpoint.function else text


def mechanism_of(checkpoint: Checkpoint) -> Mechanism | None:
    """What switched the checkpoint on; a function of the project's own where only that is known."""
    own = pytorch.OWN if checkpoint.mechanism is None and checkpoint.function else None
    return find_mechanism(checkpoint.mechanism) or own


def title_of(checkpoint: Checkpoint) -> str:
    """What a person calls the checkpoint; says so where that is not known."""
    return title(checkpoint, mechanism_of(checkpoint))


def place(site: str | None) -> str:
    """Where it was asked for, to follow a noun: `` at train.py:3``; empty where that is unknown."""
    if not site:
        return ""
    return f" at {site}" if _LINE.fullmatch(site) else f" by {site}"


def removal(mechanism: Mechanism, site: str | None, source: Source | None, run: RunFacts) -> str:
    """What to do to take it out, with the place, one sentence without the full stop."""
    if site and not _LINE.fullmatch(site):
        if _is_variable(site):
            return f"unset {site}"
        if mechanism.on_by_default:
            given = f"{site} false" if site.startswith("-") else f"{site}=false"
            return f"pass {given} on the command line: left out, it is on"
        return f"leave {site} out of the command line"
    statement = source.statement if source else ""
    keyword = next((name for name in _settings(mechanism) if _names(statement, name)), None)
    if keyword is not None:
        value = next(edit.value for edit in mechanism.edits if edit.name == keyword)
        return f"set {keyword}={value}{place(site)}"
    if _in_configuration(site):
        return f"switch it off{place(site)}"
    return f"{worded(mechanism.remove, mechanism, run, statement)}{place(site)}"


def worded(text: str, mechanism: Mechanism, run: RunFacts, statement: str = "") -> str:
    """The text in the words of the statement, else of the installed version, else of both."""
    for rename in mechanism.renames:
        text = _renamed(text, rename, run, statement)
    return text


def why_no_diff(mechanism: Mechanism, site: str | None, source: Source | None) -> str:
    """Why there is no diff to check, one sentence."""
    if not site:
        return "The line to change was not found, so there is no diff to check."
    if not _LINE.fullmatch(site):
        where = "in the environment" if _is_variable(site) else "on the command line"
        return f"It was switched on {where}, so there is no line to change."
    if _in_configuration(site):
        return "It was switched on in a configuration file, which other jobs may share."
    if source is None:
        return NOT_READ
    if source.installed:
        return "That line belongs to an installed package: change it where the package is made."
    if not source.whole_lines:
        return "The statement shares its line with others, so there is no diff to check."
    if mechanism.caution and not mechanism.edits:
        return mechanism.caution
    return "The change is not one to the statement on that line, so there is no diff to check."


def _renamed(text: str, rename: Rename, run: RunFacts, statement: str) -> str:
    if rename.old not in text or _names(statement, rename.old):
        return text
    new = run.has(rename.package, rename.since)
    if new or _names(statement, rename.new):
        return text.replace(rename.old, rename.new)
    if new is None:
        return f"{text} ({rename.new} from {rename.package} {rename.since})"
    return text


def _settings(mechanism: Mechanism) -> list[str]:
    return [edit.name for edit in mechanism.edits if edit.how in ("keyword", "entry")]


def _names(statement: str, name: str) -> bool:
    return bool(re.search(rf"\b{re.escape(name)}\b", statement))


def _is_variable(site: str) -> bool:
    return site.isupper() and site.isidentifier()


def _in_configuration(site: str | None) -> bool:
    found = _LINE.fullmatch(site or "")
    return found is not None and found["file"].endswith((".yaml", ".yml", ".json", ".toml", ".ini"))


def leave_out(mechanism: Mechanism | None, run: RunFacts) -> str:
    """How to leave out single layers, in the words for the installed version.

    They have ``{layers}`` and ``{title}`` in them.
    """
    if mechanism is None:
        return FEWER
    old = (b for b in mechanism.fewer_before if run.has(b.package, b.version) is False)
    return next((before.words for before in old), mechanism.fewer)
