"""Where in the user's code a finding is: the line to annotate."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath

from msgspec import Struct

from recompute_scan.result import Checkpoint, Finding, Result

_SITE = re.compile(r"(.+):(\d{1,9})", re.DOTALL)


class Site(Struct, frozen=True):
    """A line of a file; the path as the run saw it, relative where it could be."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def parse_site(text: str | None) -> Site | None:
    """``file:line`` as a site, ``None`` for anything else."""
    found = _SITE.fullmatch(text or "")
    return Site(found[1], int(found[2])) if found and int(found[2]) else None


def site_of(finding: Finding, result: Result) -> Site | None:
    """The line to change, or the first that the evidence names; ``None`` where none is known."""
    if finding.fix is not None and finding.fix.removes is not None:
        site = parse_site(finding.fix.removes.call_site)
        if site is not None:
            return site
    return next((site for c in _named(finding, result) if (site := parse_site(c.call_site))), None)


def fingerprint(finding: Finding, result: Result) -> str:
    """The same for the same finding in a later run: 16 hex digits.

    Made of the code and of the mechanisms and files that the evidence names, without line
    numbers, counts and times, which change with every edit and every run.
    """
    parts = {
        f"{checkpoint.mechanism}|{_stable(site.file) if site else ''}"
        for checkpoint in _named(finding, result)
        for site in [parse_site(checkpoint.call_site)]
    }
    text = "\n".join([finding.code, *sorted(parts)])
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _stable(file: str) -> str:
    """The path, or the name alone of a file whose folder differs from machine to machine."""
    return PurePosixPath(file).name if file.startswith("/") else file


def _named(finding: Finding, result: Result) -> list[Checkpoint]:
    """The checkpoints whose call sites are in the finding's evidence, outermost first."""
    seen: dict[tuple[str | None, str | None], Checkpoint] = {}
    for region in result.regions:
        for checkpoint in region.checkpoints:
            site = checkpoint.call_site
            if site and any(line.endswith(f" {site}") for line in finding.evidence):
                seen.setdefault((checkpoint.mechanism, site), checkpoint)
    return list(seen.values())
