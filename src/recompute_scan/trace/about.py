"""What a file says about itself, before its events or behind them."""

from __future__ import annotations

from typing import Any

import msgspec

from recompute_scan.trace.health import count
from recompute_scan.trace.repair import mend
from recompute_scan.trace.schema import UNREADABLE, Document, decode_document


class About:
    """Collects what is said in any place of one file.

    Args:
        health: Counters to add to.
    """

    def __init__(self, health: dict[str, int]) -> None:
        self.metadata: dict[str, Any] = {}
        self._health = health

    def add(self, document: Document) -> None:
        """Take in the fields of a document; later ones go before earlier ones."""
        fields = msgspec.structs.asdict(document)
        del fields["traceEvents"]
        self.metadata |= {name: value for name, value in fields.items() if value is not None}

    def read(self, text: bytes) -> None:
        """Take in a document, repaired if need be; what cannot be read is counted."""
        try:
            self.add(decode_document(text))
        except UNREADABLE:
            mended = mend(text, decode_document, UNREADABLE)
            count(self._health, "metadata_repaired" if mended else "metadata_unreadable")
            if mended:
                self.add(mended[0])

    @property
    def rank(self) -> int | None:
        """The rank of the recorded process, if said."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and 0 <= rank < 2**31 else None
