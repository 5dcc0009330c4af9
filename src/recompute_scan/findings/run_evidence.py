"""What a rule gets to see of what the run itself saw, with a trace beside it or without."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from recompute_scan.faithful import ComparedRegion, Fidelity
from recompute_scan.result import Level
from recompute_scan.run_info import Source


class RunEvidence(Struct, frozen=True):
    """What was seen while the script ran.

    Attributes:
        fidelity: How recomputes compare with their forward; ``None`` where nobody looked.
        untrained: Modules whose trainable weights got no gradient; ``None`` where nobody looked.
        sources: Statements at call sites.
        confidence: It was seen, and not inferred from a trace.
    """

    fidelity: Fidelity | None
    untrained: tuple[str, ...] | None
    sources: Mapping[str, Source]
    confidence: Level = "high"

    @property
    def no_comparison(self) -> str | None:
        """Why no recompute was compared, one sentence; ``None`` where some were."""
        if self.fidelity is None:
            return "Only `recompute-scan run` compares recomputes with their forward."
        return self.fidelity.why_not_compared

    @property
    def regions(self) -> tuple[ComparedRegion, ...]:
        """The regions that were entered in the compared step."""
        return self.fidelity.regions if self.fidelity is not None else ()

    @property
    def compared(self) -> tuple[ComparedRegion, ...]:
        """Those of which a recompute was compared."""
        return self.fidelity.compared if self.fidelity is not None else ()
