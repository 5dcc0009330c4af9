"""A training step, operator by operator, without its tensors.

Values have numbers. Two results have the same number where the same operator got the same
arguments: storages with the same number at the same place, equal sizes, equal constants. A number
therefore proves equal bits without a look at any element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Phase = Literal["forward", "recompute", "backward"]
# A file and a line in it.
Line = tuple[str, int]


class Memory:
    """One storage, from its first sight to its end.

    Attributes:
        number: Number of the value that it holds.
        sources: Numbers of the values that its elements were copied from, without a change.
        bytes: Its size.
        born: Place of the operation that made it, or that used it first.
        outside: Whether it was there before the watched steps.
        made_in: Phase in which it was made.
        call: Index of the innermost module call in which it was made.
        line: Line that made it; ``None`` where it came from outside.
        died: Place of the first operation behind its end; ``None`` while it lives.
        last_read: Place of the last operation that read it, or ``born``.
        read_in_backward: Whether a recompute or a backward pass read it.
        read_from_outside: Whether the program may have read it without an operator.
        writers: Places of the operations that wrote it.
        unwritten: Whether it holds whatever was there before.
        version: The highest version counter seen on a tensor in it.
        expected: The version counter that the known writes explain.
    """

    __slots__ = (
        "born",
        "bytes",
        "call",
        "died",
        "expected",
        "last_read",
        "line",
        "made_in",
        "number",
        "outside",
        "read_from_outside",
        "read_in_backward",
        "reference",
        "sources",
        "unwritten",
        "writers",
    )

    def __init__(self, number: int, size: int, born: int, *, outside: bool, made_in: Phase) -> None:
        self.number = number
        self.sources = frozenset((number,))
        self.bytes = size
        self.born = born
        self.outside = outside
        self.made_in: Phase = made_in
        self.call: int | None = None
        self.line: Line | None = None
        self.died: int | None = None
        self.last_read = born
        self.read_in_backward = False
        self.read_from_outside = False
        self.writers: list[int] = []
        self.unwritten = False
        self.expected = 0
        # A weak reference to the storage; its callback notes the end.
        self.reference: object = None


class Operation:
    """One call of an operator that computes, writes or communicates.

    Attributes:
        name: The operator without its overload, such as ``aten.addmm``.
        step: The watched step that it belongs to, from 0.
        phase: Where it ran.
        call: Index of the innermost module call around it; ``None`` outside of modules.
        line: The innermost line outside of torch; ``None`` in a backward pass.
        ms: Time that the operator took, without our own.
        number: Number of its result.
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
    """

    __slots__ = (
        "behind",
        "call",
        "counts",
        "draws",
        "in_function",
        "line",
        "makes",
        "ms",
        "name",
        "needed",
        "node",
        "number",
        "phase",
        "reads",
        "repeats",
        "step",
        "writes",
    )

    def __init__(self, name: str, step: int, phase: Phase, call: int | None) -> None:
        self.name = name
        self.step = step
        self.phase: Phase = phase
        self.call = call
        self.line: Line | None = None
        self.ms = 0.0
        self.number = 0
        self.reads: tuple[Memory, ...] = ()
        self.makes: tuple[Memory, ...] = ()
        self.writes: tuple[Memory, ...] = ()
        self.node = -1
        self.behind = -1
        self.in_function = False
        self.repeats: int | None = None
        self.draws = False
        self.counts = False
        self.needed = False


class ModuleCall:
    """One call of a module.

    Attributes:
        name: The module's name in its model; empty where unknown.
        class_name: Its class.
        module: Identity of the module.
        parent: Index of the call around it.
        phase: Where it ran.
        line: The innermost line outside of torch that made the call.
        first, last: Places of its operations, as a range.
        trained: Whether its result needs a gradient.
        rows: One number for each row of its first input; of outermost calls in the forward only.
        sources: Numbers of the values that the rows were copied from.
        weights: Identity and version of all its weights, as one number, of the same calls.
        thread: The thread that it ran in.
    """

    __slots__ = (
        "class_name",
        "first",
        "last",
        "line",
        "module",
        "name",
        "parent",
        "phase",
        "rows",
        "sources",
        "thread",
        "trained",
        "weights",
    )

    def __init__(self, module: int, name: str, class_name: str, parent: int | None) -> None:
        self.module = module
        self.name = name
        self.class_name = class_name
        self.parent = parent
        self.phase: Phase = "forward"
        self.line: Line | None = None
        self.first = self.last = 0
        self.trained = False
        self.rows: tuple[int, ...] = ()
        self.sources: frozenset[int] = frozenset()
        self.weights = 0
        self.thread = 0


class BackwardPass:
    """One pass of autograd's engine.

    Attributes:
        first, last: Places of its operations, as a range.
        nodes: Numbers of the nodes in its graph.
        nested: Whether it ran inside another pass.
    """

    __slots__ = ("first", "last", "nested", "nodes")

    def __init__(self, first: int, nodes: frozenset[int], *, nested: bool) -> None:
        self.first = first
        self.last = first
        self.nodes = nodes
        self.nested = nested


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
        hidden: Why unread results cannot be found; ``None`` where they can.
        site_of: Names a line for people.
        is_installed: Whether a file belongs to an installed package.
    """

    def __init__(
        self, site_of: Callable[[str, int], str], is_installed: Callable[[str], bool]
    ) -> None:
        self.site_of = site_of
        self.is_installed = is_installed
        self.operations: list[Operation] = []
        self.memories: list[Memory] = []
        self.calls: list[ModuleCall] = []
        self.passes: list[BackwardPass] = []
        self.steps: list[int] = [0]
        self.holders: dict[tuple[str, Line | None], int] = {}
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

    def own_line(self, line: Line | None, index: int | None) -> Line | None:
        """The line, or else that of the nearest module call, that is in no installed package.

        Args:
            line: A line inside a module call.
            index: That call.
        """
        for call in self.calls_from(index):
            if line is not None and not self.is_installed(line[0]):
                break
            line = call.line
        return line

    def calls_around(self, operation: Operation) -> Iterator[ModuleCall]:
        """The module calls around an operation, outward."""
        return self.calls_from(operation.call)

    def calls_from(self, index: int | None) -> Iterator[ModuleCall]:
        """A module call and those around it, outward."""
        while index is not None:
            call = self.calls[index]
            yield call
            index = call.parent

    def is_trained(self, operation: Operation) -> bool:
        """Whether gradients flow through what it is part of.

        In an autograd function autograd is off, and so it is in all that the function calls.
        """
        return operation.node in self.evaluated or any(
            call.trained for call in self.calls_around(operation)
        )

    @functools.cached_property
    def evaluated(self) -> frozenset[int]:
        """Numbers of the nodes in the graphs of all backward passes; of an ended ledger."""
        return frozenset(node for one in self.passes for node in one.nodes if node >= 0)
