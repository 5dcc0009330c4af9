"""This process among the ranks of a run: which it is, whether it records, and when all stop.

Nothing here is a collective, so that nothing can get between those of the script. A rank without
a process group, or whose store has gone, has nobody to ask and goes by what it knows itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recompute_scan.record.compat import holds
from recompute_scan.record.launch.collect import mark_folder
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.scope import DEFAULT, Plan, chosen

_PREFIX = "recompute_scan"


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
        self.store = _store_of_group()
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
            self.last_step.meet(_store_of_group())
        self.last_step.wait(made)


def _store_of_group() -> Any | None:
    """The store behind the script's process group, for keys of ours; ``None`` without one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    # Private, but there since 1.8 and what torchrun's own tools use; the group has no other door.
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - not in every build

    try:
        return c10d.PrefixStore(_PREFIX, c10d._get_default_store())
    except (AttributeError, RuntimeError, ValueError):
        return None


class LastStep:
    """After which step every rank stops, so that none waits for one that has stopped before.

    By itself this is the planned step, the same everywhere, and nobody needs to be asked. A rank
    that cannot record yet, because the script's own profiler runs, asks all for more steps and
    says later how many: :meth:`wait`, then :meth:`settle`. The others look when they would stop.

    Ranks that communicate in every step are one step apart at most, and the host may run ahead
    of a GPU a little further; so nothing is asked for later than :data:`NOTICE` steps before the
    end, and no end is set nearer than that.
    """

    NOTICE = 3

    def __init__(self, planned: int) -> None:
        self._last = planned
        self._open = False
        self._number = 0
        self._store: Any | None = None

    @property
    def met(self) -> bool:
        """Whether the others can be reached."""
        return self._store is not None

    def meet(self, store: Any | None) -> None:
        """The warm-up is over: the others can be reached now, if ever."""
        self._store = store

    def wait(self, made: int) -> bool:
        """Ask that nobody stops until more is said; ``False`` where it is too late for that."""
        if self._open:
            return True
        if made > self._last - self.NOTICE:
            return False
        self._open = True
        self._number = self._ask(lambda store: store.add("waits", 1), 0)
        return True

    def settle(self, made: int, needed: int) -> None:
        """What was waited for is over, and so many more steps are needed from here."""
        if not self._open:
            return
        self._open = False
        self._last = max(self._last, made + max(needed, self.NOTICE))
        self._ask(lambda store: store.set(f"wait{self._number}", str(self._last)), None)

    def passed(self, made: int) -> bool:
        """Has the last step been made, as far as any rank has said?"""
        if self._open or made < self._last:
            return False
        for number in range(1, self._ask(lambda store: store.add("waits", 0), 0) + 1):
            key = f"wait{number}"
            said = self._ask(lambda store, key=key: holds(store, key) and store.get(key), b"0")
            if not said:
                return False
            self._last = max(self._last, int(said))
        return made >= self._last

    def _ask(self, question: Any, otherwise: Any) -> Any:
        if self._store is None:
            return otherwise
        try:
            return question(self._store)
        except (RuntimeError, ValueError):  # it has gone with the rank that held it
            self._store = None
            return otherwise
