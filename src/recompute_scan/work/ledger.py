"""A training step, operator by operator, without its tensors.

Values have numbers. Two results have the same number where the same operator got the same
arguments: storages with the same number at the same place, equal sizes, equal constants. A number
therefore proves equal bits. Only data from other processes is summed up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct, field

# All that is in no backward pass is ``forward``, an optimizer's step too.
Phase = Literal["forward", "recompute", "backward"]
# A file and a line in it.
Line = tuple[str, int]
# A line that is at work, and the first line of its function; 0 where that is a module's hook.
Frame = tuple[Line, int]
# Frames outside of torch, each called by the next, as far out as the nearest module call.
Frames = tuple[Frame, ...]


class Memory(Struct, eq=False, gc=False):
    """One storage, from its first sight to its end.

    Attributes:
        number: Number of the value that it holds.
        sources: Numbers of the values that its elements were copied from, without a change.
        bytes: Its size.
        born: Place of the operation that made it, or that used it first.
        outside: Whether it was there before the watched steps.
        made_in: Phase in which it was made.
        call: Index of the innermost module call in which it was made.
        frames: Where it was made; none where it came from outside.
        died: Place of the first operation behind its end; ``None`` while it lives.
        last_read: Place of the last operation that read it, or ``born``.
        read_in_backward: Whether a recompute or a backward pass read it.
        read_from_outside: Whether the program may have read it without an operator.
        writers: Places of the operations that wrote it.
        unwritten: Whether it holds whatever was there before.
        arriving: Whether a collective was the last to write it.
        expected: The version counter that the known writes explain.
        checksum: Of memory from outside: its bits when it was used first; ``None`` if unknown.
        reference: A weak reference to the storage; its callback notes the end.
    """

    number: int
    bytes: int
    born: int
    outside: bool
    made_in: Phase
    sources: tuple[int, ...]
    expected: int = 0
    call: int | None = None
    frames: Frames = ()
    died: int | None = None
    last_read: int = 0
    read_in_backward: bool = False
    read_from_outside: bool = False
    writers: list[int] = field(default_factory=list)
    unwritten: bool = False
    arriving: bool = False
    checksum: int | None = None
    reference: object = None


class Operation(Struct, eq=False, gc=False):
    """One call of an operator that computes, writes or communicates.

    Attributes:
        name: The operator without its overload, such as ``aten.addmm``.
        step: The watched step that it belongs to, from 0.
        phase: Where it ran.
        call: Index of the innermost module call around it; ``None`` outside of modules.
        frames: Where it was called; none in a backward pass and in the second step.
        ms: Time that the operator took, without our own.
        settings: Hash of its constants that do not follow from shapes; 0 for none.
        number: Number of its result, in the forward of the first step.
        reads: The memory that its result depends on.
        makes: The memory that it made.
        writes: The memory that it wrote, which existed before.
        node: Number of its autograd node; -1 where there is none.
        behind: Number of the autograd node that ran it; -1 outside of a backward pass.
        in_function: Whether it ran in an autograd function written in Python.
        repeats: Place of the operation with the same result before it in the step.
        draws: Whether it drew random numbers.
        counts: Whether its time is worth saving: it derives data from data.
        needed: Whether something outside of the watched operators sees what it does.
        gives_two: Whether it computes an input's and a weight's gradient, of a convolution.
    """

    name: str
    step: int
    phase: Phase
    call: int | None
    frames: Frames = ()
    ms: float = 0.0
    settings: int = 0
    number: int = 0
    reads: tuple[Memory, ...] = ()
    makes: tuple[Memory, ...] = ()
    writes: tuple[Memory, ...] = ()
    node: int = -1
    behind: int = -1
    in_function: bool = False
    repeats: int | None = None
    draws: bool = False
    counts: bool = False
    needed: bool = False
    gives_two: bool = False


class ModuleCall(Struct, eq=False):
    """One call of a module.

    Attributes:
        name: The module's name in its model; empty where unknown.
        class_name: Its class.
        module: Identity of the module.
        call: Index of the call around it.
        phase: Where it ran.
        frames: Where it was called.
        first, last: Places of its operations, as a range.
        trained: Whether its result needs a gradient.
        rows: One number for each row of its first input; of outermost calls in the forward only.
        sources: Numbers of the values that the rows were copied from.
        weights: One number for the values of all its weights, of the same calls.
    """

    module: int
    name: str
    class_name: str
    call: int | None
    phase: Phase
    frames: Frames
    first: int
    last: int
    trained: bool = False
    rows: tuple[int, ...] = ()
    sources: frozenset[int] = frozenset()
    weights: int = 0


class BackwardPass(Struct, eq=False):
    """One pass of autograd's engine.

    Attributes:
        first, last: Places of its operations, as a range.
        nodes: Numbers of the nodes in its graph.
        nested: Whether it ran inside another pass.
    """

    first: int
    last: int
    nodes: frozenset[int]
    nested: bool


class Ledger:
    """Two steps: all that happened in the first, and what the second read of it.

    Attributes:
        operations: All operations, in order.
        memories: All memory that they touched.
        calls: All module calls, in the order in which they began.
        passes: All backward passes, in the order in which they began.
        steps: Place of the first operation of each step.
        holders: What kept recomputed memory alive at the end of a backward pass: a description,
            the line of its function, the bytes.
        step_ms: How long a step takes without this watch, at most; ``None`` where unknown.
        hidden: Why unread results cannot be found; ``None`` where they can.
        site_of: Names a line for people.
        installed: Whether each file in a frame belongs to an installed package; ``None`` for
            Python's and torch's own, and no frame of these is kept.
    """

    def __init__(self, site_of: Callable[[str, int], str]) -> None:
        self.site_of = site_of
        self.installed: dict[str, bool | None] = {}
        self.operations: list[Operation] = []
        self.memories: list[Memory] = []
        self.calls: list[ModuleCall] = []
        self.passes: list[BackwardPass] = []
        self.steps: list[int] = [0]
        self.holders: dict[tuple[str, Line | None], int] = {}
        self.step_ms: float | None = None
        self.hidden: str | None = None

    @property
    def first_step(self) -> Sequence[Operation]:
        """The operations of the first step."""
        return self.operations[: self.first_step_ends]

    @property
    def first_step_ends(self) -> int:
        """Place of the first operation that does not belong to the first step."""
        return self.steps[1] if len(self.steps) > 1 else len(self.operations)

    def site(self, line: Line | None) -> str:
        """A line for people; empty where there is none."""
        return self.site_of(*line) if line is not None else ""

    def path(self, one: Memory | Operation | ModuleCall) -> tuple[Line, ...]:
        """The lines that lead to it, outward."""
        around = (call.frames for call in self.calls_from(one.call))
        return tuple(line for frames in (one.frames, *around) for line, _ in frames)

    def own_line(self, one: Memory | Operation | ModuleCall) -> Line | None:
        """The nearest line outside of installed packages, or else the outermost."""
        path = self.path(one)
        own = (line for line in path if not self.installed[line[0]])
        return next(own, path[-1] if path else None)

    def calls_from(self, index: int | None) -> Iterator[ModuleCall]:
        """A module call and those around it, outward."""
        while index is not None:
            call = self.calls[index]
            yield call
            index = call.call

    def is_trained(self, operation: Operation) -> bool:
        """Whether gradients flow through what it is part of.

        In an autograd function autograd is off, and so it is in all that the function calls.
        """
        return operation.node in self.evaluated or any(
            call.trained for call in self.calls_from(operation.call)
        )

    @functools.cached_property
    def lines(self) -> LineTree:
        """The lines that lead to its operations; of an ended ledger."""
        return LineTree(self)

    @functools.cached_property
    def evaluated(self) -> frozenset[int]:
        """Numbers of the nodes in the graphs of all backward passes; of an ended ledger."""
        return frozenset(node for one in self.passes for node in one.nodes if node >= 0)


class LineTree:
    """The lines that lead to operations, as a tree: below a line is all that it calls.

    Between a line and the lines of a function that it calls is a node for the call, with the line.
    Hooks are not called by the line that calls their module.

    Attributes:
        above: The node above each node; it has the smaller number.
        line: The line of each; ``None`` above the script's.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.above = [0]
        self.line: list[Line | None] = [None]
        self._nodes: dict[tuple[int, Line], int] = {}
        self._of_call: dict[int | None, int] = {None: 0}
        self._known: dict[tuple[int, int], int] = {}

    def of(self, one: Operation) -> int:
        """The node of an operation."""
        return self._below(self.of_call(one.call), one.frames)

    def of_call(self, index: int | None) -> int:
        """The node of the line that makes a module call."""
        found = self._of_call.get(index)
        if found is None and index is not None:
            call = self._ledger.calls[index]
            found = self._of_call[index] = self._below(self.of_call(call.call), call.frames)
        return found or 0

    def _below(self, node: int, frames: Frames) -> int:
        key = node, id(frames)  # equal frames are one object
        if key not in self._known:
            for line, begins in reversed(frames):
                called = self._node(node, (line[0], -begins), self.line[node] if begins else None)
                node = self._node(called, line, line)
            self._known[key] = node
        return self._known[key]

    def _node(self, above: int, name: Line, line: Line | None) -> int:
        node = self._nodes.setdefault((above, name), len(self.above))
        if node == len(self.above):
            self.above.append(above)
            self.line.append(line)
        return node

    def way(self, node: int) -> list[int]:
        """The nodes from the first one to this one."""
        way = [node]
        while way[-1]:
            way.append(self.above[way[-1]])
        return way[::-1]

    def is_own(self, node: int) -> bool:
        """Whether the line is outside of installed packages."""
        line = self.line[node]
        return line is not None and not self._ledger.installed[line[0]]

    def sums(self, nodes: Iterable[int]) -> list[int]:
        """How many of these are at or below each node."""
        found = [0] * len(self.above)
        for node in nodes:
            found[node] += 1
        for node in range(len(found) - 1, 0, -1):
            found[self.above[node]] += found[node]
        return found

    def outermost(self, every: Sequence[int], some: Sequence[int]) -> list[int]:
        """For each node the outermost line on the way to it below which all are some; 0 of none."""
        found = [0] * len(every)
        for node in range(1, len(every)):
            alone = some[node] == every[node] and self.line[node] is not None
            found[node] = found[self.above[node]] or (node if alone else 0)
        return found
