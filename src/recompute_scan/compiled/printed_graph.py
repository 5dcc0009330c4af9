"""The graphs that AOTAutograd prints, read back: operators with what they read, and from where.

The text is that of ``torch.fx.GraphModule.print_readable``. It is read line by line and never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from msgspec import Struct
from msgspec.structs import replace

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
_TYPE = re.compile(r"([a-z]+\d\w*)\[([^\]]*)\]")
_DELETED = re.compile(r";  (?:[A-Za-z_]\w* = )+None$")

GETITEM = "getitem"
LENGTH = "length"
# Keeps the random state of an operator, which is its first argument; and runs it with that state.
_KEEPS_STATE = "torch.ops.higher_order.run_and_save_rng_state"
_WITH_STATE = "torch.ops.higher_order.run_with_rng_state"
_GRAPHSAFE = "torch.ops.higher_order.graphsafe_run_with_rng_state"
_CHANGING = 128
_BITS = re.compile(r"\d+")


class PrintedNode(Struct, frozen=True):
    """One statement of a graph.

    Attributes:
        name: What it makes.
        target: What is called: ``aten.addmm.default``; ``getitem`` for one of several results.
        reads: Names of the nodes and inputs that it reads, in order.
        text: Its arguments as they are printed.
        type: Type and shape of the result as printed; empty where it has several.
        file: Where in the model's code, ``file:line``; ``None`` where that is not said.
        group: Number of the checkpoint that it is in; ``None`` outside any.
        read_types: Types of what it reads, as printed.
        state: Whether it keeps (``keeps``) or is given (``given``) the state of random numbers.
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

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the result; ``None`` where it has none."""
        return shape_of(self.type)


class PrintedGraph(Struct, frozen=True):
    """A graph: what goes in, with types, and what is done."""

    inputs: dict[str, str]
    nodes: tuple[PrintedNode, ...]


def shape_of(type_: str) -> tuple[int, ...] | None:
    """The shape that a printed type has: ``(4, 32)`` for ``f32[4, 32][32, 1]cpu``.

    A length that changes is taken for 128, for want of a better number.
    """
    match = _TYPE.match(type_)
    if match is None:
        return None
    return tuple(_length(part) for part in match[2].split(",") if part.strip())


def is_length(type_: str) -> bool:
    """Is a value of that printed type a number, such as a length that changes?"""
    return type_.startswith("Sym(")


def _length(text: str) -> int:
    """A length as printed; one that changes counts as the factors that are known of it."""
    known = [int(part) for part in text.split("*") if part.strip().isdigit()]
    return prod(known) * (1 if text.strip().isdigit() else _CHANGING)


def bytes_of(type_: str) -> int:
    """Bytes of a value of that printed type; 0 where the shape is not known."""
    shape, kind = shape_of(type_), _TYPE.match(type_)
    if shape is None or kind is None:
        return 0
    bits = _BITS.search(kind[1])
    size = int(bits[0]) // 8 if bits else 1
    for length in shape:
        size *= length
    return size


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
    """The lines of the first function's heading, and those of its body up to its ``return``."""
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
    """The nodes; those that torch made around another are in the checkpoint of what reads them."""
    group = {node.name: node.group for node in nodes.values()}
    for node in reversed(nodes.values()):
        for read in node.reads:
            if read in nodes and nodes[read].state and group[read] is None:
                group[read] = group[node.name]
    return tuple(replace(node, group=group[node.name]) for node in nodes.values())
