"""Whether a recompute is the computation that it repeats, as recording and result say it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from recompute_scan.files import content, write_whole
from recompute_scan.units import plural

# ``operator``: the very thing that is called. ``packet``: all overloads of a name, which no call
# equals. ``other``: a function of torch's, which no call equals either.
EntryKind = Literal["operator", "packet", "other"]


class DecidedOperator(Struct, frozen=True):
    """One operator as a policy met it in the forward passes of the watched step.

    Attributes:
        name: With its overload, such as ``aten.mm.default``.
        met: Calls at which the policy was asked.
        decided: How often it gave each answer, by the names of torch's ``CheckpointPolicy``;
            booleans count as what torch makes of them.
        kept: Calls with a result that was kept.
        kept_bytes: Storage that is kept because of it; the region's input, and storage kept by
            an earlier call, are not counted again.
        result_bytes: New storage of the results that were not kept.
        held_bytes: Of ``result_bytes``, what was there still when the recompute began: nothing was
            freed by recomputing it.
        served: Kept results that recomputes asked for.
        recomputed: Calls that recomputes made again.
        forward_ms_per_step: Time of its calls in the forward; ``None`` where no trace shows
            it.
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
        kept: Of these, calls with a result that was kept.
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
        recomputes: Of these, calls that asked for an operator in their recompute.
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
        """Calls with a result that was kept."""
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


# The question that comparing a step answers.
SAME = "Is the recomputed forward the same?"
# A difference of a recompute from its forward, by the first operator with a result that shows it.
DifferenceKind = Literal[
    "random", "type", "input", "argument", "shape", "operators", "value", "atomics"
]


class Operation(Struct, frozen=True):
    """Where an operator was called.

    Attributes:
        name: Of the operator, such as ``aten.native_dropout``.
        module: Qualified name of the innermost module around it; empty where unknown.
        module_class: Its class.
        site: ``file:line`` of the innermost frame outside torch; empty where there is none.
    """

    name: str
    module: str = ""
    module_class: str = ""
    site: str = ""


class Difference(Struct, frozen=True):
    """The first result of a recompute that its forward did not have.

    Attributes:
        kind: ``random``: another random state; ``type``: another type; ``input``: something from
            outside the region has changed; ``argument``: a number that an operator is called with
            has; ``shape``: another shape; ``operators``: others were called; ``value``: no other
            kind; ``atomics``: the same call twice gives two results here.
        operation: The operator of the recompute.
        instead_of: Name of the forward's operator in that place, where it is another.
        generator: Whose random state it was: ``torch (cpu)``, ``torch (cuda)``, ``a generator of
            the script's own``, ``random``, ``numpy.random``.
        forward: Type, shape or argument in the forward, as text.
        recompute: The same in the recompute.
        distance: Norm of the difference over the norm of the forward's result, from a sample of
            its elements; ``None`` where they cannot be compared.
    """

    kind: DifferenceKind
    operation: Operation
    instead_of: str | None = None
    generator: str | None = None
    forward: str | None = None
    recompute: str | None = None
    distance: float | None = None


class KeptState(Struct, frozen=True):
    """Something that is kept between calls, and that recomputes change again.

    Attributes:
        name: Qualified name of the buffer or attribute.
        is_buffer: Whether it is a buffer of a module; else an attribute, or in one.
        before: Value before the region's forward, as text: a number, or the mean of a tensor.
        forward: After the forward.
        recompute: After the recompute.
        is_tensor: Whether it is a tensor.
    """

    name: str
    is_buffer: bool
    before: str
    forward: str
    recompute: str
    is_tensor: bool = False


WhyLost = Literal[
    "grad-mode-off",
    "detached",
    "left-without",
    "arrives-otherwise",
    "returned-otherwise",
    "weights-left-out",
]


class LostGradient(Struct, frozen=True):
    """A tensor that needs a gradient in a region's forward, and gets none through its recompute.

    Attributes:
        name: Qualified name of a parameter; place of a tensor that left a block, such as
            ``output[1][0]``; empty for another tensor.
        operation: The operator that used it: the recompute's, or the first outside the block.
        why: ``grad-mode-off``: the recompute runs without autograd; ``detached``: it got a copy
            that needs no gradient; ``left-without``: it left the checkpoint without one, and a
            loss depends on it; ``arrives-otherwise``: what arrives at the recompute's result is not
            what the autograd function was given; ``returned-otherwise``: that function returns
            something else than the recompute gives for its inputs; ``weights-left-out``: it runs
            backward to the inputs alone.
        weights: Of a tensor that left, or of such a function: parameters of the block that have no
            gradient behind the backward pass.
    """

    name: str
    operation: Operation
    why: WhyLost
    weights: tuple[str, ...] = ()


class ComparedRegion(Struct, frozen=True):
    """All calls of one checkpointed region in the compared step.

    Attributes:
        module: Qualified name of the region's module; empty where unknown.
        module_class: Its class.
        variant: ``reentrant`` or ``non-reentrant``.
        mechanism: What switched the checkpoint on; empty where unknown.
        site: The checkpoint's call site.
        options: Settings of the call.
        function: Name of the function that checkpoints, where it is not torch's own.
        calls: Forward runs.
        recomputes: Recomputes that were compared.
        operators: Results compared, over all recomputes.
        random_operators: Of these, those that drew random numbers.
        unused: Of these, those that differ and that the backward pass does not use.
        untold: Why some or all could not be compared, one sentence each.
        rounding: Largest distance of results that differ by rounding only.
        differences: The first difference of each kind and place.
        states: What recomputes changed again.
        lost: Gradients that are lost.
    """

    module: str
    module_class: str
    variant: str
    mechanism: str
    site: str
    options: tuple[str, ...] = ()
    function: str = ""
    calls: int = 0
    recomputes: int = 0
    operators: int = 0
    random_operators: int = 0
    unused: int = 0
    untold: tuple[str, ...] = ()
    rounding: float | None = None
    differences: tuple[Difference, ...] = ()
    states: tuple[KeptState, ...] = ()
    lost: tuple[LostGradient, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether a recompute computed something other than its forward."""
        lost = any(one.why in ("grad-mode-off", "detached") for one in self.lost)
        return lost or any(one.kind != "atomics" for one in self.differences)

    @property
    def leaks(self) -> bool:
        """Whether something left it without its gradient."""
        return any(one.why == "left-without" for one in self.lost)

    @property
    def passes_others(self) -> bool:
        """Whether an autograd function passes on other gradients than its recompute gives."""
        return any(
            one.why in ("arrives-otherwise", "returned-otherwise", "weights-left-out")
            for one in self.lost
        )

    @property
    def updates(self) -> bool:
        """Whether a recompute updated buffers once more."""
        return any(state.is_buffer for state in self.states)

    @property
    def undecided(self) -> bool:
        """Whether that is not known of all its recomputes."""
        return bool(self.untold) or any(one.kind == "atomics" for one in self.differences)


class Fidelity(Struct, frozen=True):
    """One compared step.

    Attributes:
        regions: In the order in which they were first entered.
        step_ms: How long the compared step took, with the comparison.
        untold: Why the step was not compared, one sentence; then there are no regions.
        keeping_us: Time of the host, in µs, that keeping the random state takes for one
            checkpointed call and its recompute here; ``None`` where nothing was compared.
        untrained: Parameters that a loss depends on through reentrant checkpoints only which got no
            input that needs a gradient, so that they have none behind the backward pass.
    """

    regions: tuple[ComparedRegion, ...] = ()
    step_ms: float | None = None
    untold: str | None = None
    keeping_us: float | None = None
    untrained: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[ComparedRegion, ...]:
        """The regions that had a recompute compared."""
        return tuple(region for region in self.regions if region.recomputes)

    @property
    def keeping_ms(self) -> float | None:
        """The time to keep the random state in the compared step, in ms of the host; ``None``
        where that is unknown.
        """
        if self.keeping_us is None:
            return None
        return self.keeping_us / 1e3 * sum(region.recomputes for region in self.regions)

    @property
    def why_not_compared(self) -> str | None:
        """Why no recompute was compared, one sentence; ``None`` where one was."""
        if self.untold is not None:
            return self.untold
        if self.compared:
            return None
        why = next((why for region in self.regions for why in region.untold), None)
        return why or "No recompute could be compared in that step."


def in_words(fidelity: Fidelity) -> str:
    """Whether recomputes are the computation of their forward, in one or two sentences."""
    blocks = fidelity.compared
    leaking = [region for region in fidelity.regions if region.leaks]
    passing = [region for region in fidelity.regions if region.passes_others]
    if passing and not any(region.differs for region in blocks):
        some = plural(len(passing), "block")
        results = "The results are the same, but" if blocks else "Not compared, and"
        return (
            f"{results} the function that checkpoints {some} passes on gradients that differ from "
            "the gradients of its recompute."
        )
    if leaking and not blocks:
        some = plural(len(leaking), "block")
        return f"Not compared, and something leaves {some} without its gradient."
    if not blocks:
        return f"Not compared: {fidelity.why_not_compared}"
    differing = [region for region in blocks if region.differs]
    updating = [region for region in blocks if region.updates and not region.differs]
    modules = [region.module for region in blocks]
    # Where some have several checkpoints, these are counted.
    each = "block" if all(modules) and len(set(modules)) == len(modules) else "checkpoint"
    of = f"of {plural(len(blocks), each)}"
    if differing:
        return (
            f"No: the recomputes of {len(differing)} {of} do not compute what their forward "
            "computed, which can make gradients wrong. The findings show where."
        )
    if updating:
        return (
            f"The results are the same, but the recomputes of {len(updating)} {of} update buffers "
            "that the forward has already updated."
        )
    if leaking:
        some = plural(len(leaking), "block")
        return f"The results are the same, but something leaves {some} without its gradient."
    undecided = [region for region in blocks if region.undecided]
    if undecided:
        return (
            f"Not known for {len(undecided)} {of}: the same call gives a different result "
            "each time on this device, or the block could not be inspected."
        )
    compared = plural(sum(region.operators for region in blocks), "result")
    if any(region.rounding for region in blocks):
        return f"Yes, up to rounding: {compared} {of} were compared."
    return f"Yes, to the last bit: {compared} {of} were compared."


class ComparedGradients(Struct, frozen=True):
    """Gradients of the first step with and without the script's checkpoints, compared.

    Attributes:
        number: How many gradients were compared.
        differing: Parameters with gradients that differ by more than rounding.
        equal: Whether all others are equal to the last bit.
        functions: Checkpoint functions that were taken out, other than torch's own.
    """

    number: int
    differing: tuple[str, ...] = ()
    equal: bool = True
    functions: tuple[str, ...] = ()

    def tell(self, region: ComparedRegion) -> Literal["equal", "different"] | None:
        """Whether this region's checkpoint changes gradients; ``None`` where that is not known.

        Where gradients differ, the region is among the causes if its own weights' do: what comes
        before it has the causes that come after that, too.
        """
        if region.function and region.function not in self.functions:
            return None
        if not self.differing:
            return "equal"
        inside = re.sub(r"(?<!\d)\d+-\d+$", "", region.module)
        own = [one for one in self.differing if one.startswith(inside and f"{inside.rstrip('.')}.")]
        return "different" if own else None


def is_open(fidelity: Fidelity) -> bool:
    """Whether blocks ran that may have another recompute: the comparison could not say."""
    return any(region.undecided for region in fidelity.regions)


class Sampled(Struct, frozen=True):
    """A gradient or a buffer, as far as two runs need it to be compared.

    Attributes:
        name: Qualified name of the parameter or buffer.
        is_buffer: Whether it is a buffer; else the gradient of a parameter.
        bits: A number that depends on every bit; ``None`` where there is no gradient.
        values: Up to 256 elements, or as many sums of all elements, the same in every run.
        rounding: The distance that one rounding of its type explains.
    """

    name: str
    is_buffer: bool
    bits: int | None = None
    values: tuple[float, ...] = ()
    rounding: float = 0.0

    def distance(self, other: Sampled) -> float:
        """Norm of the difference over the norm; infinite where one is missing, 0 where all bits
        are the same.
        """
        if self.bits == other.bits:
            return 0.0
        if self.bits is None or other.bits is None or len(self.values) != len(other.values):
            return math.inf
        apart = math.dist(self.values, other.values)
        norm = math.hypot(*other.values)
        distance = apart / norm if norm else (math.inf if apart else 0.0)
        return distance if math.isfinite(distance) else math.inf


def sampled_name(rank: int) -> str:
    """File name of a rank's gradients in the folder of a run with ``--verify``."""
    return f"gradients-rank{rank}.json"


def write_sampled(folder: Path, rank: int, sampled: tuple[Sampled, ...]) -> None:
    """Write the gradients of the first step into the folder of the run record."""
    write_whole(folder / sampled_name(rank), msgspec.json.encode(sampled))


def read_sampled(folder: Path, rank: int = 0) -> tuple[Sampled, ...]:
    """Read them back; empty where there are none, or none that can be read."""
    try:
        data = content(folder / sampled_name(rank))
        return msgspec.json.decode(data, type=tuple[Sampled, ...])
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError):
        return ()
