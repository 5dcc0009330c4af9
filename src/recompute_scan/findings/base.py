"""Rules and the evidence that they look at.

A part of the evidence is computed when a rule first asks for it, and kept. There may be no trace:
rules on compiled code then look at the compiler's logs alone, rules on what the run itself saw at
its run record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from msgspec import Struct, field

from recompute_scan.advise.choice import (
    RunFacts,
    Switch,
    keep_and_drop,
    place,
    switch_of,
    title_of,
)
from recompute_scan.cost.memory import KeptAttention, keep_attention, levels_of
from recompute_scan.cost.phases import Repeated, repeated
from recompute_scan.frameworks.base import CHECKPOINT_DOCS
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.boundaries import recomputed_calls
from recompute_scan.recompute.roles import Role
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.recompute.verdict import Compiled
from recompute_scan.result import (
    Checkpoint,
    CompiledCode,
    Cost,
    Finding,
    Fix,
    Level,
    Memory,
    Rank,
    Region,
    Verdict,
)
from recompute_scan.result.fidelity import (
    ComparedGradients,
    ComparedRegion,
    Fidelity,
    Policies,
    WatchedPolicy,
)
from recompute_scan.result.recompute import unit_of
from recompute_scan.result.run_record import Source, SwitchedOn
from recompute_scan.result.watched_step import WatchedStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


Stack = tuple[Checkpoint, ...]
# A rule looks only where this is there.
Needs = Literal["verdict", "nothing", "policies", "graphs", "run", "comparison", "ranks"]


class Evidence(Struct, frozen=True, dict=True):
    """All that a rule may look at.

    Attributes:
        regions: One row per block.
        cost: Price of the recomputes, or ``None``.
        confidence: How sure the counts are.
        sources: Statements at call sites, from the run's own run record.
        switched_on: What was switched on when a recorded run ended; empty without one.
        environment: Versions and settings of the recorded run; empty without one.
        memory: Memory of a recorded step, or ``None``.
        untrained: Modules with trainable weights that got no gradient; ``None`` if not observed.
        fidelity: How recomputes compare with their forward; ``None`` if not observed.
        graphs: Compiled code; ``None`` where there is none, or its graphs are not here.
        policies: Decisions of selective checkpoints' policies; ``None`` if not observed.
        watched: The use of each operator of a step; ``None`` if not observed.
        gradients: Gradients with and without the checkpoints; ``None`` if not compared.
        ranks: The ranks of one run together; empty for a rule that looks at one of them.
    """

    _known: RecomputeFacts | None = None
    regions: tuple[Region, ...] = ()
    cost: Cost | None = None
    confidence: Level = "high"
    sources: Mapping[str, Source] = field(default_factory=dict)
    switched_on: tuple[SwitchedOn, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    untrained: tuple[str, ...] | None = None
    fidelity: Fidelity | None = None
    graphs: CompiledCode | None = None
    policies: Policies | None = None
    watched: WatchedStep | None = None
    gradients: ComparedGradients | None = None
    ranks: tuple[Rank, ...] = ()

    def missing(self, needed: Needs) -> str | None:
        """Why a rule cannot look at what it needs, one sentence; ``None`` where it can."""
        # Every run record says what was not trained.
        without_trace = {"graphs": self.graphs, "run": self.untrained, "comparison": self.untrained}
        if needed == "ranks" and self.ranks:
            return None
        if self._known is None and without_trace.get(needed) is None:
            return "There is no trace."
        if needed == "ranks":
            return "The traces of two or more ranks are needed."
        if needed == "graphs" and self.graphs is None:
            return "There are no graphs of compiled code."
        if needed == "comparison":
            return self._no_comparison
        if needed == "verdict":
            return self._no_verdict
        return self._no_policies if needed == "policies" else None

    # The run

    @property
    def _no_comparison(self) -> str | None:
        if self.fidelity is None:
            return "Only `recompute-scan run` compares recomputes with their forward."
        if any(region.lost for region in self.entered):
            return None
        return self.fidelity.why_not_compared

    @property
    def entered(self) -> tuple[ComparedRegion, ...]:
        """The regions that were entered in the compared step."""
        return self.fidelity.regions if self.fidelity is not None else ()

    @property
    def compared(self) -> tuple[ComparedRegion, ...]:
        """Regions that had a recompute compared."""
        return self.fidelity.compared if self.fidelity is not None else ()

    @property
    def _no_policies(self) -> str | None:
        if self.policies is None:
            return (
                "Only `recompute-scan run` records what policies decide, in the step with stacks."
            )
        if not self.policies.policies:
            return next(iter(self.policies.untold), "No policy was asked in the recorded step.")
        return None

    @property
    def decided(self) -> tuple[WatchedPolicy, ...]:
        """The policies that were seen deciding."""
        return self.policies.policies if self.policies is not None else ()

    # The trace

    @property
    def _facts(self) -> RecomputeFacts:
        assert self._known is not None
        return self._known

    @property
    def verdict(self) -> Verdict:
        """The verdict on the whole trace."""
        return self._facts.judgement.verdict

    @property
    def _no_verdict(self) -> str | None:
        judgement = self._facts.judgement
        if judgement.verdict != "inconclusive":
            return None
        return judgement.reason or "There is no verdict."

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
        """Whether the trace has the shapes of inputs."""
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
        return self._facts.ran_again(vocabulary.COMPILED_CALL)

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
        """The facts of the run that bear on advice."""
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
        """The gain of keeping the results of attention; ``None`` where there is no choice."""
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
        return f"{len(regions)} of {len(self.regions)} {unit_of(self.regions)}"

    @cached_property
    def mechanisms(self) -> frozenset[str | None]:
        """Mechanisms of checkpoints that were called, be it inside another's recompute alone."""
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
        """Switches of the checkpoints that gather parameters in their recomputes.

        ``None`` is among them where the checkpoint of a gather is not known.
        """
        facts = self._facts
        rows = facts.collectives.repeated_gathers
        return frozenset(
            (call.mechanism, call.site or None) if call is not None else None
            for call in recomputed_calls(facts.calls, facts.annotations, rows)
        )


Severity = Literal["error", "warning", "info"]

_MOST_BLOCKS = 3


class NotApplicable(Exception):
    """A rule could not look: why, one sentence."""


class FindingFields(TypedDict, total=False):
    """Fields of a finding that not every rule sets."""

    severity: Severity | None
    confidence: Level | None
    fix: Fix | None
    saving_ms: float | None
    saving_pct: float | None
    wrong_gradients: bool | None


class Rule(Struct, frozen=True):
    """One rule; ``partial`` of it decorates the rule's check.

    Attributes:
        code: Never changes its meaning, and is never used again.
        name: Of the bad state.
        check: Looks; may raise :class:`NotApplicable`.
        severity: Of its findings, unless one says otherwise.
        needs: What has to be there for ``check`` to be asked.
        gives_plan: Whether its finding recommends the memory plan that the result has chosen.
        wrong_gradients: Whether its findings say that checkpointing changes the trained model.
    """

    code: str
    name: str
    check: Callable[[Evidence], Iterable[Finding]]
    severity: Severity = "info"
    needs: Needs = "verdict"
    gives_plan: bool = False
    wrong_gradients: bool = False

    def look(self, evidence: Evidence) -> list[Finding]:
        """The findings.

        Raises:
            NotApplicable: The rule could not look.
        """
        if why := evidence.missing(self.needs):
            raise NotApplicable(why)
        return list(self.check(evidence))

    def finding(
        self,
        seen: Evidence,
        title: str,
        detail: str,
        evidence: Sequence[str] = (),
        **fields: Unpack[FindingFields],
    ) -> Finding:
        """A finding of this rule: what is wrong in one line, why and what it costs in sentences,
        what shows it in a line each.

        Other fields are what to change and what that saves, and what is not as the rule or the
        evidence says; ``None`` is as they say.
        """
        # The run itself saw this: it is not inferred from a trace.
        observed = self.needs in ("run", "comparison")
        as_said: FindingFields = {
            "severity": self.severity,
            "confidence": "high" if observed else seen.confidence,
            "fix": None,
            "saving_ms": None,
            "saving_pct": None,
            "wrong_gradients": self.wrong_gradients,
        }
        given: Any = {name: value for name, value in fields.items() if value is not None}
        return Finding(
            code=self.code,
            name=self.name,
            title=title,
            detail=detail,
            evidence=tuple(evidence),
            **(as_said | given),
        )


# A fix that needs a look, for ``reason``.
review = partial(Fix, disposition="review", diff=None, keep="the checkpoint", docs=CHECKPOINT_DOCS)


def predicted(evidence: Evidence) -> Level:
    """Confidence in what is predicted from the counts: at most medium."""
    return "medium" if evidence.confidence == "high" else evidence.confidence


def describe(checkpoint: Checkpoint) -> str:
    """One checkpoint as a line of evidence: depth, mechanism, variant and call site."""
    variant = f", {checkpoint.variant}" if checkpoint.variant else ""
    options = "".join(f", {option.replace('-', ' ')}" for option in checkpoint.options)
    where = place(checkpoint.call_site)
    extent = "" if checkpoint.around == "block" else f", {checkpoint.extent}"
    return f"depth {checkpoint.depth}: {title_of(checkpoint)}{variant}{options}{extent}{where}"


def name_some(regions: Sequence[Region]) -> tuple[str, ...]:
    """The first few blocks, as lines of evidence."""
    return tuple(region.module or region.signature for region in regions[:_MOST_BLOCKS])
