"""What the policies of selective checkpoints decided in one step, as recording and result say it.

A policy is asked at each operator that a selective checkpoint runs in its forward: keep the result,
or compute it again in the backward pass (``torch.utils.checkpoint.CheckpointPolicy``).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# ``operator``: the very thing that is called. ``packet``: all overloads of a name, which no call
# equals. ``other``: a function of torch's, which no call equals either.
EntryKind = Literal["operator", "packet", "other"]


class DecidedOperator(Struct, frozen=True):
    """One operator as a policy met it in the forward passes of the watched step.

    Attributes:
        name: With its overload, such as ``aten.mm.default``.
        met: Calls at which the policy was asked.
        decided: How often it said what, by the names of torch's ``CheckpointPolicy``; booleans
            count as what torch makes of them.
        kept: Calls whose result was kept.
        kept_bytes: Storage that is kept because of it; what is the region's input, or kept by
            an earlier call, is not counted again.
        result_bytes: New storage of the results that were not kept.
        held_bytes: Of ``result_bytes``, what was there still when the recompute began: nothing was
            freed by recomputing it.
        served: Kept results that recomputes asked for.
        recomputed: Calls that recomputes made again.
        forward_ms_per_step: Time of its calls in the forward; ``None`` where no trace tells.
        recompute_ms_per_step: Time of its calls in recomputes, likewise.
    """

    name: str
    met: int
    decided: dict[str, int]
    kept: int = 0
    kept_bytes: int = 0
    result_bytes: int = 0
    held_bytes: int = 0
    served: int = 0
    recomputed: int = 0
    forward_ms_per_step: float | None = None
    recompute_ms_per_step: float | None = None


class PolicyEntry(Struct, frozen=True):
    """One member of a collection that a policy looks into.

    Attributes:
        name: Such as ``aten.mm.default``, or ``aten.mm`` for all overloads.
        kind: What it is.
        collection: Name of the variable; ``the list`` where torch got the list itself.
        met: Calls of the operator, or of its overloads.
        kept: Of these, calls whose result was kept.
        times: How often it is in the collection, where that can hold it twice.
        site: ``file:line`` where the policy's file spells it; empty where it does not.
    """

    name: str
    kind: EntryKind
    collection: str
    met: int
    kept: int
    times: int = 1
    site: str = ""


class WatchedPolicy(Struct, frozen=True):
    """One policy at one checkpoint.

    Attributes:
        name: Of the function; ``a list of 3 operators`` for a list.
        defined: ``file:line`` of the function; empty for a list, and where unknown.
        own: Whether it is in the user's code, and no library's.
        site: ``file:line`` that switched the checkpoint on; empty where unknown.
        mechanism: What switched it on; empty where unknown.
        regions: Checkpointed calls that it decided for.
        recomputes: Of these, those whose recompute asked for an operator.
        raised: Calls that ended with an exception of the policy's.
        operators: In the order in which they were met first.
        entries: Members of the collections that the policy refers to.
    """

    name: str
    defined: str
    own: bool
    site: str
    mechanism: str
    regions: int
    recomputes: int
    raised: int = 0
    operators: tuple[DecidedOperator, ...] = ()
    entries: tuple[PolicyEntry, ...] = ()

    @property
    def met(self) -> int:
        """Calls at which it was asked."""
        return sum(one.met for one in self.operators)

    @property
    def kept(self) -> int:
        """Calls whose result was kept."""
        return sum(one.kept for one in self.operators)

    @property
    def kept_bytes(self) -> int:
        """Storage that it keeps."""
        return sum(one.kept_bytes for one in self.operators)


class Policies(Struct, frozen=True):
    """The policies that decided in one step, the one that is recorded with Python stacks.

    Attributes:
        policies: In the order in which they were asked first.
        untold: What could not be seen, one sentence each.
    """

    policies: tuple[WatchedPolicy, ...] = ()
    untold: tuple[str, ...] = ()
