"""NVTX range texts to names, sequence numbers and shapes.

Under ``torch.autograd.profiler.emit_nvtx`` (which ``nsys profile --pytorch=autograd-nvtx`` and
``autograd-shapes-nvtx`` switch on) each operator and each autograd node becomes one range, its
text put together in ``torch/csrc/profiler/util.cpp`` (``getNvtxStr``)::

    name, seq = 12, op_id = 345, sizes = [[2, 8, 16], []], input_op_ids = [(344,0), (0,-1)]

Each part but the name may be missing: the sequence number where it is negative, ``op_id`` before
torch 1.10, sizes without ``record_shapes``. Nodes said ``stashed seq`` before torch 1.5.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from recompute_scan.trace.columns import Kind

_NAMED_BY_US = ("ProfilerStep#", "Optimizer.")
_OPERATORS = ("aten::", "autograd::engine::", "torch::autograd::", "prims::")
# Other libraries' operators, and nodes: only where torch itself numbered the range.
_LIKE_AN_OPERATOR = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)+(?:\.\w+)?|\w+Backward\d*")
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
    kind: Kind
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


def _kind(name: str, sequence: int, operator_number: int) -> Kind:
    if name.startswith(_NAMED_BY_US):
        return Kind.ANNOTATION
    if sequence >= 0 or name.startswith(_OPERATORS):
        return Kind.OP
    if operator_number >= 0 and _LIKE_AN_OPERATOR.fullmatch(name):
        return Kind.OP
    return Kind.ANNOTATION
