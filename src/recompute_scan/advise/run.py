"""What of a run bears on the advice: installed versions, and whether its weights are sharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """A run as far as it is known.

    Attributes:
        versions: Installed versions by the distribution's name; other facts may stand beside them.
        sharded: Whether FSDP is at work in the trace.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    sharded: bool = False

    def has(self, package: str, since: str) -> bool | None:
        """Whether the package is of this version or newer; ``None`` where that is not known."""
        installed = _numbers(self.versions.get(package, ""))
        return installed >= _numbers(since) if installed else None


UNKNOWN_RUN = Run()


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
