"""Names of Nsight Systems' events: numbers in the tables, texts in ``StringIds``.

A name is decoded once per distinct text, not once per event, except for NVTX ranges, whose texts
mostly differ. What a text says is four numbers: code of the
name, kind, sequence number, code of the shapes.

Under ``torch.autograd.profiler.emit_nvtx`` (which ``nsys profile --pytorch=autograd-nvtx`` and
``autograd-shapes-nvtx`` switch on) each operator and each autograd node becomes one range, its
text put together in ``torch/csrc/profiler/util.cpp`` (``getNvtxStr``)::

    name, seq = 12, op_id = 345, sizes = [[2, 8, 16], []], input_op_ids = [(344,0), (0,-1)]

Each part but the name may be missing: the sequence number where it is negative, ``op_id`` before
torch 1.10, sizes without ``record_shapes``. Nodes said ``stashed seq`` before torch 1.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from recompute_scan.trace.columns import Int64, Kind
from recompute_scan.trace.names import OPERATOR, RANGE
from recompute_scan.trace.nsys.database import TEXT_CHARS

_OPERATORS = ("aten::", "autograd::engine::", "torch::autograd::", "prims::")
_SIZES = re.compile(r"\[[\[\], 0-9]*\]")
# Numbers of autograd have 64 bits; 18 digits fit into them.
_DIGITS = 18


class Range(NamedTuple):
    """What the text of one range says.

    Attributes:
        name: The operator's, node's or annotation's own name.
        kind: ``Kind.OP`` for operators and autograd nodes, else ``Kind.ANNOTATION``.
        sequence: Autograd's sequence number, -1 where there is none.
        sizes: Input shapes as JSON text, empty where they were not recorded.
    """

    name: str
    kind: int
    sequence: int
    sizes: str


def parse_range(text: str) -> Range:
    """The parts of an NVTX text; one that ``emit_nvtx`` did not write is all name."""
    rest = text.partition(", input_op_ids = ")[0]
    rest, _, sizes = rest.partition(", sizes = ")
    if sizes and not _SIZES.fullmatch(sizes):
        sizes = ""
    rest, operator_number = _number(rest, ", op_id = ")
    rest, sequence = _number(rest, ", seq = ")
    if sequence < 0:
        rest, sequence = _number(rest, ", stashed seq = ")
    return Range(rest, _kind(rest, sequence, operator_number), sequence, sizes)


def _number(text: str, label: str) -> tuple[str, int]:
    """The text without its numbered end, and the number; the text itself and -1 without one."""
    before, found, digits = text.rpartition(label)
    if found and digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS:
        return before, int(digits)
    return text, -1


def _kind(name: str, sequence: int, operator_number: int) -> int:
    if RANGE.match(name):
        return Kind.ANNOTATION
    if sequence >= 0 or name.startswith(_OPERATORS):
        return Kind.OP
    if operator_number >= 0 and OPERATOR.match(name):  # torch numbered it
        return Kind.OP
    return Kind.ANNOTATION


Said = tuple[int, int, int, int]
NAMELESS = -1
# The driver's version of an entry point: cudaLaunchKernel_v7000. Kineto leaves it out.
_VERSION = re.compile(r"_v\d+(_ptsz|_ptds)?$")


class Texts:
    """Distinct names and shapes, numbered as they come.

    Args:
        most_chars: Longer names are cut and counted as ``names_shortened``.
        health: Counters to add to.
    """

    def __init__(self, most_chars: int, health: dict[str, int]) -> None:
        self._codes: dict[str, int] = {}
        self._sizes: dict[str, int] = {"": 0}
        self._most_chars = most_chars
        self._health = health

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by code."""
        return tuple(self._codes)

    @property
    def signatures(self) -> tuple[str, ...]:
        """All shapes, by code; the first is empty."""
        return tuple(self._sizes)

    def __len__(self) -> int:
        return max(len(self._codes), len(self._sizes))

    def code(self, name: str) -> int:
        """Code of a name."""
        if len(name) > self._most_chars:
            name = name[: self._most_chars]
            if name not in self._codes:
                self._count("names_shortened")
        return self._codes.setdefault(name, len(self._codes))

    def kernel(self, text: bytes) -> Said:
        """What a device activity's text says: its name."""
        return self.code(self._decode(text)), Kind.KERNEL, -1, 0

    def call(self, text: bytes) -> Said:
        """What a CUDA call's text says: its name, without the version of its entry point."""
        return self.code(_VERSION.sub("", self._decode(text))), Kind.RUNTIME, -1, 0

    def range(self, text: bytes) -> Said:
        """What an NVTX range's text says: all four."""
        decoded = self._decode(text)
        said = parse_range(decoded)
        # Shapes that were cut are no shapes.
        sizes = said.sizes if len(decoded) < TEXT_CHARS else ""
        dims = self._sizes.setdefault(sizes, len(self._sizes))
        return self.code(said.name), said.kind, said.sequence, dims

    def _decode(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._count("text_repaired")
            return text.decode(errors="replace")

    def _count(self, counter: str) -> None:
        self._health[counter] = self._health.get(counter, 0) + 1


class Wanted:
    """The rows of ``StringIds`` that one table's events refer to.

    Args:
        strings: Row for each event, ``none`` where its name is known or lacking.
        none: See ``strings``.
        reading: What a text of this table says.
    """

    def __init__(self, strings: Int64, none: int, reading: Callable[[bytes], Said]) -> None:
        self._asks = strings != none
        self._rows, self._where = np.unique(strings[self._asks], return_inverse=True)
        self._said = np.full((len(self._rows), 4), NAMELESS, np.int64)
        self._reading = reading

    def offer(self, rows: Int64, texts: Sequence[bytes | None]) -> None:
        """Take what is wanted of some rows of ``StringIds``."""
        if not len(self._rows):
            return
        at = np.minimum(self._rows.searchsorted(rows), len(self._rows) - 1)
        for row in np.flatnonzero(self._rows[at] == rows).tolist():
            if (text := texts[row]) is not None:
                self._said[at[row]] = self._reading(text)

    def fill(self, said: Int64) -> None:
        """Write what the texts say over the events' rows of ``said``, where a text was found."""
        found = self._said[self._where]
        known = found[:, 0] != NAMELESS
        said[np.flatnonzero(self._asks)[known]] = found[known]


def look_up(wanted: Iterable[Wanted], blocks: Iterable[tuple[Int64, list[bytes | None]]]) -> None:
    """Go through ``StringIds`` once, for all tables."""
    wanted = list(wanted)
    for numbers, texts in blocks:
        for one in wanted:
            one.offer(numbers[:, 0], texts)
