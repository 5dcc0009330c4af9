"""AOTAutograd's graphs, and which operators of the forward graph the backward graph repeats.

AOTAutograd prints its graphs with ``torch.fx.GraphModule.print_readable``. The text is read line by
line and never run.

Passes over the graphs rename values, so names do not match. Two operators are the same work when
they do the same to the same values. An operator runs again where the backward graph works it out
without any gradient, and the forward graph did so already.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.compiled.logs import BREAK, CONFIG, Record

# `name: "f32[4, 32][32, 1]cpu" = expression;  other = None`. Types came with torch 2.1.
_STATEMENT = re.compile(r'\s+([A-Za-z_]\w*)(?:: "([^"]*)")? = (.+)$')
_INPUT = re.compile(r'\b([A-Za-z_]\w*): "([^"]*)"')
# A joint graph declares its inputs in its body.
_DECLARED = re.compile(r'\s+([A-Za-z_]\w*): "([^"]*)"\s*(?:#.*)?$')
_FILE = re.compile(r"File: (.{1,1000}?):(\d+) in ")
_GROUP = re.compile(r"ac_graph_id: (\d+)")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)$")
_ITEM = re.compile(r"([A-Za-z_]\w*)\[(\d+)\]$")
_NAME = re.compile(r"(?<![\w.'\"])([A-Za-z_]\w*)(?![\w(=.'\"]| =)")
_TYPE = re.compile(r"([a-z]+(\d{1,3})\w*)\[([^\]]*)\]")
_DELETED = re.compile(r";  (?:[A-Za-z_]\w* = )+None$")

GETITEM = "getitem"
LENGTH = "length"
# Keeps the random state of an operator, which is its first argument; and runs it with that state.
_KEEPS_STATE = "torch.ops.higher_order.run_and_save_rng_state"
_WITH_STATE = "torch.ops.higher_order.run_with_rng_state"
_GRAPHSAFE = "torch.ops.higher_order.graphsafe_run_with_rng_state"
_CHANGING = 128


class PrintedNode(Struct, frozen=True):
    """One statement of a graph.

    Attributes:
        name: What it makes.
        target: What is called: ``aten.addmm.default``; ``getitem`` for one of several results.
        reads: Names of the nodes and inputs that it reads, in order.
        text: Its arguments as they are printed.
        type: Type and shape of the result as printed; empty where it has several.
        file: Where in the model's code, ``file:line``; ``None`` where the text has no place.
        group: Number of the checkpoint that it is in; ``None`` outside any.
        state: Whether it keeps (``keeps``) or is given (``given``) the state of random numbers.
        read_types: Type of each node in ``reads``, as printed.
    """

    name: str
    target: str
    reads: tuple[str, ...]
    text: str
    type: str
    file: str | None
    group: int | None
    state: str = ""
    read_types: tuple[str, ...] = ()

    @property
    def operator(self) -> str:
        """``addmm`` for ``aten.addmm.default``."""
        parts = self.target.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    def with_reads(self, values: Mapping[str, str]) -> str:
        """Its arguments with other words for what it reads."""
        return _NAME.sub(lambda name: values.get(name[1], name[1]), self.text)


class PrintedGraph(Struct, frozen=True):
    """A graph: what goes in, with types, and what is done."""

    inputs: dict[str, str]
    nodes: tuple[PrintedNode, ...]


def shape_of(type_: str) -> tuple[int, ...] | None:
    """The shape that a printed type has: ``(4, 32)`` for ``f32[4, 32][32, 1]cpu``.

    A length that changes is taken for 128, for want of a better number.
    """
    match = _TYPE.match(type_)
    return tuple(map(_length, filter(str.strip, match[3].split(",")))) if match else None


def is_length(type_: str) -> bool:
    """Is a value of that printed type a number, such as a length that changes?"""
    return type_.startswith("Sym(")


def _length(text: str) -> int:
    """A length as printed; one that changes counts as the factors that are known of it."""
    known = [int(part) for part in text.split("*") if part.strip().isdecimal()]
    return prod(known) * (1 if text.strip().isdecimal() else _CHANGING)


def bytes_of(type_: str) -> int:
    """Bytes of a value of that printed type; 0 where the shape is not known."""
    match = _TYPE.match(type_)
    return int(match[2]) // 8 * prod(shape_of(type_) or ()) if match else 0


def parse_graph(text: str) -> PrintedGraph:
    """The first graph of the text; functions that it passes to operators are left out."""
    heading, body = _split(text.split("\n"))
    inputs = {name: type_ for line in heading for name, type_ in _INPUT.findall(line)}
    nodes: dict[str, PrintedNode] = {}
    types = dict(inputs)
    file: str | None = None
    group: int | None = None
    for line in body:
        stripped = line.strip()
        if stripped.startswith("#"):
            place, number = _FILE.search(stripped), _GROUP.search(stripped)
            file = f"{place[1]}:{place[2]}" if place else None
            group = int(number[1]) if number else None
        elif typed := _DECLARED.match(line):
            inputs[typed[1]] = types[typed[1]] = typed[2]
        elif node := _node(line, file, group):
            reads = tuple(n for n in _NAME.findall(node.text) if n in types)
            types[node.name] = node.type
            read_types = tuple(types[read] for read in reads)
            nodes[node.name] = replace(node, reads=reads, read_types=read_types)
    return PrintedGraph(inputs, _grouped(nodes))


def _split(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines of the first function's heading, and its body's lines up to the ``return``."""
    begin = next((at for at, line in enumerate(lines) if "def forward(" in line), len(lines))
    indent = len(lines[begin]) - len(lines[begin].lstrip()) + 4 if begin < len(lines) else 0
    inside = begin
    while inside < len(lines) and not lines[inside].partition("  #")[0].rstrip().endswith(":"):
        inside += 1
    body = []
    for line in lines[inside + 1 :]:
        if line[:indent].strip() or line.strip().startswith("return "):
            break
        if line[indent : indent + 1].strip():
            body.append(line)
    return lines[begin : inside + 1], body


def _node(line: str, file: str | None, group: int | None) -> PrintedNode | None:
    match = _STATEMENT.match(line)
    if match is None:
        return None
    name, type_, made = match[1], match[2] or "", _DELETED.sub("", match[3])
    if item := _ITEM.match(made):
        return PrintedNode(name, GETITEM, (), f"{item[1]}, {item[2]}", type_, file, group)
    call = _CALL.match(made)
    if call is None:
        # A length that is worked out from others: what it is stands in its type.
        return PrintedNode(name, LENGTH, (), "", type_, file, group) if is_length(type_) else None
    target, arguments, state = call[1], call[2], ""
    if target in (_KEEPS_STATE, _GRAPHSAFE):
        target, _, arguments = arguments.partition(", ")
        arguments = re.sub(r", rng_state = \w+$", "", arguments)
        state = "keeps" if call[1] == _KEEPS_STATE else "given"
    elif target == _WITH_STATE:
        _, target, arguments = [*arguments.split(", ", 2), "", ""][:3]
        state = "given"
    target = target.removeprefix("torch.ops.")
    return PrintedNode(name, target, (), arguments, type_, file, group, state)


def _grouped(nodes: dict[str, PrintedNode]) -> tuple[PrintedNode, ...]:
    """The nodes; a node that torch made around another is in the checkpoint of its reader."""
    group = {node.name: node.group for node in nodes.values()}
    for node in reversed(nodes.values()):
        for read in node.reads:
            if read in nodes and nodes[read].state and group[read] is None:
                group[read] = group[node.name]
    return tuple(replace(node, group=group[node.name]) for node in nodes.values())


# Nothing runs on a device for these operators.
VIEWS = frozenset(
    "t transpose view _unsafe_view reshape expand permute slice select unsqueeze squeeze detach "
    "alias split split_with_sizes unbind as_strided lift_fresh_copy numpy_T mT sym_size "
    "inductor_lookup_seed inductor_force_stride_order".split()
)
_TANGENT = "tangents"

# A recompute of these costs what it cost before; anything else is fused with its readers.
PRODUCTS = frozenset("mm addmm bmm baddbmm _scaled_mm _grouped_mm addbmm".split())
# The compiler makes kernels for operators of these; for any other it calls the kernel that exists.
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
        nodes: The operators that do work, in order; views are none. Operators that a checkpoint's
            recompute leaves out, because no gradient needs them, come last in that checkpoint.
        times: For each: how often the backward graph runs it.
        trains: For each: can a gradient reach it? None reaches a mask made of numbers and lengths.
        saved_bytes: Bytes that the forward pass keeps for the backward pass, inputs left out.
        gradients: Operators of the backward graph that work with gradients, by name.
        strange: Costly operators of the backward graph that no gradient goes into, and that the
            forward graph does not have: these are not explained.
    """

    nodes: tuple[PrintedNode, ...]
    times: tuple[int, ...]
    trains: tuple[bool, ...]
    saved_bytes: int
    gradients: Counter[str]
    strange: tuple[str, ...]


def find_repeats(forward: PrintedGraph, backward: PrintedGraph) -> Repeats:
    """The operators of the forward graph that run again in the backward graph."""
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
    trains = _reached_by_gradients(forward)
    return Repeats(
        nodes=nodes,
        times=tuple(-(-again[values[node.name]] // same[values[node.name]]) for node in nodes),
        trains=tuple(node.name in trains for node in nodes),
        saved_bytes=sum(bytes_of(backward.inputs[name]) for name in kept),
        gradients=Counter(
            node.operator for node in backward.nodes if does_work(node) and node.name in gradients
        ),
        strange=tuple(strange),
    )


def _reached_by_gradients(graph: PrintedGraph) -> set[str]:
    """Names of the results of floating-point and complex inputs: only these may need a gradient."""
    found = {name for name, type_ in graph.inputs.items() if type_.startswith(("f", "bf", "c"))}
    for node in graph.nodes:
        if not found.isdisjoint(node.reads):
            found.add(node.name)
    return found


def _asked_for(forward: PrintedGraph, wanted: set[str], ran: set[str]) -> set[str]:
    """The operators of each checkpoint that gradients need.

    These are the ones that run again, the ones that are kept for that checkpoint's recompute, and
    the ones that both need. A result that is kept because another checkpoint begins with it is not.
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
            # An operator that keeps a state returns the state first, then its result.
            own = values[node.reads[0]]
            values[node.name] = own if node.text.endswith(" 1") else f"state of {own}"
            continue
        text = f"{node.target}({node.with_reads(values)})"
        values[node.name] = codes.setdefault(text, f"<{len(codes)}>")


def _given(name: str, type_: str) -> str:
    """The value of an input: lengths are the same wherever they are."""
    return type_ if is_length(type_) else name


_BUDGET = re.compile(r'"activation_memory_budget": ([\d.]{1,8})')
_CHECKPOINT = "torch.ops.higher_order.tag_activation_checkpoint("
_PARTITIONS_FILE = re.compile(r"# File: (.{1,1000}?):(\d+) in ([\w<>.]{1,200})")
_PARAMETER = re.compile(r"L_\w{1,40}?_modules_(\w{1,400})_(?:parameters|buffers)_\w{1,80}?_$")

# Wrappers' names for the module that they wrap, without the underscore that the compiler drops.
_WRAPPERS = frozenset({"checkpoint_wrapped_module", "orig_mod", "fsdp_wrapped_module", "module"})

# Operators that give the same weight in another layout or type.
_SAME_WEIGHT = frozenset({"t", "permute", "transpose", "_to_copy", "convert_element_type"})
# Arithmetic that takes as long as moving one byte, of a GPU's or a processor's order.
_FLOPS_A_BYTE = 50.0


class CompiledSite(Struct, frozen=True):
    """Where compiled code asks for a checkpoint.

    Attributes:
        line: ``file:line``.
        place: ``file:function``, by which mechanisms are known.
    """

    line: str
    place: str


class Partition(Struct, frozen=True, dict=True):
    """One compiled forward graph with its backward graph.

    Attributes:
        compile_id: ``frame/version``, as the profiler's range around a call has it.
        repeats: What runs again.
        modules: For each operator the module of the weights it uses; ``None`` where unknown.
        sites: The checkpoints in the code that was compiled, in order.
        budget: The memory budget that the compiler had; ``None`` where that is not known.
        traced: Whether the code that was compiled is known, and so what checkpoints are in it.
    """

    compile_id: str
    repeats: Repeats
    modules: tuple[str | None, ...]
    sites: tuple[CompiledSite, ...]
    budget: float | None
    traced: bool = True

    @property
    def readable(self) -> bool:
        """Is every recompute explained? Before torch 2.10 graphs do not say which operators a
        checkpoint is around.
        """
        marked = any(node.group is not None for node in self.repeats.nodes)
        unasked = not self.sites if self.traced else not any(self.asked)
        return not self.repeats.strange and (marked or unasked)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Each operator's share of the forward graph's time."""
        total = sum(self.costs) or 1.0
        return tuple(cost / total for cost in self.costs)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Each operator's time, as bytes: its result, and what its arithmetic is worth."""
        return tuple(_cost(node) for node in self.repeats.nodes)

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """How often each operator runs again for a checkpoint's sake, or at a price."""
        return tuple(
            times if node.group is not None or has_price(node) else 0
            for node, times in zip(self.repeats.nodes, self.repeats.times, strict=True)
        )


def read_partitions(records: Iterable[Record]) -> dict[str, tuple[Partition, ...]]:
    """The graphs by ``frame/version``, in the order in which they run.

    One compilation can make several: DDP's optimizer divides a graph. A second compilation under
    the same number replaces the first.
    """
    found: dict[str, list[Partition]] = defaultdict(list)
    dynamo: dict[str, str] = {}
    budgets: dict[str, float] = {}
    forward: dict[str, str] = {}
    for record in records:
        key = record.compile_id
        if key is None:
            continue
        if record.name == "dynamo_start":
            for known in (found, dynamo, budgets, forward):
                known.pop(key, None)
        elif record.name == "dynamo_output_graph":
            dynamo[key] = record.payload
        elif record.name == CONFIG:
            if budget := _BUDGET.search(record.payload):
                budgets[key] = float(budget[1])
        elif record.name == "aot_forward_graph":
            forward[key] = record.payload
        elif record.name == "aot_backward_graph" and key in forward:
            pair = forward.pop(key), record.payload
            found[key].append(_partition(key, pair, dynamo.get(key, ""), budgets.get(key)))
    return {key: tuple(parts) for key, parts in found.items()}


def graph_breaks(records: Iterable[Record]) -> tuple[str, ...]:
    """Why the compiler broke graphs off, one text each."""
    reasons = (record.payload.strip() for record in records if record.name == BREAK)
    return tuple(dict.fromkeys(reason for reason in reasons if reason))


def _partition(key: str, pair: tuple[str, str], dynamo: str, budget: float | None) -> Partition:
    forward, backward = map(parse_graph, pair)
    repeats = find_repeats(forward, backward)
    names = _parameters(dynamo, forward.inputs)
    return Partition(
        compile_id=key,
        repeats=repeats,
        modules=_modules(forward.nodes, repeats.nodes, names),
        sites=_sites(dynamo),
        budget=budget,
        traced=bool(dynamo),
    )


def _parameters(dynamo: str, inputs: dict[str, str]) -> dict[str, str]:
    """The module of each input that is a weight, where the traced function has the same inputs."""
    traced = parse_graph(dynamo).inputs
    if len(traced) != len(inputs) or any(
        shape_of(one) != shape_of(other)
        for one, other in zip(traced.values(), inputs.values(), strict=True)
    ):
        return {}
    modules = {}
    for name, parameter in zip(inputs, traced, strict=True):
        if match := _PARAMETER.match(parameter):
            path = match[1].replace("_modules_", ".").split(".")
            if kept := [part for part in path if part not in _WRAPPERS]:
                modules[name] = ".".join(kept)
    return modules


def _modules(
    every: tuple[PrintedNode, ...], working: tuple[PrintedNode, ...], weights: dict[str, str]
) -> tuple[str | None, ...]:
    """The module of the first weight, or view or copy of one, that each operator reads."""
    held, found = dict(weights), {}
    for node in every:
        module = next((held[read] for read in node.reads if read in held), None)
        if module is not None:
            found[node.name] = module
            if node.operator in _SAME_WEIGHT:
                held[node.name] = module
    return tuple(found.get(node.name) for node in working)


def _sites(dynamo: str) -> tuple[CompiledSite, ...]:
    """Where the traced code asks for checkpoints, in order."""
    sites: list[CompiledSite] = []
    last: CompiledSite | None = None
    for line in dynamo.split("\n"):
        if place := _PARTITIONS_FILE.search(line):
            last = CompiledSite(f"{place[1]}:{place[2]}", f"{place[1]}:{place[3]}")
        elif _CHECKPOINT in line and last is not None:
            sites.append(last)
    return tuple(sites)


def _cost(node: PrintedNode) -> float:
    """Bytes that the operator writes, and its arithmetic as bytes."""
    first = node.read_types[0] if node.read_types else ""
    moved = float(bytes_of(node.type) or bytes_of(first)) or 4.0
    if not is_costly(node.operator):
        return moved
    if node.operator in PRODUCTS:
        summed = shape_of(node.read_types[-2]) if len(node.read_types) > 1 else None
        return moved + 2 * prod(shape_of(node.type) or ()) * (summed or (1,))[-1] / _FLOPS_A_BYTE
    query, length = shape_of(first) or (), shape_of(node.read_types[-1]) or (1, 1)
    return moved + 4 * prod(query) * prod(length[-2:-1]) / _FLOPS_A_BYTE
