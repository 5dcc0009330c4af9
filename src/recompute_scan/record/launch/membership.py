"""This process among the ranks of a run: which one it is, whether it records, when all stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recompute_scan.record.launch.collect import mark_folder
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.launch.peers import LastStep, store_of_group
from recompute_scan.record.scope import DEFAULT, Plan, chosen


class Membership:
    """One rank among the others.

    Attributes:
        ranks: This process among the others, as last known.
        store: The store of the script's process group, once :meth:`settle` has looked.
        chosen: Whether this rank is to record; known from then on.
        last_step: After which step all of them stop.
    """

    def __init__(self, plan: Plan, recording_ranks: str) -> None:
        self._recording_ranks = recording_ranks
        self.ranks = rank_facts()
        self.store: Any | None = None
        self.chosen = True
        self.last_step = LastStep(plan.wanted)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.ranks.world_size == 1

    def look(self) -> None:
        """Ask again which rank this is."""
        self.ranks = rank_facts()

    def settle(self, folder: Path) -> str | None:
        """The warm-up is over: meet the others, and see whether this one is to record.

        Returns:
            What is to be said where the ranks that were asked for are none of the run's.
        """
        self.ranks = rank_facts()  # now, because the script may leave its group before it ends
        self.store = store_of_group()
        self.last_step.meet(self.store)
        mark_folder(folder, self.store, self.ranks.rank)
        warning = None
        recording = chosen(self._recording_ranks, self.ranks.world_size)
        if not recording:
            warning = (
                f"--ranks {self._recording_ranks} names none of the {self.ranks.world_size} ranks "
                "of this run; the first and the last were recorded."
            )
            recording = chosen(DEFAULT, self.ranks.world_size)
        self.chosen = self.alone or self.ranks.rank in recording
        return warning

    def go_on(self, made: int) -> None:
        """The script goes on here, so it must go on everywhere, if there is time to say so."""
        if self.alone and rank_facts().world_size == 1:
            return
        if not self.last_step.met:
            self.last_step.meet(store_of_group())
        self.last_step.wait(made)
