"""What goes between host and device in a step, and what for."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

CopyDirection = Literal["to-host", "to-device"]
HostMemory = Literal["pinned", "pageable", "unknown"]
CopyPhase = Literal["forward", "backward", "rest", "unknown"]
Offload = Literal["seen", "none", "untold"]


class HostCopy(Struct, frozen=True):
    """Copies of one direction, one kind of host memory and one phase: means over the steps.

    ``bytes`` is ``None`` where the trace does not tell those of each. ``alone_ms`` is the part of
    their time in which no kernel of the same device ran. ``own_stream`` is set where their streams
    run no kernels.
    """

    direction: CopyDirection
    memory: HostMemory
    phase: CopyPhase
    count: float
    bytes: float | None
    time_ms: float
    alone_ms: float
    own_stream: bool


class HostCopies(Struct, frozen=True):
    """What one step copies between host and device, and whether activations are offloaded.

    Means over so many complete ``steps``; of the whole recording where that is 0. ``alone_ms`` is
    the time in which copies ran and no kernel of the same device did: as far as a trace can tell,
    they are on the critical path; ``alone_pct`` is its part of the step as recorded. ``offload`` is
    ``seen`` where most of what goes to the host in the forward passes (2 MiB a step or more) comes
    back in the backward passes, in pieces of the same sizes, ``none`` where less goes there, and
    ``untold`` otherwise, for the given ``reason``. ``offloaded_bytes`` is what goes and comes back
    in a step.
    """

    steps: int
    copies: tuple[HostCopy, ...]
    alone_ms: float
    alone_pct: float | None
    offload: Offload
    offloaded_bytes: float | None
    reason: str | None = None
