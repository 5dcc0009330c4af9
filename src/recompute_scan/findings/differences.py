"""What the rules on differing recomputes share: the same fault in many blocks, told once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from msgspec import Struct

from recompute_scan.advise import place
from recompute_scan.advise.edit import change_diff, edited
from recompute_scan.faithful import ComparedRegion, Difference, DifferenceKind, Operation
from recompute_scan.findings.base import Severity
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.frameworks.mechanism import Edit
from recompute_scan.result import Level

# What makes sure; ``run`` offers it.
COMPARE = (
    "Whether gradients are wrong shows when they are compared with those without checkpoints: "
    "recompute-scan run --verify --without-checkpointing does that."
)
CHECKPOINT_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"
_MOST_NAMED = 3


class Fault(Struct, frozen=True):
    """One difference, and the blocks that have it.

    Attributes:
        difference: As the first of the blocks has it.
        regions: The blocks.
        compared: How many blocks were compared in all.
    """

    difference: Difference
    regions: tuple[ComparedRegion, ...]
    compared: int

    @property
    def blocks(self) -> str:
        """``12 of 12 blocks``."""
        return count_blocks(len(self.regions), self.compared)

    def shown(self) -> tuple[str, ...]:
        """Lines of evidence: the operator, how far off it is, the checkpoint, the blocks."""
        apart = self.difference.distance
        far = () if apart is None else (f"first result that differs: {_percent(apart)}",)
        return (describe_operation(self.difference.operation), *far, *name_blocks(self.regions))


def count_blocks(some: int, of: int) -> str:
    """``3 of 12 blocks``; ``1 of 1 block``."""
    return f"{some} of {of} block{'s' * (of != 1)}"


class Consequence(Struct, frozen=True):
    """What a recompute that differs does to gradients, as far as that is known.

    Attributes:
        severity: Of a finding that says so: an error where gradients were compared and differ.
        confidence: How sure it is that training changes.
        wrong_gradients: Whether it may.
        sentence: The same in words, with what makes sure where that is open.
    """

    severity: Severity
    confidence: Level
    wrong_gradients: bool
    sentence: str


def consequence(evidence: RunEvidence, regions: Collection[ComparedRegion]) -> Consequence:
    """What the differing recomputes of these blocks do to gradients."""
    compared = evidence.gradients
    told = {compared.tell(region) for region in regions} if compared is not None else {None}
    if compared is None or (told - {"equal", "different"} and "different" not in told):
        return Consequence("warning", "medium", True, COMPARE)
    if "different" in told:
        some = compared.differing
        named = ", ".join(some[:_MOST_NAMED])
        more = f" and {len(some) - _MOST_NAMED} more" if len(some) > _MOST_NAMED else ""
        return Consequence(
            "error",
            "high",
            True,
            f"Gradients are wrong: after the first step {len(some)} of {compared.number} differ "
            f"from those without checkpoints ({named}{more}), and nothing fails.",
        )
    bits = "to the last bit" if compared.equal else "up to rounding"
    return Consequence(
        "info",
        "high",
        False,
        f"It changes no gradient of the first step: all {compared.number} are equal {bits} with "
        "and without checkpoints.",
    )


def find_faults(evidence: RunEvidence, kinds: Collection[DifferenceKind]) -> list[Fault]:
    """The differences of these kinds, each with all blocks that have it."""
    compared = evidence.compared
    found: dict[object, list[tuple[Difference, ComparedRegion]]] = defaultdict(list)
    for region in compared:
        for one in region.differences:
            if one.kind in kinds:
                cause = one.operation
                same = one.kind, cause.name, cause.site, one.generator, region.site
                found[same].append((one, region))
    return [
        Fault(some[0][0], tuple(region for _, region in some), len(compared))
        for some in found.values()
    ]


def describe_operation(operation: Operation) -> str:
    """``aten.bernoulli_ in layers.0.drop (Dropout) at train.py:12``."""
    kind = f" ({operation.module_class})" if operation.module_class else ""
    inside = f" in {operation.module}{kind}" if operation.module else kind
    return f"{operation.name}{inside}{place(operation.site)}"


def name_blocks(regions: Collection[ComparedRegion]) -> tuple[str, ...]:
    """The first few blocks, with the checkpoint around them, as lines of evidence."""
    lines = [
        f"{region.module or region.module_class or 'a function'}: {region.variant}"
        f"{place(region.site)}"
        for region in list(regions)[:_MOST_NAMED]
    ]
    more = len(regions) - _MOST_NAMED
    return (*lines, f"and {more} more") if more > 0 else tuple(lines)


def set_back(evidence: RunEvidence, site: str, option: str, default: str) -> str | None:
    """The checkpoint's option at its default, as a diff of the call site; ``None`` where that
    does not name it.
    """
    source = evidence.sources.get(site)
    if source is None:
        return None
    new = edited(
        source, (Edit("*", "keyword", option, default), Edit("*", "entry", option, default))
    )
    return change_diff(site, source, new) if new is not None else None


def _percent(share: float) -> str:
    if share > 10:
        return "by more than ten times its norm"
    if share >= 1:
        return f"by {share:.1f} times its norm"
    return f"by {share * 100:.2g} % of its norm"
