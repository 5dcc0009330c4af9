"""The verdict on compiled code from the compiler's graphs alone: no trace says what ran when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.compiled.checkpoints_of_code import reruns
from recompute_scan.compiled.compiled_answer import UNKNOWN, Answered, Graphs, code_of, with_own
from recompute_scan.compiled.opened import around, checkpoints_in
from recompute_scan.compiled.partitions import Partition
from recompute_scan.recompute.blocks import Block, with_lookalikes
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.spans import Span
from recompute_scan.recompute.verdict import Judgement, weigh
from recompute_scan.result import CompiledCode
from recompute_scan.trace.columns import Int64

_NOTHING = (
    "The compiler's logs have no graph of a backward pass (everything that trains ran in Python, "
    "or the compiler's backend makes none), and there is no trace."
)
_EMPTY = "The compiled graphs hold no operator of a forward pass: there is nothing to count."


class Alone(Struct, frozen=True):
    """What graphs say without a trace.

    Attributes:
        judgement: The verdict on compiled code.
        code: What the result says of it.
        surrounded: Whether it is known of every graph what checkpoints are around it.
    """

    judgement: Judgement
    code: CompiledCode
    surrounded: bool


def answer_alone(graphs: Graphs) -> Alone:
    """The verdict that the graphs come to, as if each of them were called once."""
    parts = [part for each in graphs.partitions.values() for part in each]
    unknown = tuple(dict.fromkeys(part.compile_id for part in parts if not part.readable))
    readable = tuple(code_of(part, None, graphs.budget) for part in parts if part.readable)
    code = CompiledCode(readable, unknown, graphs.breaks)
    surrounded = all(part.compile_id in graphs.around for part in parts)
    if not parts or unknown:
        reason = UNKNOWN.format(names=", ".join(unknown[:3])) if parts else _NOTHING
        return Alone(Judgement("inconclusive", reason), code, surrounded)
    entries = _Entries(parts, [reruns(graphs.around.get(one.compile_id, ())) for one in parts])
    if not entries.counts.counted.any():
        return Alone(Judgement("inconclusive", _EMPTY), code, surrounded)
    blocks = with_lookalikes(_blocks(parts, entries, graphs), entries.counts, entries.kinds)
    judgement = weigh(entries.counts, blocks, entries.counts.operators or ())
    judgement = with_own(judgement, entries.counts, entries.own)
    return Alone(judgement, code, surrounded)


def answer_without_backward(facts: RecomputeFacts, graphs: Graphs) -> Answered | None:
    """The same where a trace has a forward pass, and compiled autograd has made one graph of the
    backward pass, in which no autograd nodes are told apart; ``None`` for any other trace.
    """
    if not graphs.whole_backward or bool(facts.counts.counted.any()):
        return None
    alone = answer_alone(graphs)
    told = replace(facts, judgement=alone.judgement, level="graphs", compiled=None)
    return Answered(told, told, alone.code, seen=False, priced=False)


class _Entries:
    """The operators of all graphs, one after the other."""

    def __init__(self, parts: Sequence[Partition], outer: Sequence[int]) -> None:
        sizes = [len(part.repeats.nodes) for part in parts]
        self.begins = np.cumsum([0, *sizes])
        asked = np.array([number for part in parts for number in part.asked], np.int64)
        times = np.array([number for part in parts for number in part.repeats.times], np.int64)
        runs = asked + np.repeat(np.array(outer, np.int64), sizes)
        whole, zero = len(asked), np.zeros(len(asked))
        known: dict[tuple[str, str], int] = {}
        nodes = [node for part in parts for node in part.repeats.nodes]
        self.own: Int64 = times - asked
        self.kinds: Int64 = np.array(
            [known.setdefault((node.target, node.type), len(known)) for node in nodes], np.int64
        )
        self.counts = Counts(
            rows=np.arange(whole),
            multiplicity=runs.astype(np.float64),
            runs=runs,
            weight=np.array([cost for part in parts for cost in part.costs], np.float64),
            again=zero,
            redundant=zero,
            counted=np.ones(whole, np.bool_),
            step=np.zeros(whole, np.int64),
            batch=np.zeros(whole, np.int64),
            redundant_rows=np.zeros(0, np.int64),
        )


def _blocks(parts: Sequence[Partition], entries: _Entries, graphs: Graphs) -> list[Block]:
    """What checkpoints are around: inside graphs, and whole graphs."""
    found: list[Block] = []
    for part, begin, end in zip(parts, entries.begins[:-1], entries.begins[1:], strict=True):
        inside = checkpoints_in((part,), int(begin))
        outside = graphs.around.get(part.compile_id, ())
        if outside and end > begin:
            whole = Block(Span(int(begin), int(end) - 1, ()), outside, 0)
            found += around(whole, inside, entries.counts.weight)
        else:
            found += [Block(one, one.checkpoints, 0) for one in inside]
    return found
