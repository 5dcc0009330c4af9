"""What to record, in which ranks, and in words what of it could not be had."""

from __future__ import annotations

import re

from msgspec import Struct

from recompute_scan.errors import UsageError

# The first rank, and the one that is furthest from it: another node, another pipeline stage.
DEFAULT = "0,last"

_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def chosen(text: str, world_size: int) -> frozenset[int]:
    """The ranks that ``text`` names among ``world_size``, 0-based; empty where it names no such.

    Args:
        text: ``all``, or a list with commas of ranks (``3``), ranges with both ends (``8-15``)
            and ``last``.
        world_size: How many ranks there are, at least 1.

    Raises:
        UsageError: The text is none of these (``E224``).
    """
    if text == "all":
        return frozenset(range(world_size))
    found: set[int] = set()
    for item in text.split(","):
        if item.strip() == "last":
            found.add(world_size - 1)
            continue
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                "E224",
                f"--ranks {text} names no ranks.",
                hint="all, or a list such as 0, 0,last or 0,8-15",
            )
        first = int(match[1])
        found.update(range(first, min(int(match[2] or first), world_size - 1) + 1))
    return frozenset(rank for rank in found if rank < world_size)


class Plan(Struct, frozen=True):
    """How many optimizer steps each phase takes.

    Attributes:
        warmup: Steps before anything is recorded, at least 1.
        timing: Steps timed without a profiler.
        steps: Steps profiled without stacks; 0 to time steps and profile none.
        fidelity: Whether one more step is compared, where any is profiled, or nothing else is
            done.
    """

    warmup: int
    timing: int
    steps: int
    fidelity: bool = False

    @property
    def lead(self) -> int:
        """Steps that warm the profiler up: one more after timed steps, else the last warm-up
        step serves, and with a single warm-up step there is none.
        """
        return 1 if self.timing else 0

    @property
    def only_compares(self) -> bool:
        """Whether a step is compared, and none timed or profiled."""
        return self.fidelity and not (self.steps or self.timing)

    @property
    def wanted(self) -> int:
        """Steps that a complete recording takes, those with stacks and compared included."""
        if not self.steps:
            return self.warmup + self.timing + self.only_compares
        return self.warmup + self.timing + self.lead + self.steps + 1 + self.fidelity


class Seen(Struct, frozen=True):
    """How far a recording came: optimizer steps made, complete ones profiled, stacks or not.

    ``waited`` is whether a profiler of the script's own stood in the way.
    """

    made: int
    profiled: int
    stacks: bool
    explicit: bool = False
    waited: bool = False


class Wording(Struct, frozen=True):
    """How a person asked for the recording, for what is said to them.

    Attributes:
        who: Who made the steps, such as ``The script``.
        no_step: What is said where no step was made.
        fits: What to ask for instead, with ``{steps}`` in it.
    """

    who: str
    no_step: str
    fits: str


COMMAND = Wording(
    who="The script",
    no_step="The script made no optimizer step, so no training step could be told from the next. "
    "In a loop without a torch.optim optimizer, call recompute_scan.step() at the end of each "
    "step.",
    fits="--warmup 1 --timing-steps 0 --steps {steps}",
)


def shortfall(plan: Plan, seen: Seen, wording: Wording = COMMAND) -> str | None:
    """One or two sentences on what is missing and what would fit; ``None`` when nothing is."""
    if seen.profiled >= plan.steps and (seen.stacks or not plan.steps):
        enough = plan.steps or seen.made >= plan.wanted
        return None if enough else _too_few(plan, seen, wording)
    if seen.made == 0:
        return wording.no_step
    if seen.profiled >= plan.steps:
        return (
            f"{wording.who} made {_steps(seen)}; one more was wanted, to record the Python stacks "
            "of the checkpoint calls. Everything else is there."
        )
    made = f"{wording.who} made {_steps(seen)}; {_wanted(plan)} were wanted."
    if seen.profiled:
        made += f" {seen.profiled} of {plan.steps} could be profiled."
    if seen.waited and seen.made >= plan.wanted:
        return (
            f"{made} The script runs a torch profiler of its own, and torch runs one at a time: "
            "it left too few steps in a row. Try the script without its profiler."
        )
    if seen.made == 1:
        return f"{made} Try a longer run: at least 2 steps."
    fits = wording.fits.format(steps=max(1, min(plan.steps, seen.made - 2)))
    return f"{made} Try {fits}, or a longer run."


def _too_few(plan: Plan, seen: Seen, wording: Wording) -> str:
    more = "1 to compare" if plan.only_compares else f"{plan.timing} timed"
    return f"{wording.who} made {_steps(seen)}; {plan.warmup} for warm-up and {more} were wanted."


def _steps(seen: Seen) -> str:
    kind = "step" if seen.explicit else "optimizer step"
    return f"{seen.made} {kind}{'' if seen.made == 1 else 's'}"


def _wanted(plan: Plan) -> str:
    parts = [f"{plan.warmup} for warm-up"]
    if plan.timing:
        parts.append(f"{plan.timing} timed")
    if plan.lead:
        parts.append("1 to warm the profiler up")
    parts.append(f"{plan.steps} profiled")
    return f"{', '.join(parts)} and 1 with stacks"
