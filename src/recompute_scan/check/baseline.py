"""What is known and accepted: a small file in the user's repository."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from recompute_scan.check.sites import fingerprint, site_of
from recompute_scan.errors import InputError
from recompute_scan.result import Finding, Result

BASELINE_SCHEMA = "recompute-scan-baseline/1"


class Accepted(Struct, frozen=True):
    """One accepted finding.

    Attributes:
        code: Its code.
        fingerprint: See :func:`recompute_scan.check.sites.fingerprint`.
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
