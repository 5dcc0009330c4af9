"""What to do: findings with their evidence and fix, and the rules that found nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recompute_scan.result.replays import Checkpoint, Level


@dataclass(frozen=True)
class Fix:
    """What to change. ``disposition`` is ``safe`` only where results cannot change.

    ``removes`` is the checkpoint that the change takes out, where one can be told. ``reason``
    says why the change needs a look where it is ``review``.
    """

    summary: str
    disposition: Literal["safe", "review"]
    diff: str | None
    keep: str
    remove: str
    docs: str
    removes: Checkpoint | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Finding:
    """One problem found, with the evidence for it."""

    code: str
    name: str
    severity: Literal["error", "warning", "info"]
    confidence: Level
    title: str
    detail: str
    evidence: tuple[str, ...]
    fix: Fix | None
    saving_ms: float | None
    saving_pct: float | None


@dataclass(frozen=True)
class Checked:
    """What became of one rule."""

    code: str
    name: str
    status: Literal["found", "clean", "not-applicable", "error"]
    why: str | None = None
