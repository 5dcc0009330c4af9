"""What a rule on compiled code gets to see, with a trace or from the compiler's logs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from recompute_scan.result import CompiledCode, CompiledGraph, CompiledRecompute, Level


class CodeEvidence(Struct, frozen=True):
    """Compiled code with its surroundings.

    Attributes:
        code: The graphs that the compiler made.
        environment: Versions and settings, as far as they are known.
        confidence: How sure the counts are.
    """

    code: CompiledCode
    environment: Mapping[str, str]
    confidence: Level

    def recomputes(self) -> Iterator[tuple[CompiledGraph, CompiledRecompute]]:
        """What runs again, each with its graph."""
        for graph in self.code.graphs:
            for one in graph.recomputes:
                yield graph, one


def place_of(graph: CompiledGraph, one: CompiledRecompute) -> str:
    """One line on what runs again, and where."""
    module = f" in {one.module}" if one.module else ""
    source = f" at {one.source}" if one.source else ""
    return f"graph {graph.name}: {one.operators} x {one.operator}{module}{source}"
