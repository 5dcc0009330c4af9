"""From the compiler's records to what each compiled function runs again by itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from math import prod

from msgspec import Struct

from recompute_scan.compiled.printed_graph import PrintedNode, bytes_of, parse_graph, shape_of
from recompute_scan.compiled.repeated import PRODUCTS, Repeats, find_repeats, has_price, is_costly
from recompute_scan.compiled.structured import BREAK, CONFIG, Record

_BUDGET = re.compile(r'"activation_memory_budget": ([\d.]{1,8})')
_CHECKPOINT = "torch.ops.higher_order.tag_activation_checkpoint("
_FILE = re.compile(r"# File: (.{1,1000}?):(\d+) in ([\w<>.]{1,200})")
_PARAMETER = re.compile(r"L_\w{1,40}?_modules_(\w{1,400})_(?:parameters|buffers)_\w{1,80}?_$")

# What wrappers call the module that they wrap; the compiler leaves out what is before the name.
_WRAPPERS = frozenset({"checkpoint_wrapped_module", "orig_mod", "fsdp_wrapped_module", "module"})

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
        modules: For each operator the module whose weights it uses; ``None`` where none tells.
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
        """What share of the forward graph's time each operator takes, by its arithmetic and the
        bytes of its result.
        """
        total = sum(self.costs) or 1.0
        return tuple(cost / total for cost in self.costs)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """What each operator takes: bytes of its result, and its arithmetic as bytes."""
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

    One compilation can make several: DDP's optimizer divides a graph. What was compiled again
    under the same number takes the place of what was before.
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
    """The module of each input that is a weight, where inputs are those of the traced function."""
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
    of = dict(weights)
    for node in every:
        module = next((of[read] for read in node.reads if read in of and read in weights), None)
        if module is None and len(node.reads) == 1 and node.reads[0] in of:
            module = of[node.reads[0]] if node.reads[0] in weights else None
        if module is not None:
            of[node.name] = module
            weights = weights | {node.name: module} if _is_view(node) else weights
    return tuple(of.get(node.name) for node in working)


def _is_view(node: PrintedNode) -> bool:
    return node.operator in {"t", "permute", "transpose", "_to_copy", "convert_element_type"}


def _sites(dynamo: str) -> tuple[CompiledSite, ...]:
    """Where the traced code asks for checkpoints, in order."""
    sites: list[CompiledSite] = []
    last: CompiledSite | None = None
    for line in dynamo.split("\n"):
        if place := _FILE.search(line):
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
        return moved + 2 * prod(node.shape or ()) * (summed or (1,))[-1] / _FLOPS_A_BYTE
    query, length = shape_of(first) or (), shape_of(node.read_types[-1]) or (1, 1)
    return moved + 4 * prod(query) * prod(length[-2:-1]) / _FLOPS_A_BYTE
