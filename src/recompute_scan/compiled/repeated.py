"""Which operators of a compiled forward pass its backward graph runs again.

Names do not tell: passes over the graphs rename. Two operators are the same work when they do the
same to the same values; what a backward graph works out without any gradient, and the forward graph
did already, runs again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from msgspec import Struct

from recompute_scan.compiled.printed_graph import (
    GETITEM,
    LENGTH,
    PrintedGraph,
    PrintedNode,
    bytes_of,
    is_length,
)

# Nothing runs on a device for these.
VIEWS = frozenset(
    "t transpose view _unsafe_view reshape expand permute slice select unsqueeze squeeze detach "
    "alias split split_with_sizes unbind as_strided lift_fresh_copy numpy_T mT sym_size "
    "inductor_lookup_seed inductor_force_stride_order".split()
)
_TANGENT = "tangents"

# Of these a recompute costs what it cost before; anything else is fused with what needs it.
PRODUCTS = frozenset("mm addmm bmm baddbmm _scaled_mm _grouped_mm addbmm".split())
# What the compiler makes kernels of. Of anything else it calls the kernel that is there.
_FUSED = frozenset({"aten", "prims", "rngprims"})
_COSTLY = re.compile(r".*(attention|convolution|conv\d)")


def is_costly(operator: str) -> bool:
    """Is it work that a backward pass cannot run again for free: a product, attention, a
    convolution?
    """
    forward = "backward" not in operator
    return forward and (operator in PRODUCTS or bool(_COSTLY.match(operator)))


def has_price(node: PrintedNode) -> bool:
    """Does a recompute of it cost something: costly work, or an operator of a library or of the
    project, which the compiler fuses with nothing?
    """
    space = node.target.partition(".")[0]
    return is_costly(node.operator) or ("." in node.target and space not in _FUSED)


class Repeats(Struct, frozen=True):
    """The operators of a forward graph with what its backward graph makes of them.

    Attributes:
        nodes: The operators that do work, in order; views are none. What a checkpoint's recompute
            leaves out because no gradient asks for it comes last of that checkpoint's.
        times: For each: how often the backward graph runs it.
        saved_bytes: Bytes that the forward pass keeps for the backward pass, inputs left out.
        gradients: Operators of the backward graph that work with gradients, by name.
        strange: Costly operators of the backward graph that no gradient goes into, and that the
            forward graph does not have: what they are cannot be told.
    """

    nodes: tuple[PrintedNode, ...]
    times: tuple[int, ...]
    saved_bytes: int
    gradients: Counter[str]
    strange: tuple[str, ...]


def find_repeats(forward: PrintedGraph, backward: PrintedGraph) -> Repeats:
    """What of the forward graph runs again in the backward graph."""
    codes: dict[str, str] = {}
    values = {name: _given(name, type_) for name, type_ in forward.inputs.items()}
    _number(forward, values, codes)
    known = set(values.values())
    seen = {
        name: values.get(name, _given(f"backward {name}", type_))
        for name, type_ in backward.inputs.items()
    }
    _number(backward, seen, codes)
    gradients = {name for name in backward.inputs if name.startswith(_TANGENT)}
    again: Counter[str] = Counter()
    strange = []
    for node in backward.nodes:
        if any(read in gradients for read in node.reads):
            gradients.add(node.name)
        elif does_work(node):
            again[seen[node.name]] += 1
            if is_costly(node.operator) and seen[node.name] not in known:
                strange.append(node.operator)
    working = [node for node in forward.nodes if does_work(node)]
    # Of the same work done twice in the forward pass one recompute serves both.
    same = Counter(values[node.name] for node in working)
    kept = [name for name in backward.inputs if name in values and name not in forward.inputs]
    ran = {node.name for node in working if again[values[node.name]]}
    nodes = _unasked_last(working, _asked_for(forward, ran | set(kept), ran))
    return Repeats(
        nodes=nodes,
        times=tuple(-(-again[values[node.name]] // same[values[node.name]]) for node in nodes),
        saved_bytes=sum(bytes_of(backward.inputs[name]) for name in kept),
        gradients=Counter(
            node.operator for node in backward.nodes if does_work(node) and node.name in gradients
        ),
        strange=tuple(strange),
    )


def _asked_for(forward: PrintedGraph, wanted: set[str], ran: set[str]) -> set[str]:
    """What gradients ask for of each checkpoint's operators: what runs again, what is kept of them
    for that checkpoint's own recompute, and what these need. Its results, which are kept where they
    are what another checkpoint begins with, are not.
    """
    groups = {node.name: node.group for node in forward.nodes}
    asked = set(ran)
    inner: set[str] = set()  # what the same checkpoint reads
    for node in reversed(forward.nodes):
        if node.name in inner and node.name in wanted:
            asked.add(node.name)
        own = {read for read in node.reads if groups.get(read) == node.group}
        inner |= own
        if node.name in asked:
            asked |= own
    return asked


def _unasked_last(nodes: list[PrintedNode], asked: set[str]) -> tuple[PrintedNode, ...]:
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        if node.group is not None:
            places[node.group].append(place)
    found = list(nodes)
    for mine in places.values():
        order = sorted(mine, key=lambda place: nodes[place].name not in asked)
        for place, source in zip(mine, order, strict=True):
            found[place] = nodes[source]
    return tuple(found)


def does_work(node: PrintedNode) -> bool:
    """Does it run anything on the device?"""
    return node.target not in (GETITEM, LENGTH) and node.operator not in VIEWS


def _number(graph: PrintedGraph, values: dict[str, str], codes: dict[str, str]) -> None:
    """Give equal codes to the results of equal work, in place."""
    keeping = {node.name for node in graph.nodes if node.state == "keeps"}
    for node in graph.nodes:
        if is_length(node.type):
            values[node.name] = node.type
            continue
        if node.target == GETITEM and node.reads and node.reads[0] in keeping:
            # What keeps a state gives it first, and then what the operator itself gives.
            own = values[node.reads[0]]
            values[node.name] = own if node.text.endswith(" 1") else f"state of {own}"
            continue
        text = f"{node.target}({node.with_reads(values)})"
        values[node.name] = codes.setdefault(text, f"<{len(codes)}>")


def _given(name: str, type_: str) -> str:
    """The value of an input: lengths are the same wherever they are."""
    return type_ if is_length(type_) else name
