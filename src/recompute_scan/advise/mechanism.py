"""What a checkpoint mechanism is to the advice: its words, and how to take it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mechanism:
    """One API or setting that turns checkpointing on.

    Attributes:
        name: As written into annotations and results.
        title: What a person calls it.
        keep: How much speaks for keeping it when two are found; the higher is kept.
        why_keep: The reason, one sentence.
        remove: What to do to take it out, one sentence without the full stop.
        removable_call: Whether deleting the statement at the call site takes it out.
        caution: What else the call did, which must stay done; ``None`` when nothing.
        docs: Page of the framework that documents it.
    """

    name: str
    title: str
    keep: int
    why_keep: str
    remove: str
    removable_call: bool
    caution: str | None
    docs: str
