"""Which operators of a compiled forward pass its backward graph runs again.

Names do not tell: passes over the graphs rename. Two operators are the same work when they do the
same to the same values; what a backward graph works out without any gradient, and the forward graph
did already, runs again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from recompute_scan.compiled.graph import GETITEM, Graph, Node, bytes_of

# Nothing runs on a device for these.
VIEWS = frozenset(
    "t transpose view _unsafe_view reshape expand permute slice select unsqueeze squeeze detach "
    "alias split split_with_sizes unbind as_strided lift_fresh_copy numpy_T mT sym_size "
    "inductor_lookup_seed inductor_force_stride_order".split()
)
_TANGENT = "tangents"


@dataclass(frozen=True)
class Repeats:
    """The operators of a forward graph with what its backward graph makes of them.

    Attributes:
        nodes: The operators that do work, in order; views are none.
        times: For each: how often the backward graph runs it.
        saved_bytes: Bytes that the forward pass keeps for the backward pass, inputs left out.
        backward: Operators of the backward graph that do work, by name, recomputes among them.
    """

    nodes: tuple[Node, ...]
    times: tuple[int, ...]
    saved_bytes: int
    backward: Counter[str]


def find_repeats(forward: Graph, backward: Graph) -> Repeats:
    """What of the forward graph runs again in the backward graph."""
    codes: dict[str, str] = {}
    values = {name: name for name in forward.inputs}
    _number(forward, values, codes)
    seen = {name: values.get(name, f"backward {name}") for name in backward.inputs}
    _number(backward, seen, codes)
    gradients = {name for name in backward.inputs if name.startswith(_TANGENT)}
    again: Counter[str] = Counter()
    for node in backward.nodes:
        if any(read in gradients for read in node.reads):
            gradients.add(node.name)
        elif does_work(node):
            again[seen[node.name]] += 1
    nodes = tuple(node for node in forward.nodes if does_work(node))
    # Of the same work done twice in the forward pass one recompute serves both.
    same = Counter(values[node.name] for node in nodes)
    kept = [name for name in backward.inputs if name in values and name not in forward.inputs]
    return Repeats(
        nodes=nodes,
        times=tuple(-(-again[values[node.name]] // same[values[node.name]]) for node in nodes),
        saved_bytes=sum(bytes_of(backward.inputs[name]) for name in kept),
        backward=Counter(node.operator for node in backward.nodes if does_work(node)),
    )


def does_work(node: Node) -> bool:
    """Does it run anything on the device?"""
    return node.target != GETITEM and node.operator not in VIEWS


def _number(graph: Graph, values: dict[str, str], codes: dict[str, str]) -> None:
    """Give equal codes to the results of equal work, in place."""
    keeping = {node.name for node in graph.nodes if node.state == "keeps"}
    for node in graph.nodes:
        if node.target == GETITEM and node.reads and node.reads[0] in keeping:
            # What keeps a state gives it first, and then what the operator itself gives.
            own = values[node.reads[0]]
            values[node.name] = own if node.text.endswith(" 1") else f"state of {own}"
            continue
        text = f"{node.target}({node.with_reads(values)})"
        values[node.name] = codes.setdefault(text, f"<{len(codes)}>")
