"""What is known and accepted: a small file in the user's repository, and the lines it is about."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec
from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.result import Checkpoint, Finding, Result

_SITE = re.compile(r"(.+):(\d{1,9})", re.DOTALL)
BASELINE_SCHEMA = "recompute-scan-baseline/1"


class Site(Struct, frozen=True):
    """A line of a file; the path as the run saw it, relative where it could be."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _parse_site(text: str | None) -> Site | None:
    """``file:line`` as a site, ``None`` for anything else."""
    found = _SITE.fullmatch(text or "")
    return Site(found[1], int(found[2])) if found and int(found[2]) else None


def site_of(finding: Finding, result: Result) -> Site | None:
    """The line to change, or the first that the evidence names; ``None`` where none is known."""
    if finding.fix is not None and finding.fix.removes is not None:
        site = _parse_site(finding.fix.removes.call_site)
        if site is not None:
            return site
    return next((site for c in _named(finding, result) if (site := _parse_site(c.call_site))), None)


def fingerprint(finding: Finding, result: Result) -> str:
    """The same for the same finding in a later run: 16 hex digits.

    Made of the code and of the mechanisms and files that the evidence names, without line
    numbers, counts and times, which change with every edit and every run.
    """
    parts = {
        f"{checkpoint.mechanism}|{_stable(site.file) if site else ''}"
        for checkpoint in _named(finding, result)
        for site in [_parse_site(checkpoint.call_site)]
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


class Accepted(Struct, frozen=True):
    """One accepted finding.

    Attributes:
        code: Its code.
        fingerprint: See :func:`recompute_scan.check.baseline.fingerprint`.
        recompute_per_backward: Recomputes when it was accepted; more of them are news.
        title: What it said, for whoever reads the file.
        site: Where it was, for whoever reads the file.
    """

    code: str
    fingerprint: str
    recompute_per_backward: float | None = None
    title: str = ""
    site: str | None = None


class Baseline(Struct, frozen=True):
    """The file."""

    accepted: tuple[Accepted, ...]
    schema: str = BASELINE_SCHEMA


def accepts(baseline: Sequence[Accepted], finding: Finding, result: Result) -> bool:
    """Whether the finding is known, and no worse than it was."""
    print_of = fingerprint(finding, result)
    runs = result.recompute_per_backward
    return any(
        known.code == finding.code
        and known.fingerprint == print_of
        and (
            known.recompute_per_backward is None
            or runs is None
            or runs <= known.recompute_per_backward
        )
        for known in baseline
    )


def baseline_json(result: Result) -> str:
    """A baseline that accepts all that was found, as JSON text."""
    accepted = tuple(
        Accepted(
            code=finding.code,
            fingerprint=fingerprint(finding, result),
            recompute_per_backward=result.recompute_per_backward,
            title=finding.title,
            site=str(site) if (site := site_of(finding, result)) else None,
        )
        for finding in result.findings
    )
    encoded = msgspec.json.encode(Baseline(accepted))
    return msgspec.json.format(encoded, indent=2).decode() + "\n"


def parse_baseline(data: bytes, name: str) -> tuple[Accepted, ...]:
    """What the file accepts.

    Raises:
        InputError: It is no baseline of this version (``E328``).
    """
    try:
        baseline = msgspec.json.decode(data, type=Baseline)
    except (UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError("E328", f"{name} is no baseline.", why=str(error)) from None
    if baseline.schema != BASELINE_SCHEMA:
        raise InputError(
            "E328", f"{name} is no baseline.", why=f"its schema is {baseline.schema!r}"
        )
    return baseline.accepted
