"""What a rule gets to see: each part is computed when a rule first asks for it, and kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct, field

from recompute_scan.advise import RunFacts, Switch, keep_and_drop, switch_of
from recompute_scan.cost.communication import Repeated, repeated
from recompute_scan.cost.footprint import levels_of
from recompute_scan.cost.selective import KeptAttention, keep_attention
from recompute_scan.deciding import Policies, WatchedPolicy
from recompute_scan.faithful import ComparedGradients, ComparedRegion, Fidelity
from recompute_scan.findings.code import CodeEvidence
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.annotated import recomputed_calls
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role
from recompute_scan.recompute.verdict import Compiled
from recompute_scan.result import (
    Checkpoint,
    CompiledCode,
    Cost,
    Level,
    Memory,
    Rank,
    Region,
    Verdict,
)
from recompute_scan.run_info import Source, SwitchedOn

Stack = tuple[Checkpoint, ...]


class RunEvidence(Struct, frozen=True):
    """What was seen while the script ran.

    Attributes:
        fidelity: How recomputes compare with their forward; ``None`` where nobody looked.
        untrained: Modules whose trainable weights got no gradient; ``None`` where nobody looked.
        sources: Statements at call sites.
        gradients: Gradients with and without the checkpoints; ``None`` where nobody looked.
        confidence: It was seen, and not inferred from a trace.
    """

    fidelity: Fidelity | None
    untrained: tuple[str, ...] | None
    sources: Mapping[str, Source]
    gradients: ComparedGradients | None = None
    confidence: Level = "high"

    @property
    def no_comparison(self) -> str | None:
        """Why no recompute was compared, one sentence; ``None`` where some were."""
        if self.fidelity is None:
            return "Only `recompute-scan run` compares recomputes with their forward."
        if any(region.lost for region in self.fidelity.regions):
            return None
        return self.fidelity.why_not_compared

    @property
    def regions(self) -> tuple[ComparedRegion, ...]:
        """The regions that were entered in the compared step."""
        return self.fidelity.regions if self.fidelity is not None else ()

    @property
    def compared(self) -> tuple[ComparedRegion, ...]:
        """Those of which a recompute was compared."""
        return self.fidelity.compared if self.fidelity is not None else ()


class Evidence(Struct, frozen=True, dict=True):
    """All that a rule may look at in one trace.

    Attributes:
        regions: One row per layer.
        cost: Price of the recomputes, or ``None``.
        confidence: How sure the counts are.
        sources: Statements at call sites, from the run's own run record.
        switched_on: What was switched on when a recorded run ended; empty without one.
        environment: Versions and settings of the recorded run; empty without one.
        memory: Memory of a recorded step, or ``None``.
        untrained: Modules whose trainable weights got no gradient; ``None`` where nobody looked.
        fidelity: How recomputes compare with their forward; ``None`` where nobody looked.
        graphs: Compiled code; ``None`` where there is none, or its graphs are not here.
        policies: What policies of selective checkpoints decided; ``None`` where nobody looked.
    """

    _facts: RecomputeFacts
    regions: tuple[Region, ...]
    cost: Cost | None
    confidence: Level
    sources: Mapping[str, Source]
    switched_on: tuple[SwitchedOn, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    untrained: tuple[str, ...] | None = None
    fidelity: Fidelity | None = None
    graphs: CompiledCode | None = None
    policies: Policies | None = None

    @property
    def code(self) -> CodeEvidence | None:
        """What rules on compiled code may look at; ``None`` where there is nothing."""
        if self.graphs is None:
            return None
        return CodeEvidence(self.graphs, self.environment, self.confidence)

    @property
    def of_run(self) -> RunEvidence:
        """What rules on what the run itself saw may look at."""
        return RunEvidence(self.fidelity, self.untrained, self.sources)

    # The trace

    @property
    def verdict(self) -> Verdict:
        """The verdict on the whole trace."""
        return self._facts.judgement.verdict

    @property
    def no_verdict(self) -> str | None:
        """Why there is no verdict, one sentence; ``None`` where there is one."""
        judgement = self._facts.judgement
        if judgement.verdict != "inconclusive":
            return None
        return judgement.reason or "There is no verdict."

    @property
    def no_policies(self) -> str | None:
        """Why no policy was seen deciding, one sentence; ``None`` where one was."""
        if self.policies is None:
            return "Only `recompute-scan run` sees policies decide, and in the step with stacks."
        if not self.policies.policies:
            return next(iter(self.policies.untold), "No policy was asked in the recorded step.")
        return None

    @property
    def decided(self) -> tuple[WatchedPolicy, ...]:
        """The policies that were seen deciding."""
        return self.policies.policies if self.policies is not None else ()

    @property
    def highest(self) -> float | None:
        """How often forward work ran again in one backward pass, at most."""
        return self._facts.judgement.highest

    @property
    def annotated(self) -> bool:
        """Whether `recompute-scan run` wrote the checkpointed calls into the trace."""
        return self._facts.annotations is not None

    @property
    def on_gpu(self) -> bool:
        """Whether the steps ran on a GPU."""
        return self._facts.work.on_gpu

    @property
    def has_shapes(self) -> bool:
        """Whether the trace tells the shapes of inputs."""
        return len(self._facts.trace.signatures) >= 2

    @property
    def has_backward(self) -> bool:
        """Whether the trace shows nodes of a backward pass."""
        return bool(len(self._facts.structure.rows(Role.BACKWARD)))

    @property
    def compiled(self) -> Compiled | None:
        """The compiled part of the backward pass; ``None`` where nothing of it is compiled."""
        return self._facts.compiled

    @cached_property
    def compiled_calls_again(self) -> int:
        """Compiled calls of the forward pass that a checkpoint around them ran again."""
        return self._facts.ran_again(words.COMPILED_CALL)

    @property
    def attention_kernels(self) -> tuple[int, int] | None:
        """Attention's kernels: backward ones, and forward ones that ran again.

        ``None`` where there are none, or the operators answered without them.
        """
        attention = self._facts.attention
        passes = attention.passes if attention is not None else []
        if not passes:
            return None
        return sum(p.layers for p in passes), sum(p.again for p in passes)

    # Advice

    @cached_property
    def run(self) -> RunFacts:
        """What of the run bears on advice."""
        levels = levels_of(self._facts) if self.verdict == "doubled" else None
        return RunFacts(self.environment, self._facts.sharded, levels)

    @cached_property
    def alone(self) -> frozenset[Switch]:
        """Switches that are the only checkpoint of some block."""
        return frozenset(
            switch_of(region.checkpoints[0])
            for region in self.regions
            if len(region.checkpoints) == 1
        )

    def keep_and_drop(self, stack: Stack) -> tuple[Checkpoint, Checkpoint]:
        """Of two or more checkpoints the one that advice keeps, and the first it takes out."""
        return keep_and_drop(stack, self.alone, sharded=self.run.sharded, levels=self.run.levels)

    @cached_property
    def kept_attention(self) -> KeptAttention | None:
        """What keeping the results of attention would give; ``None`` where there is no choice."""
        return keep_attention(self._facts, self.cost) if self.cost is not None else None

    # Blocks

    def stacks(self, fits: Callable[[Region], bool]) -> dict[Stack, list[Region]]:
        """The blocks that fit, by the checkpoints around them."""
        found: dict[Stack, list[Region]] = defaultdict(list)
        for region in self.regions:
            if fits(region):
                found[region.checkpoints].append(region)
        return dict(found)

    def of_blocks(self, regions: Sequence[Region]) -> str:
        """How many of all blocks these are: ``3 of 8 blocks``."""
        return f"{len(regions)} of {len(self.regions)} blocks"

    @cached_property
    def mechanisms(self) -> frozenset[str | None]:
        """Mechanisms whose checkpoints were called, be it inside another's recompute alone."""
        of_regions = {one.mechanism for region in self.regions for one in region.checkpoints}
        annotations = self._facts.annotations
        return frozenset(of_regions | (annotations.mechanisms if annotations else set()))

    # Communication

    @property
    def has_collectives(self) -> bool:
        """Whether the trace holds collective communication."""
        return bool(len(self._facts.collectives.rows))

    @property
    def gathers_per_step(self) -> float:
        """How often a step gathers parameters for FSDP, recomputes included."""
        return len(self._facts.collectives.gathers) / self._facts.complete_count

    @cached_property
    def repeated_gathers(self) -> Repeated:
        """Gathers of parameters inside recomputes."""
        return repeated(self._facts, self._facts.collectives.repeated_gathers)

    @cached_property
    def other_repeated(self) -> Repeated:
        """All other collectives inside recomputes."""
        collectives = self._facts.collectives
        others = collectives.repeated[~np.isin(collectives.repeated, collectives.gathers)]
        return repeated(self._facts, others)

    @cached_property
    def gathering(self) -> frozenset[Switch | None]:
        """Switches of the checkpoints whose recomputes gather parameters.

        ``None`` is among them where it is not known whose recompute a gather is in.
        """
        facts = self._facts
        rows = facts.collectives.repeated_gathers
        return frozenset(
            (call.mechanism, call.site or None) if call is not None else None
            for call in recomputed_calls(facts.calls, facts.annotations, rows)
        )


class RankEvidence(Struct, frozen=True):
    """What several ranks of one run show together.

    Attributes:
        ranks: The ranks.
        confidence: How sure what they show together is: their steps need not be the same ones.
    """

    ranks: tuple[Rank, ...]
    confidence: Level = "medium"
