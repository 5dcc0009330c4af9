"""What a run is asked to do, and its one encoding for the processes that it is handed on to.

Processes that the script starts get the text, and decode it only where they have imported torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from msgspec import Struct

from recompute_scan.record.scope import DEFAULT
from recompute_scan.rehearsal import ArmWanted

if TYPE_CHECKING:
    from recompute_scan.record.caught import Variant
    from recompute_scan.record.origins import Origin


_T = TypeVar("_T")


class RemovalOptions(Struct, frozen=True):
    """Which checkpoint calls to take out: those of one mechanism, call site and variant,
    around all modules or some.

    Attributes:
        mechanism: As written into the annotations.
        site: ``file:line``; empty where it is not known.
        variant: ``reentrant`` or ``non-reentrant``.
        depth: Number of checkpoints around it, only where one of the same mechanism, site and
            variant is around it or inside it and must stay; else ``None``.
        modules: Names below the model of the modules that lose theirs; empty for all.
    """

    mechanism: str
    site: str
    variant: str
    depth: int | None = None
    modules: tuple[str, ...] = ()

    def takes(self, variant: Variant, origin: Origin, depth: int) -> bool:
        """Whether a call of this origin, inside so many checkpoints, is one of these."""
        return (
            (self.mechanism, self.site, self.variant) == (origin.mechanism, origin.site, variant)
            and self.depth in (None, depth)
            and (not self.modules or origin.module.name in self.modules)
        )


class RunOptions(Struct, frozen=True):
    """What to run and how much of it to record.

    Attributes:
        target: Path of the script, or name of the module.
        is_module: Whether ``target`` is a module, as with ``python -m``.
        args: The script's own arguments.
        output: Folder for the traces and the run record; made when missing.
        takes_place_of: The folder of an earlier result, which gets all that is in ``output`` once
            there is a new one.
        steps: Steps profiled without stacks, at least 1; where steps are measured, 0 will do.
        warmup: Steps before anything is recorded, at least 1.
        timing_steps: Steps timed without the profiler; 0 for none.
        device: What to record; ``auto`` records the GPU where the script uses one.
        keep_going: Let the script run to its end after the last recorded step.
        measure: Measure memory and losses too, from seeds that are the same in every run.
        removals: Checkpoints to take out in memory.
        switching: Take them out in some steps only, as
            :class:`recompute_scan.record.verify.bypass.Alternation` does.
        without_checkpointing: Take out every checkpoint.
        arms: Arrangements of checkpoints to switch between from step to step; none to leave them.
        timeout_s: Seconds without progress after which a run is ended; 0 for never.
        ranks: The ranks to record, as :func:`recompute_scan.record.scope.chosen` reads them; the
            others count and time their steps, and stop with them.
        fidelity: Whether to compare the recomputes of one more step with their forward.
        events: File that is told what happens; empty for none.
    """

    target: str
    is_module: bool
    args: tuple[str, ...]
    output: Path
    steps: int = 5
    warmup: int = 3
    timing_steps: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_going: bool = False
    measure: bool = False
    removals: tuple[RemovalOptions, ...] = ()
    switching: bool = False
    without_checkpointing: bool = False
    arms: tuple[ArmWanted, ...] = ()
    timeout_s: float = 0.0
    ranks: str = DEFAULT
    fidelity: bool = True
    events: str = ""
    takes_place_of: Path | None = None


def encode(options: object) -> str:
    """A data class of options as JSON text, for a command line, the environment or a pickle."""
    # Names that are no UTF-8 have lone surrogates, which only `json` writes, escaped.
    return json.dumps(msgspec.to_builtins(options, enc_hook=str))


def decode(text: str, kind: type[_T]) -> _T:
    """The options of one kind that :func:`encode` wrote.

    Raises:
        ValueError: It is no JSON, a field is missing, or one is not of its type.
    """
    return msgspec.convert(json.loads(text), kind, dec_hook=lambda kind, value: kind(value))
